"""Live framework objects <-> named tensors and values: one `Adapter` for each kind of object.

Nothing else in holdfast knows what a module, an optimizer or a scheduler is. An adapter reads live objects and talks to
a `Sink` when they are saved, to a `BindingSource` when they are loaded; ``holdfast.state`` implements both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.optim import Optimizer

from holdfast.format.values import Node
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Replicas

#: Puts what was read into the live object and returns what belongs in its place: mostly the same object.
Finish = Callable[[], object]


class NamedTensor(msgspec.Struct, frozen=True, gc=False):
    """A live tensor, its name, and what is known of its copies on other ranks."""

    name: str
    tensor: torch.Tensor
    replicas: Replicas


class Adapter(Protocol):
    """How objects of one kind are saved and loaded. `holdfast.register_adapter` adds one from outside.

    Its methods are called by the thread that saves or loads, on every rank, for one object after another. They gather
    nothing and communicate with nobody: a rank describes what it holds itself.
    """

    @property
    def needs_names(self) -> bool:
        """Whether the objects name their state after tensors of other objects, as optimizers do: they come last."""

    @property
    def is_divisible(self) -> bool:
        """Whether ``select=`` may take a part of an object. Else its path stands for the whole object."""

    @property
    def spans_ranks(self) -> bool:
        """Whether an object is what the job trains, of which each rank may hold a part: modules and optimizers. A load
        into such objects is what a job goes on from; they do not belong into a `PerRank`."""

    def accepts(self, kind: type) -> bool:
        """Whether objects of type `kind` are of this kind. Asked once for each type."""

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """Add what `item` at `path` holds to `sink`, by names below `path`. False where there is nothing to be added:
        it says nothing of its state, or nothing of it is selected."""

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """Have the tensors of `item` filled from what is stored below `path`, and say how values are put in place.

        Changes nothing itself: the result does, when all tensors were filled, and returns what belongs at `path`.
        """


class Deferred(Protocol):
    """A part of an object whose values were read, and whose names may come later, when training goes on already."""

    def slots(self) -> Iterable[object]:
        """The live values of it that only steps of an optimizer change, tensors among them."""

    def describe(self, sink: Sink) -> None:
        """Add it to `sink`."""


class Sink(Protocol):
    """Where the state of objects goes when it is saved. Tensors are given, not copied: what copies them comes later."""

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

    def steps(self, optimizer: Optimizer, trained: Iterable[NamedTensor]) -> None:
        """Note that the steps of `optimizer`, and nothing else, change the `trained` tensors.

        What nobody notes is copied before `save` returns, so it may change in any way.
        """

    def later(self, part: Deferred) -> None:
        """Add a part when there is time: in the background, as long as nothing but a step can change its slots."""

    def tree(self, path: str, value: object, replicas: Replicas = "compare") -> None:
        """Add a value, a tensor, a `Piecewise`, or nested containers of them, with their nodes."""

    def whole(self, path: str, value: object) -> None:
        """Add the same as the state of an object that takes it back as a whole."""

    def node(self, path: str, node: Node) -> None:
        """Add a node alone."""


class BindingSource(Protocol):
    """What live objects are bound to when they are loaded. Names are those of the checkpoint."""

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

    def stored(self, name: str) -> StoredTensor | None:
        """Dtype and shape of the stored tensor of that name; None where there is none."""

    def memory(
        self,
        name: str,
        *,
        live: torch.Tensor | None,
        like: torch.Tensor | None,
        device: torch.device,
        cast_to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Memory for stored tensor `name`: `live` where it fits, else new, on `device`, in the stored dtype and shape.

        Where `like` has that shape, the memory is sharded and strided like it; else it is a plain tensor. It has the
        dtype `cast_to` instead where the load may cast that tensor to it.
        """

    def fill(self, entry: NamedTensor) -> None:
        """Have a live tensor filled in place from the stored tensor of that name; without one, report it missing."""

    def live(self, path: str, item: object) -> Finish:
        """Bind a live item, as `Sink.tree` adds it: its tensors are filled in place, its values replaced."""

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        """Bind whatever is stored at `path`, its tensors in what `memory` gives for their names (default: CPU)."""

    def restore(self, write: Callable[[object], object], state: Finish, *, is_random: bool) -> None:
        """Have `write` called with what `state` gives, after containers and optimizers; of random generators last."""

    def differs(self, path: str, here: str) -> None:
        """Refuse the load: what is stored at `path` is of another kind than what is `here`, such as "an optimizer"."""

    def refuse(self, code: str, path: str, text: str) -> None:
        """Refuse the load for another reason; `text` follows the path in the error."""

    def missing(self, name: str) -> None:
        """Report a live name that the checkpoint lacks."""

    def unfillable(self, name: str) -> None:
        """Report a live tensor on the meta device that no checkpoint has."""

    def mark(self, name: str) -> None:
        """Report a stored value as used."""
