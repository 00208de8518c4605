"""The translation between live framework objects and named tensors and values: one `Adapter` per kind of object.

Nothing else in holdfast knows modules, optimizers or schedulers. An adapter reads live objects and talks to a `Sink` in
a save, and to a `BindingSource` in a load; ``holdfast.state`` implements both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch.optim import Optimizer

from holdfast.format.values import Node
from holdfast.frameworks.flat_memory import FlatMemory, Portion
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Replicas

if TYPE_CHECKING:
    from holdfast.frameworks.piecewise import Piecewise

#: Puts the loaded state into a live object, and returns the object that belongs in its place: mostly the same one.
Finish = Callable[[], object]


class NamedTensor(msgspec.Struct, frozen=True, gc=False):
    """A live tensor, its name, and how its copies on other ranks relate to it."""

    name: str
    tensor: torch.Tensor
    replicas: Replicas


class Adapter(Protocol):
    """An adapter: saves and loads objects of one kind. `holdfast.register_adapter` adds one from outside.

    The thread that saves or loads calls its methods, on every rank, for one object after another. They must not gather
    or communicate: a rank describes only what it holds itself.
    """

    @property
    def needs_names(self) -> bool:
        """Whether the names of the objects' state contain names of other objects' tensors, as those of optimizers do.
        Such objects are described and bound last."""

    @property
    def is_divisible(self) -> bool:
        """Whether ``select=`` may take a part of an object. If not, its path selects the whole object."""

    @property
    def spans_ranks(self) -> bool:
        """Whether the job trains the objects, and each rank may hold a part of them, as of modules and optimizers. A
        load into such objects makes the job continue from it; they do not belong into a `PerRank`."""

    def accepts(self, kind: type) -> bool:
        """Whether the adapter handles objects of type `kind`. Called once for each type."""

    def describe(self, path: str, item: Any, sink: Sink) -> bool:
        """Add the state of `item` at `path` to `sink`, by names below `path`. Returns False where there is nothing to
        add: the object does not tell its state, or no part of it is selected."""

    def bind(self, path: str, item: Any, source: BindingSource) -> Finish:
        """Bind the tensors of `item` to the stored ones below `path`, which fill them, and return the last step.

        Changes no object. Once all tensors are filled, the returned function puts the values in place, and returns the
        object that belongs at `path`.
        """


class Deferred(Protocol):
    """A part of an object whose values were read, and whose names may be made later, after training has gone on."""

    def slots(self) -> Iterable[object]:
        """Its live values that only steps of an optimizer change, including tensors."""

    def describe(self, sink: Sink) -> None:
        """Add the part to `sink`."""


class Sink(Protocol):
    """The receiver of objects' state in a save. It takes tensors without copying them: another part copies them
    later."""

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """The entry for this tensor object, with its canonical name; None if it is not in the state."""

    def wants(self, name: str) -> bool:
        """Whether the save includes the part with this name, as it does unless a selection excludes it."""

    def chosen(self, entries: Sequence[NamedTensor]) -> Sequence[NamedTensor]:
        """The entries that the save includes. Optimizers find the names of all entries with `named`."""

    def tensors(self, entries: Iterable[NamedTensor]) -> None:
        """Add tensors that need no nodes, because their owner finds them by name."""

    def slots(self, entries: Iterable[NamedTensor]) -> None:
        """Add tensors as `tensors` does, which a load makes where the live object does not have them yet."""

    def pieces(self, name: str, item: Piecewise) -> None:
        """Add a tensor in pieces that needs no node, because its owner finds it by name."""

    def hold(self, held: FlatMemory) -> None:
        """Add the portions in flat memory, under their names and without nodes. From then on `held` knows its owner."""

    def held(self, tensor: torch.Tensor) -> FlatMemory | None:
        """The flat memory of which this tensor object is the owner, each portion with its canonical name only; None for
        most tensors."""

    def portion(self, name: str, portion: Portion, memory: torch.Tensor) -> None:
        """Add a tensor that lies in the 1-d `memory` as `portion` says, under another name and without a node."""

    def unsteady(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that these tensors are changed not only by steps of an optimizer, but also, say, by a forward."""

    def frozen(self, names: Iterable[str]) -> None:
        """Note that nothing is expected to change the tensors with these names: the next save may refer to them, after
        it has compared their bytes."""

    def steps(self, optimizer: Optimizer, trained: Iterable[NamedTensor]) -> None:
        """Note that the steps of `optimizer`, and nothing else, change the `trained` tensors.

        All other tensors are copied before `save` returns, so they may change in any way.
        """

    def later(self, part: Deferred) -> None:
        """Add a part, in the background if nothing but a step can change its slots."""

    def tree(self, path: str, value: object, replicas: Replicas = "compare") -> None:
        """Add a value, a tensor, a `Piecewise`, or nested containers of them, with their nodes."""

    def live(self, path: str, item: object) -> None:
        """Add a live item that `BindingSource.live` binds again, such as a module or an optimizer inside an object."""

    def whole(self, path: str, value: object) -> None:
        """Add a value as `tree` does, as the state of an object that takes it back as a whole."""

    def node(self, path: str, node: Node) -> None:
        """Add a node alone."""


