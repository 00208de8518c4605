"""The binding of live tensors: what adapters and containers add is matched with the stored tensors that fill it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import cast

import torch

from holdfast.errors import NotFoundError, StateError
from holdfast.format.values import Node, PlanesNode
from holdfast.frameworks import NamedTensor
from holdfast.frameworks.flat_memory import FlatMemory, Portion
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.planes import blank, can_be_made, is_name_of_planed
from holdfast.frameworks.stateful import writing
from holdfast.frameworks.torch_dtypes import DTYPE_NAMES
from holdfast.geometry import Shape
from holdfast.mapping.parts import StoredTensor, castable
from holdfast.state.collect import TensorCollector, Tied, is_describable, unsupported_tensor
from holdfast.state.differences import Mismatches
from holdfast.state.flat_owners import FlatOwners, piecewise_of
from holdfast.state.local_placements import empty, is_dtensor, local_part, local_parts, same_placement, same_placements
from holdfast.state.match import Matcher, Terms
from holdfast.state.meta import MetaTensors, become, check_alone
from holdfast.state.piecewise_layouts import describe
from holdfast.state.plane_parts import PlaneDivider, name_of_planes, plane_name
from holdfast.state.registered_types import Registration, any_registered, registered
from holdfast.state.sharded_tensors import any_sharded, in_pieces, is_sharded
from holdfast.wording import count, with_article

_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")


class TensorBinder:
    """The live tensors of one walk. They are added by `fill` and `fill_pieces`, and matched by `match`."""

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        nodes: Mapping[str, Node],
        matcher: Matcher,
        mismatches: Mismatches,
        terms: Terms,
        *,
        device: torch.device | None,
    ) -> None:
        self._stored, self._nodes = stored, nodes
        self._select, self._kept = terms.select, terms.kept
        self._matcher, self._mismatches = matcher, mismatches
        self.to_allocate = MetaTensors(device)
        #: The names of live tensors on the meta device that no stored tensor fills.
        self.on_meta: set[str] = set()
        self._pending: list[NamedTensor] = []
        self._planes = PlaneDivider()
        self._planed: list[tuple[NamedTensor, NamedTensor]] = []
        self._piecewise: dict[str, Piecewise] = {}
        self._held = FlatOwners()
        self._names: dict[int, NamedTensor] = {}
        #: Tensors of registered types on the meta device, which are rebuilt from their planes.
        self._to_rebuild: list[tuple[str, torch.Tensor, Registration, dict[str, torch.Tensor]]] = []

    def fill(self, entry: NamedTensor) -> None:
        """As `BindingSource.fill`. A tensor of a registered type is filled by its planes, a ``ShardedTensor`` by its
        shards."""
        if is_sharded(entry.tensor):
            if self._select is None or entry.name in self._select:
                self.fill_pieces(entry.name, in_pieces(entry.name, entry.tensor))
            return
        registration = self._registration(entry)
        if registration is None:
            if self._select is not None and entry.name not in self._select and not is_describable(entry.tensor):
                # It is not loaded, so it need not be describable; but an optimizer may ask for its name.
                source = self._matcher.source_of([entry.name])
                self._names[id(entry.tensor)] = NamedTensor(source, entry.tensor, entry.replicas)
            else:
                self._pending.append(entry)
            return
        self._fill_planes(entry, registration)

    def _registration(self, entry: NamedTensor) -> Registration | None:
        """The registration of a tensor. One whose planes cannot be read has none, if it is not to be loaded."""
        try:
            return registered(entry.tensor, name=entry.name)
        except StateError:
            if self._select is None or entry.name in self._select:
                raise
            return None

    def _fill_planes(self, entry: NamedTensor, registration: Registration) -> None:
        """Add the planes of a tensor of a registered type, if the checkpoint has the same ones."""
        planes, node = self._planes.planes(entry, registration), self._nodes.get(entry.name)
        is_plain = self._matcher.canonical(entry.name) in self._stored
        is_selected = self._selects_planes(entry.name, planes)
        if is_plain or (node is not None and node != PlanesNode(registration.name, tuple(planes))):
            here = f"{with_article(repr(registration.name))} of planes {', '.join(planes)}"
            is_slot = registration.planed is not None and registration.planed.can_be_made
            if is_selected and is_plain and is_slot:
                self._mismatches.add("incompatible.blocks", entry.name, f"{here} here, a tensor in the checkpoint")
            elif is_selected:
                self._mismatches.add_kind(entry.name, here, node)
            return
        for key, plane in planes.items():
            if isinstance(plane, NamedTensor):
                self._pending.append(plane)
            elif is_selected:
                self._piecewise[plane_name(entry.name, key)] = plane
        first = next(iter(planes.values()))
        if isinstance(first, NamedTensor):
            self._planed.append((entry, first))
        if entry.tensor.is_meta:
            check_alone(entry)
            if is_dtensor(entry.tensor):
                raise unsupported_tensor(entry.name, entry.tensor, "planes on several ranks and on the meta device")
            whole = {key: plane.tensor for key, plane in planes.items() if isinstance(plane, NamedTensor)}
            self._to_rebuild.append((entry.name, entry.tensor, registration, whole))

    def _selects_planes(self, name: str, planes: Collection[str]) -> bool:
        """Whether the load includes the planes of the tensor `name`. Refuses a selection of some of them: the tensor
        would be a mixture of two."""
        if self._select is None:
            return True
        chosen = [plane for plane in planes if plane_name(name, plane) in self._select]
        is_named = name in self._select
        if len(chosen) == len(planes) or not (chosen or is_named):
            return bool(chosen)
        left = ", ".join(plane for plane in planes if plane not in chosen)
        taken = f"{', '.join(chosen)} of its planes" if chosen else "its name"
        self._mismatches.add("incompatible.planes", name, f"select takes {taken}, but not its planes {left}")
        return False

    def fill_all(self, entries: Sequence[NamedTensor]) -> None:
        """As `BindingSource.fill_all`."""
        kinds = set(map(type, local_parts([entry.tensor for entry in entries])))
        if self._select is None and not any_registered(kinds) and not any_sharded(kinds):
            self._pending += entries
        else:
            for entry in entries:
                self.fill(entry)

    def fill_pieces(self, path: str, item: Piecewise) -> None:
        """Add the pieces of a logical tensor. They are matched by `match_pieces`."""
        self._piecewise[path] = item

    def hold(self, held: FlatMemory) -> None:
        """As `BindingSource.hold`."""
        self._held.add(held)

    def held(self, tensor: torch.Tensor) -> FlatMemory | None:
        """As `BindingSource.held`."""
        return self._held.of(tensor)

    def portion(self, name: str, portion: Portion, memory: torch.Tensor) -> None:
        """As `BindingSource.portion`."""
        self._piecewise[name] = piecewise_of(portion, memory)

    def match_held(self) -> None:
        """Find the source of every portion of flat memory, and note their stored names."""
        for held in self._held.all():
            sources: dict[tuple[str, ...], str] = {}
            for portion in held.portions:
                chosen = [name for name in portion.names if self._select is None or name in self._select]
                if chosen:
                    (described,) = describe({chosen[0]: piecewise_of(portion, held.memory)})
                    sources[portion.names] = self._matcher.match(chosen, described.local)
                else:
                    sources[portion.names] = self._matcher.source_of(portion.names)
            name = self._held.rename(held, sources.__getitem__)
            self._names[id(held.owner)] = NamedTensor(name, held.owner, "compare")

    def match(self, *, named: bool) -> None:
        """Find the source of every tensor that was added since the last call; with `named`, note its stored name."""
        pending, self._pending = self._pending, []
        planed, self._planed = self._planed, []
        self.to_allocate.look_for_meshes(pending)
        collector = TensorCollector(meta=True, remembers=False)
        collector.add(pending)
        if self._select is None and not collector.aliases and self._matcher.match_alike(collector.found):
            if named:
                self._names |= {id(entry.tensor): entry for entry in pending}
        else:
            self._match_each(collector.tied(), named=named)
        if named:
            for entry, plane in planed:
                name = name_of_planes(self._names[id(plane.tensor)].name)
                self._names[id(entry.tensor)] = NamedTensor(name, entry.tensor, entry.replicas)

    def _match_each(self, found: Iterable[Tied], *, named: bool) -> None:
        """As `match`, for one tensor after the other."""
        select = self._select
        for tied in found:
            names = [entry.name for entry in tied.entries]
            chosen = names if select is None else [name for name in names if name in select]
            source = self._matcher.match(chosen, tied.local) if chosen else self._matcher.source_of(names)
            if tied.local.memory[0].is_meta:
                if chosen and source in self._stored:
                    self.to_allocate.add(tied)
                else:
                    self.on_meta.update(names)
            if named:
                replicas = tied.entries[0].replicas
                for entry in tied.entries:
                    self._names[id(entry.tensor)] = NamedTensor(source, entry.tensor, replicas)

    def match_pieces(self) -> None:
        """Find the source of everything that `fill_pieces` has added."""
        for names, local in describe(self._piecewise):
            self._matcher.match(names, local)

    def named(self, tensor: torch.Tensor) -> NamedTensor | None:
        """As `BindingSource.named`."""
        return self._names.get(id(tensor))

    def stored(self, name: str) -> StoredTensor | None:
        """As `BindingSource.stored`."""
        return self._stored.get(self._matcher.canonical(name))

    def memory(
        self,
        name: str,
        *,
        live: torch.Tensor | None,
        like: torch.Tensor | None,
        device: torch.device,
        cast_to: torch.dtype | None = None,
    ) -> torch.Tensor:
        """As `BindingSource.memory`."""
        stored = self.stored(name)
        if stored is None:
            raise NotFoundError(
                f"The values refer to tensor {name!r}, which is not among the tensors to load.",
                code="not_found.tensor",
                action="Select that tensor too, or leave out the object that it belongs to.",
                tensor=name,
            )
        like = _alike(like, stored.shape)
        dtype = self._dtype(name, stored.dtype, cast_to)
        fits = (
            live is not None
            and live.dtype is getattr(torch, dtype)
            and live.shape == stored.shape
            and live.device == device
            and same_placement(live, like)
        )
        if live is not None and fits:
            return live
        if device.type == "meta":
            device = self.to_allocate.device_of(like)
        if self._matcher.canonical(name) in self._kept:
            return empty(dtype, stored.shape, like=like, device=device).zero_()
        return empty(dtype, stored.shape, like=like, device=device)

    def fitting(self, names: Sequence[str], live: Sequence[object], like: Sequence[torch.Tensor | None]) -> list[bool]:
        """As `BindingSource.fitting`."""
        # By columns, because states have thousands of slots, and nearly all fit.
        tensors = [isinstance(mine, torch.Tensor) for mine in live]
        if not all(tensors):
            some, their_like = list(compress(names, tensors)), list(compress(like, tensors))
            fits = iter(self.fitting(some, list(compress(live, tensors)), their_like))
            return [is_tensor and next(fits) for is_tensor in tensors]
        held = cast("Sequence[torch.Tensor]", live)
        special = {*self._nodes, *self._matcher.aliases}
        kinds = zip(map(DTYPE_NAMES.get, map(_dtype_of, held)), map(_shape_of, held), strict=True)
        alike = [kept == kind for kept, kind in zip(map(self._stored.get, names), kinds, strict=True)]
        kinds_alike = set(map(type, local_parts(cast("Sequence[torch.Tensor]", like))))
        if any_registered(kinds_alike):  # plain memory cannot be placed as such a tensor is
            like = [None if registered(other) else other for other in like]
        placed = same_placements(held, like)
        return [
            fits and is_placed and name not in special
            for fits, is_placed, name in zip(alike, placed, names, strict=True)
        ]

    def _dtype(self, name: str, stored: str, cast_to: torch.dtype | None) -> str:
        """The dtype `cast_to` if the tensor `name` may be cast to it, else the dtype that is `stored`."""
        if cast_to is None or not self._matcher.may_cast([name]):
            return stored
        wanted = str(cast_to).removeprefix("torch.")
        return wanted if castable(stored, wanted) else stored

    def of_planes(self, name: str, *, live: object, like: torch.Tensor) -> torch.Tensor | None:
        """As `BindingSource.of_planes`."""
        node = self._nodes.get(name)
        if not isinstance(node, PlanesNode) or not is_name_of_planed(node.name):
            return None
        registration = registered(live, name=name)
        if isinstance(live, torch.Tensor) and registration is not None and registration.planed is not None:
            return live
        with torch.no_grad():
            made = blank(node.name, local_part(like))
            if made is not None and is_dtensor(like):
                places = like.device_mesh, like.placements
                made = type(like).from_local(made, *places, run_check=False, shape=like.shape, stride=like.stride())
        if made is None and not can_be_made(node.name):
            here = "a tensor" if isinstance(live, torch.Tensor) else "no slot"
            text = f"{here} here, a registered {node.name!r} in the checkpoint, which no load makes"
            self._mismatches.add("incompatible.planed_slot", name, text)
            return like
        if made is None:
            here = f"{count(local_part(like).numel(), 'element')} here, which hold no such blocks"
            self._mismatches.add("incompatible.blocks", name, f"{here}, a registered {node.name!r} in the checkpoint")
            return like
        return made

    def rebuild(self) -> None:
        """Rebuild tensors of registered types on the meta device from their planes, once those have memory."""
        for name, tensor, registration, planes in self._to_rebuild:
            if tensor.is_meta and not any(plane.is_meta for plane in planes.values()):
                with writing(name, f"the function that makes {registration.kind.__qualname__} of planes"):
                    become(tensor, cast("torch.Tensor", registration.decode(planes)))


def _alike(like: torch.Tensor | None, shape: Shape) -> torch.Tensor | None:
    """`like` if it has `shape`, and plain memory could be placed as it is."""
    return like if like is not None and like.shape == shape and registered(like) is None else None
