"""Folders that DeepSpeed's ``save_checkpoint`` wrote: ZeRO-1, ZeRO-2, ZeRO-3 and `BF16_Optimizer`, without DeepSpeed.

The master weights of the trained parameters are ``model/<name>``, beside frozen parameters and buffers in their own
dtypes. The low-precision copies of the trained parameters, which ZeRO-3 does not store, are ``module/<name>``. The
slots of the optimizer are ``optimizer/state/model/<name>/<slot>``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from math import prod
from typing import Final, NamedTuple

from holdfast.errors import HoldfastError
from holdfast.format.names import component, join, shown
from holdfast.geometry import Shape
from holdfast.interop.deepspeed_archives import Archives
from holdfast.interop.deepspeed_folder import FoundFiles, complete_files, find_files, is_deepspeed
from holdfast.interop.deepspeed_layout import FlatParts, grouped, part_numel, partitioned, share
from holdfast.interop.deepspeed_module import add_module, mixed, second_names
from holdfast.interop.deepspeed_states import ModelStates, OptimStates, model_states, optim_states
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.deepspeed_values import FoundValues
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.pickled_tree import CheckedNodes
from holdfast.interop.torch_globals import PickledTensor
from holdfast.wording import count


class DeepSpeedFormat:
    """Folders of DeepSpeed's ``save_checkpoint``: the folder of a tag, or the one above it with ``latest``."""

    kind: Final = "a DeepSpeed checkpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`; also a folder that lacks files."""
        return is_deepspeed(names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the pickles of all files, and the count of steps of each rank."""
        return _Opening(folder, find_files(folder)).state()


class _Flat(NamedTuple):
    """A flat group of all ranks: its parameters with their pieces, and how many elements each rank has, without and
    with padding."""

    names: Sequence[str]
    shapes: Sequence[Shape]
    pieces: Sequence[FlatParts]
    filled: Sequence[int]
    padded: int


class _Opening:
    """The opening of one folder."""

    def __init__(self, folder: ForeignFolder, found: FoundFiles) -> None:
        self._folder = folder
        self._archives = Archives(folder)
        keys = [*found.optim.values()] or [*found.model.values()]
        self._files = complete_files(found, self._world_size(found, keys[0]))
        self._keys = [*self._files.model, *self._files.optim]
        self._table = TensorTable(folder, self._archives.opened, self._keys)
        self._root = found.root

    def state(self) -> ForeignState:
        """The state in the folder."""
        files, path = self._files, self._folder.path
        models = [self._archives.read(key, model_states) for key in files.model]
        optims = [self._archives.read(key, optim_states) for key in files.optim]
        self._check_alike(models, optims)
        model, optim = models[0], optims[0]
        in_order = model.option("zero_optimization", "round_robin_gradients", default=False) is False
        flats = self._flats(model, optim)
        for rank, each in enumerate(optims):
            self._check_rank(rank, each, flats, in_order=in_order)
        values = FoundValues(path(files.model[0]))
        values.add_model(model)
        kind = model.option("optimizer", "type", default="")
        values.add_optimizer(optim, [flat.names for flat in flats], kind=kind if isinstance(kind, str) else "")
        self._add_trained(flats, optims, values)
        trained = frozenset(chain.from_iterable(flat.names for flat in flats))
        add_module(self._table, self._root, files.model, models, trained, is_partitioned=files.is_partitioned)
        for name, tensor in values.tensors.items():
            self._table.whole(name, files.model[0], tensor)
        places = self._table.places(second_names(self._table, model))
        return ForeignState(
            self._folder,
            places,
            self._keys,
            kind=DeepSpeedFormat.kind,
            identity=self._archives.digest(self._keys),
            nodes=CheckedNodes(lambda: values.table),
        )

    # --- reading ---

    def _world_size(self, found: FoundFiles, key: str) -> int:
        if found.optim:
            return max(self._archives.read(key, optim_states).world_sizes)
        number = self._archives.read(key, model_states).engine.get("dp_world_size")
        return number if type(number) is int and number > 0 else 1

    # --- checks ---

    def _check_alike(self, models: Sequence[ModelStates], optims: Sequence[OptimStates]) -> None:
        """Refuse files that come from different saves."""
        for rank, optim in enumerate(optims):
            if (optim.stage == 3) != self._files.is_partitioned:
                raise self._mixed(f"{self._files.optim[rank]} is of ZeRO stage {optim.stage}, unlike the model files")
            if len(set(optim.world_sizes)) > 1:
                what = "has groups that are cut over different numbers of ranks, as those of experts"
                raise unreadable(self._folder.path(self._files.optim[rank]), what)
            mine = (optim.stage, optim.version, optim.world_sizes[0], len(optim.masters), optim.groups_of)
            theirs = optims[0].stage, optims[0].version, len(optims), len(optims[0].masters), optims[0].groups_of
            if mine != theirs:
                raise self._mixed(
                    f"rank {rank} wrote ZeRO-{mine[0]} of DeepSpeed {mine[1]} on {count(mine[2], 'rank')}, rank 0 "
                    f"ZeRO-{theirs[0]} of DeepSpeed {theirs[1]} on {theirs[2]}"
                )
        for rank, model in enumerate(models):
            if _training(model) != _training(models[0]):
                raise self._mixed(f"the model files of ranks 0 and {rank} are of different steps or models")
        version = models[0].engine.get("ds_version")
        if version != optims[0].version and optims[0].version is not None:
            raise self._mixed(f"the model file is of DeepSpeed {version}, the optimizer's of {optims[0].version}")

    def _mixed(self, what: str) -> HoldfastError:
        return mixed(self._root, what)

    def _flats(self, model: ModelStates, optim: OptimStates) -> list[_Flat]:
        """The flat groups, by the shapes in the model file."""
        world_size = len(self._files.optim)
        if len(model.groups) != len(optim.masters):
            raise self._mixed(
                f"the model file has {count(len(model.groups), 'group')}, the optimizer {len(optim.masters)}"
            )
        names = list(chain.from_iterable(model.groups))
        if len(names) != len(set(names)):
            raise damaged(self._folder.path(self._files.model[0]), "has a parameter in two groups")
        flats = []
        for index, group in enumerate(model.groups):
            shapes = list(group.values())
            if optim.stage == 3:
                part = sum(share(shape, world_size) for shape in shapes)
                flats.append(_Flat(list(group), shapes, partitioned(shapes, world_size), [part] * world_size, part))
                continue
            numels = list(map(prod, shapes))
            paddings = [0] * len(group) if optim.paddings is None else optim.paddings[index]
            if len(paddings) != len(group):
                raise damaged(self._folder.path(self._files.optim[0]), "has paddings of other parameters")
            part = part_numel(numels, paddings, world_size)
            filled = [min(max(sum(numels) + sum(paddings) - rank * part, 0), part) for rank in range(world_size)]
            flats.append(_Flat(list(group), shapes, grouped(shapes, paddings, part), filled, part))
        return flats

    def _check_rank(self, rank: int, optim: OptimStates, flats: Sequence[_Flat], *, in_order: bool) -> None:
        """Refuse a file whose flat tensors have other sizes than the parameters ask for, or that is of another rank.

        The fragments tell the rank only where the parameters lie `in_order`: they are wrong under round robin.
        """
        path = self._folder.path(self._files.optim[rank])
        if optim.fragments is not None and in_order:
            expected = [dict(_fragments(flat, rank)) for flat in flats]
            if expected != list(optim.fragments):
                what = (
                    f"holds other parts of the parameters than rank {rank} has: it was renamed, or is of another save"
                )
                raise damaged(path, what)
        for index, flat in enumerate(flats):
            for what, tensor in (("master", optim.masters[index]), *optim.slots[index].items()):
                if not isinstance(tensor, PickledTensor) or not tensor.shape:
                    continue
                if len(tensor.shape) != 1 or tensor.shape[0] not in (flat.padded, flat.filled[rank]):
                    found = f"{shown(what):.100} of group {index} has the shape {list(tensor.shape)}"
                    raise damaged(path, f"does not fit the model file: {found} instead of [{flat.padded}]")

    # --- tensors ---

    def _add_trained(self, flats: Sequence[_Flat], optims: Sequence[OptimStates], values: FoundValues) -> None:
        """Add the master weights and the slots of all parameters."""
        keys = self._files.optim
        for index, flat in enumerate(flats):
            masters = [optim.masters[index] for optim in optims]
            for name, shape, pieces in zip(flat.names, flat.shapes, flat.pieces, strict=True):
                self._table.cut(join("model", component(name)), shape, keys, masters, pieces)
            for slot in optims[0].slots[index]:
                parts = [optim.slots[index].get(slot) for optim in optims]
                self._add_slot(flat, slot, parts, values)

    def _add_slot(self, flat: _Flat, slot: str, parts: Sequence[object], values: FoundValues) -> None:
        keys = self._files.optim
        tensors = [part for part in parts if isinstance(part, PickledTensor)]
        if len({type(part) for part in parts}) > 1 or len({tensor.shape == () for tensor in tensors}) > 1:
            raise self._mixed(f"the ranks have {shown(slot):.100} in different forms")
        if not tensors or tensors[0].shape == ():
            self._check_equal(slot, parts)
        for name, shape, pieces in zip(flat.names, flat.shapes, flat.pieces, strict=True):
            path = join("optimizer", "state", "model", component(name), component(slot))
            if not tensors:
                values.add(path, parts[0])
            elif tensors[0].shape == ():
                rank = int(pieces.ranks[0]) if len(pieces.ranks) else 0
                self._table.whole(path, keys[rank], tensors[rank])
            else:
                self._table.cut(path, shape, keys, tensors, pieces)

    def _check_equal(self, slot: str, parts: Sequence[object]) -> None:
        """Refuse ranks that have counted other steps: their files come from different saves."""
        first = None
        for rank, part in enumerate(parts):
            found = part if not isinstance(part, PickledTensor) else self._table.bytes_of(self._files.optim[rank], part)
            first = found if rank == 0 else first
            if found != first:
                raise self._mixed(f"rank {rank} has another {shown(slot):.100} than rank 0")


def _training(model: ModelStates) -> tuple[object, ...]:
    """The content that the model files of all ranks share: the parameters in their order, and the step."""
    return [list(group.items()) for group in model.groups], model.engine.get("global_steps")


def _fragments(flat: _Flat, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts of parameters that a rank has, as ``(start, numel)`` in its flat tensor."""
    for name, pieces in zip(flat.names, flat.pieces, strict=True):
        mine = pieces.ranks == rank
        if mine.any():
            yield name, (int(pieces.firsts[mine].min()), int(pieces.sizes[mine].prod(axis=1).sum()))