class BindingSource(Protocol):
    """The checkpoint's side of a load, to which adapters bind live objects. Names are those of the checkpoint."""

    nodes: Mapping[str, Node]
    #: Whether both sides must have the same names and optimizer classes.
    is_strict: bool
    #: By the name of a parameter's state, the slots that rules of a mapping have dropped from it, where others stay.
    dropped: Mapping[str, Collection[str]]
    #: The stored tensors to which rules of a mapping give another dtype.
    recast: AbstractSet[str]

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """The entry for this live tensor object, with its canonical name in the checkpoint; None if it has none."""

    def copies(self, name: str) -> Sequence[str]:
        """Other names under which the live tensor `name` is stored too: it was not tied in the save, but is tied
        now."""

    def require_equal(self, name: str, copy: str) -> None:
        """Refuse the load if the tensors or values stored as `copy` differ from those stored as `name`."""

    def wants(self, name: str) -> bool:
        """Whether the load includes the part with this live name."""

    def stored_below(self, path: str) -> Iterator[str]:
        """The names below `path`: of tensors, of their aliases, and of values."""

    def stored(self, name: str) -> StoredTensor | None:
        """The dtype and shape of the stored tensor `name`; None if there is none."""

    def memory(
        self,
        name: str,
        *,
        live: torch.Tensor | None,
        like: torch.Tensor | None,
        device: torch.device,
        cast_to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Memory for the stored tensor `name`: `live` if it fits, else new memory on `device`, in the stored dtype and
        shape.

        New memory is sharded and strided like `like` if that has the same shape; else it is a plain tensor. It has the
        dtype `cast_to` instead if the load may cast that tensor to it.
        """

    def fill(self, entry: NamedTensor) -> None:
        """Fill a live tensor in place from the stored tensor of its name; if there is none, report it missing."""

    def fill_all(self, entries: Sequence[NamedTensor]) -> None:
        """As `fill`, for many tensors at once."""

    def hold(self, held: FlatMemory) -> None:
        """Fill the portions in flat memory, as `fill` does. From then on `held` knows its owner."""

    def held(self, tensor: torch.Tensor) -> FlatMemory | None:
        """As `Sink.held`, with names of the checkpoint."""

    def portion(self, name: str, portion: Portion, memory: torch.Tensor) -> None:
        """Fill the 1-d `memory`, where `portion` says, from the stored tensor `name`."""

    def fitting(
        self, names: Sequence[str], live: Sequence[object], like: Sequence[torch.Tensor | None]
    ) -> Sequence[bool]:
        """For each of many names, whether a tensor is stored under it and `memory` would return the `live` one, on the
        device where that is. False for the name of a value."""

    def of_planes(self, name: str, *, live: object, like: torch.Tensor) -> torch.Tensor | None:
        """The tensor to fill from the planes that are stored as `name` (see `holdfast.frameworks.planes`): `live` if it
        consists of planes, else a new one with the shape and the parts of `like`. None where no such planes are stored.
        Refuses the load where a part of `like` does not consist of whole blocks.
        """

    def live(self, path: str, item: object) -> Finish:
        """Bind a live item, as `Sink.tree` adds it: its tensors are filled in place, its values replaced."""

    def opaque(
        self, path: str, memory: Callable[[str], torch.Tensor] | None = None, replicas: Replicas = "compare"
    ) -> Finish:
        """Bind everything that is stored at `path`. `memory` returns the memory for a tensor's name (default: new
        memory on the CPU)."""

    def restore(self, write: Callable[[object], object], state: Finish, *, is_random: bool) -> None:
        """Call `write` with the result of `state` at the end of the load, after containers and optimizers; with
        `is_random` after everything else."""

    def schedules(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Note that the object at `path` is a learning-rate scheduler of `optimizer`."""

    def schedulers(self, optimizer: torch.optim.Optimizer) -> Sequence[str]:
        """The paths that `schedules` noted for `optimizer`."""

    def differs(self, path: str, here: str) -> None:
        """Refuse the load: the stored object at `path` is of another kind than the live one, which `here` names, such
        as "an optimizer"."""

    def refuse(self, code: str, path: str, text: str) -> None:
        """Refuse the load for another reason; `text` follows the path in the error."""

    def missing(self, name: str) -> None:
        """Report a live name that the checkpoint does not have."""

    def unfillable(self, name: str) -> None:
        """Report a live tensor on the meta device that no checkpoint can have."""

    def mark(self, name: str) -> None:
        """Report a stored value as used."""
