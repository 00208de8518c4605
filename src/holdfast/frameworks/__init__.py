"""Live framework objects <-> named tensors and values; one file per framework.

Nothing else in holdfast knows what a module, an optimizer or a scheduler is. A framework's file reads live objects
and talks to the two seams below; ``holdfast.state`` implements them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
import torch

from holdfast.format.values import Node
from holdfast.plan.layout import Replicas

#: Puts what was read into the live object and returns what belongs in its place: mostly the same object.
Finish = Callable[[], object]


class NamedTensor(msgspec.Struct, frozen=True, gc=False):
    """A live tensor, its name, and what is known of its copies on other ranks."""

    name: str
    tensor: torch.Tensor
    replicas: Replicas


class Sink(Protocol):
    """Where a framework's state goes when it is flattened."""

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """The entry of the state that is this very tensor object, by its canonical name."""

    def wants(self, name: str) -> bool:
        """Whether what has this name is saved: everything is, unless a selection says otherwise."""

    def chosen(self, entries: Sequence[NamedTensor]) -> Sequence[NamedTensor]:
        """Those of the entries that are saved. Optimizers find the names of all of them with `named`."""

    def tensors(self, entries: Iterable[NamedTensor]) -> None:
        """Add tensors that need no nodes, because their owner finds them by name."""

    def unsteady(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note which of the tensors something else than the step of an optimizer changes, too: a forward."""

    def tree(self, path: str, value: object, replicas: Replicas = "compare") -> None:
        """Add a value, a tensor, or nested containers of them, with their nodes."""

    def node(self, path: str, node: Node) -> None:
        """Add a node alone."""


class BindingSource(Protocol):
    """What a framework's live objects are bound to. Names are those of the checkpoint."""

    nodes: Mapping[str, Node]
    #: Whether everything must be on both sides, and the same.
    is_strict: bool

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """The entry of the live state that is this very tensor object, by its canonical name in the checkpoint."""

    def copies(self, name: str) -> Sequence[str]:
        """Other names under which the live tensor of that name is stored, too: not tied then, but tied now."""

    def require_equal(self, name: str, copy: str) -> None:
        """Refuse the load when what is stored as `copy`, tensors or values, differs from what is stored as `name`."""

    def wants(self, name: str) -> bool:
        """Whether what has this live name is loaded."""

    def stored_below(self, path: str) -> Iterator[str]:
        """Names below `path`: of tensors, of their aliases, of leaves that are values."""

    def memory(
        self, name: str, *, live: torch.Tensor | None, like: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """Memory for stored tensor `name`: `live` where it fits, else new, on `device`, in the stored dtype and shape.

        Where `like` has that shape, the memory is sharded and strided like it; else it is a plain tensor.
        """

    def fill(self, entry: NamedTensor) -> None:
        """Have a live tensor filled in place from the stored tensor of that name; without one, report it missing."""

    def live(self, path: str, item: object) -> Finish:
        """Bind a live item: its tensors are filled in place, its values replaced."""

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        """Bind whatever is stored at `path`, its tensors in what `memory` gives for their names (default: CPU)."""

    def missing(self, name: str) -> None:
        """Report a live name that the checkpoint lacks."""

    def unfillable(self, name: str) -> None:
        """Report a live tensor on the meta device that no checkpoint has."""

    def mark(self, name: str) -> None:
        """Report a stored value as used."""
