"""Folders that DeepSpeed's ``save_checkpoint`` wrote: ZeRO-1, ZeRO-2, ZeRO-3 and `BF16_Optimizer`, without DeepSpeed.

The master weights of the trained parameters are ``model/<name>``, beside frozen parameters and buffers in their own
dtypes. The low-precision copies of the trained parameters, which ZeRO-3 does not store, are ``module/<name>``. The
slots of the optimizer are ``optimizer/state/model/<name>/<slot>``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import prod
from typing import Final, NamedTuple

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.format.dtypes import numpy_type
from holdfast.format.names import component, join, shown
from holdfast.geometry import Shape
from holdfast.interop.deepspeed_archives import Archives
from holdfast.interop.deepspeed_folder import FoundFiles, complete_files, find_files, is_deepspeed
from holdfast.interop.deepspeed_layers import (
    ExpertLayers,
    holders,
    is_of_expert,
    other_experts,
    possible_orders,
    read_layers,
)
from holdfast.interop.deepspeed_layout import FlatParts, grouped, part_numel, partitioned, share
from holdfast.interop.deepspeed_module import add_module, mixed, second_names
from holdfast.interop.deepspeed_samples import WeightSample, agrees, sample_of
from holdfast.interop.deepspeed_states import ModelStates, OptimStates, model_states, optim_states
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.deepspeed_unpartitioned import open_without_zero
from holdfast.interop.deepspeed_values import FoundValues
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.pickled_tree import CheckedNodes
from holdfast.interop.torch_globals import PickledTensor
from holdfast.wording import count

_log = logging.getLogger(__name__)
#: The master weights of so many ranks are compared with the copies in the model file.
_MAX_COMPARED: Final = 64


class DeepSpeedFormat:
    """Folders of DeepSpeed's ``save_checkpoint``: the folder of a tag, or the one above it with ``latest``."""

    kind: Final = "a DeepSpeed checkpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`; also a folder that lacks files."""
        return is_deepspeed(names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the pickles of all files, and the count of steps of each rank."""
        found = find_files(folder)
        if found.whole_optimizers:
            return open_without_zero(folder, found, kind=DeepSpeedFormat.kind)
        return _Opening(folder, found).state()


class _Flat(NamedTuple):
    """A flat group that some `ranks` share: its parameters, by their names in the model and by those in the files of
    these ranks, with their pieces, and how many elements each rank has, without and with padding.

    All ranks share a group, unless it is of experts: then there is one for each expert-parallel rank.
    """

    group: int
    ranks: Sequence[int]
    names: Sequence[str]
    local: Sequence[str]
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
        self._keys = [*self._files.model, *self._files.optim, *found.experts.values()]
        self._table = TensorTable(folder, self._archives.opened, self._keys)
        self._found = found
        self._root = found.root

    def state(self) -> ForeignState:
        """The state in the folder."""
        files, path = self._files, self._folder.path
        models = [self._archives.read(key, model_states) for key in files.model]
        optims = [self._archives.read(key, optim_states) for key in files.optim]
        self._check_alike(models, optims)
        model, optim = models[0], optims[0]
        layers = read_layers(self._found, model, self._archives) if self._found.experts else ExpertLayers({}, ())
        in_order = model.option("zero_optimization", "round_robin_gradients", default=False) is False
        flats = self._flats(model, optims, layers)
        for rank, each in enumerate(optims):
            self._check_rank(rank, each, flats, in_order=in_order)
        values = FoundValues(path(files.model[0]))
        values.add_model(model)
        of_model = set(values.tensors)
        kind = model.option("optimizer", "type", default="")
        values.add_optimizer(optim, _by_group(flats), kind=kind if isinstance(kind, str) else "")
        self._add_trained(flats, optims, values)
        self._check_one_save(model, optims, flats)
        trained = frozenset(chain.from_iterable(flat.names for flat in flats))
        add_module(self._table, self._root, files.model, models, trained, is_partitioned=files.is_partitioned)
        self._add_experts(layers, trained, values)
        for name, tensor in values.tensors.items():
            self._table.whole(name, files.model[0] if name in of_model else files.optim[0], tensor)
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
        of_model = found.model.get(None) if found.experts else None if found.optim else key
        if of_model is None:
            return max(self._archives.read(key, optim_states).world_sizes)
        number = self._archives.read(of_model, model_states).engine.get("dp_world_size")
        return number if type(number) is int and number > 0 else 1

    # --- checks ---

    def _check_alike(self, models: Sequence[ModelStates], optims: Sequence[OptimStates]) -> None:
        """Refuse files that come from different saves."""
        for rank, optim in enumerate(optims):
            if (optim.stage == 3) != self._files.is_partitioned:
                raise self._mixed(f"{self._files.optim[rank]} is of ZeRO stage {optim.stage}, unlike the model files")
            if len(set(optim.world_sizes)) > 1 and not self._found.experts:
                what = "has groups that are cut over different numbers of ranks, and the folder has no files of experts"
                raise unreadable(self._folder.path(self._files.optim[rank]), what)
            mine, theirs = (
                (each.stage, each.version, max(each.world_sizes), len(each.masters), each.groups_of, each.world_sizes)
                for each in (optim, optims[0])
            )
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

    def _flats(self, model: ModelStates, optims: Sequence[OptimStates], layers: ExpertLayers) -> list[_Flat]:
        """The flat groups, by the shapes in the model file."""
        optim = optims[0]
        if len(model.groups) != len(optim.masters):
            raise self._mixed(
                f"the model file has {count(len(model.groups), 'group')}, the optimizer {len(optim.masters)}"
            )
        names = list(chain.from_iterable(model.groups))
        if len(names) != len(set(names)):
            raise damaged(self._folder.path(self._files.model[0]), "has a parameter in two groups")
        dense = [index for index, group in enumerate(model.groups) if not any(map(is_of_expert, group))]
        flats = [self._flat(model, optim, index, range(len(self._files.optim))) for index in dense]
        if len(dense) == len(model.groups):
            return flats
        if optim.stage == 3:
            raise unreadable(self._root, "has groups of experts that are cut as ZeRO-3 cuts them")
        orders = [self._of_experts(model, optim, layers, by_data=order) for order in possible_orders(model)]
        faults: list[HoldfastError] = []
        for found in orders:
            fault = self._fault(found, optims, layers)
            if fault is None:
                return sorted([*flats, *found], key=lambda flat: flat.group)
            faults.append(fault)
        raise faults[0]

    def _flat(self, model: ModelStates, optim: OptimStates, index: int, ranks: Sequence[int]) -> _Flat:
        """A flat group that these ranks share, under the names in the model file."""
        group, world_size = model.groups[index], len(ranks)
        names, shapes = list(group), list(group.values())
        if optim.stage == 3:
            part = sum(share(shape, world_size) for shape in shapes)
            pieces = partitioned(shapes, world_size)
            return _Flat(index, ranks, names, names, shapes, pieces, [part] * world_size, part)
        numels = list(map(prod, shapes))
        paddings = [0] * len(group) if optim.paddings is None else optim.paddings[index]
        if len(paddings) != len(group):
            raise damaged(self._folder.path(self._files.optim[0]), "has paddings of other parameters")
        part = part_numel(numels, paddings, world_size)
        filled = [min(max(sum(numels) + sum(paddings) - place * part, 0), part) for place in range(world_size)]
        return _Flat(index, ranks, names, names, shapes, grouped(shapes, paddings, part), filled, part)

    def _of_experts(
        self, model: ModelStates, optim: OptimStates, layers: ExpertLayers, *, by_data: bool
    ) -> list[_Flat]:
        """The flat groups of experts: for each group, one of each expert-parallel rank, under the names that its
        parameters have in the whole model."""
        world_size = len(self._files.optim)
        found = []
        for index, group in enumerate(model.groups):
            if not any(map(is_of_expert, group)):
                continue
            parts = optim.world_sizes[index] if index < len(optim.world_sizes) else world_size
            if world_size % parts:
                raise damaged(self._root, f"has {count(world_size, 'rank')}, and experts in {count(parts, 'part')}")
            places = holders(world_size, parts, by_data=by_data)
            for place, ranks in enumerate(places):
                flat = self._flat(model, optim, index, ranks)
                names = [layers.name_at(name, place, len(places)) for name in flat.local]
                if None in names:
                    what = f"has {shown(flat.local[names.index(None)]):.200}, an expert that its layer does not have"
                    raise damaged(self._folder.path(self._files.model[0]), what)
                found.append(flat._replace(names=[name for name in names if name is not None]))
        return found

    def _fault(
        self, flats: Sequence[_Flat], optims: Sequence[OptimStates], layers: ExpertLayers
    ) -> HoldfastError | None:
        """An error, if the file of a rank has other experts than `flats` say. The copies of weights in the files of
        the experts tell."""
        copies = layers.copies
        self._check_shapes(flats, copies)
        for flat in flats:
            for place, rank in enumerate(flat.ranks):
                sample = self._sample(flat, place, optims[rank], copies)
                if sample is not None and not agrees(sample, self._table.elements):
                    return other_experts(self._folder.path(self._files.optim[rank]), sample.name)
        return None

    def _sample(
        self, flat: _Flat, place: int, optim: OptimStates, copies: Mapping[str, tuple[str, PickledTensor]]
    ) -> WeightSample | None:
        """Some weights of a parameter of which one rank of a group has a part; None where it has padding alone."""
        parameters = list(zip(flat.names, flat.shapes, flat.pieces, strict=True))
        key = self._files.optim[flat.ranks[place]]
        return sample_of(parameters, place, (key, optim.masters[flat.group]), copies)

    def _check_shapes(self, flats: Sequence[_Flat], copies: Mapping[str, tuple[str, PickledTensor]]) -> None:
        for name, shape in chain.from_iterable(zip(flat.names, flat.shapes, strict=True) for flat in flats):
            if name in copies and copies[name][1].shape != shape:
                raise self._mixed(f"{shown(name):.200} has another shape in {copies[name][0]}")

    def _check_one_save(self, model: ModelStates, optims: Sequence[OptimStates], flats: Sequence[_Flat]) -> None:
        """Refuse a model file of another save than the optimizer files: of another step, with other weights than these
        have. Warn where one of both is so: an engine whose optimizer began anew counts more steps, and a client may
        have changed the weights of the module alone.

        DeepSpeed writes the model file first. A job that dies while it saves under a tag again leaves both.
        """
        done, counted = model.steps, self._counted(optims[0])
        is_other_step = None not in (done, counted) and done != counted
        steps = f"the engine has done {done} steps and its optimizer {counted}"
        if self._files.is_partitioned:  # the module has no copies
            if is_other_step:
                _log.warning("%s: %s, as in a folder that mixes files of two saves", self._root, steps)
            return
        other = self._other_weights(model, optims, flats)
        if other is None:
            return
        rank, name = other
        weights = f"{self._files.optim[rank]} has other weights for {shown(name):.200} than {self._files.model[0]}"
        if is_other_step:
            raise self._mixed(f"{weights}, and {steps}")
        _log.warning("%s: %s, as in a folder that mixes files of two saves", self._root, weights)

    def _other_weights(
        self, model: ModelStates, optims: Sequence[OptimStates], flats: Sequence[_Flat]
    ) -> tuple[int, str] | None:
        """A rank and a parameter of which it has master weights that are not those of the module."""
        key = self._files.model[0]
        copies = {name: (key, each) for name, each in model.module.items() if isinstance(each, PickledTensor)}
        dense = [flat for flat in flats if len(flat.ranks) == len(optims)]
        self._check_shapes(dense, copies)
        for rank in range(0, len(optims), -(-len(optims) // _MAX_COMPARED)):
            for flat in dense:
                sample = self._sample(flat, rank, optims[rank], copies)
                if sample is not None and not agrees(sample, self._table.elements):
                    return rank, sample.name
        return None

    def _counted(self, optim: OptimStates) -> int | None:
        """The number of steps that the optimizer of a rank has counted, where it counts any."""
        found = next((slots["step"] for slots in optim.slots if "step" in slots), None)
        if isinstance(found, PickledTensor):
            held = np.frombuffer(self._table.bytes_of(self._files.optim[0], found), numpy_type(found.dtype))
            return int(held[0]) if held.size == 1 and np.isfinite(held[0]) else None
        return found if type(found) is int else None

    def _check_rank(self, rank: int, optim: OptimStates, flats: Sequence[_Flat], *, in_order: bool) -> None:
        """Refuse a file whose flat tensors have other sizes than the parameters ask for, or that is of another rank.

        The fragments tell the rank only where the parameters lie `in_order`: they are wrong under round robin.
        """
        path = self._folder.path(self._files.optim[rank])
        flats = [flat for flat in flats if rank in flat.ranks]
        if optim.fragments is not None and in_order:
            expected = [dict(_fragments(flat, flat.ranks.index(rank))) for flat in flats]
            if expected != list(optim.fragments):
                what = (
                    f"holds other parts of the parameters than rank {rank} has: it was renamed, or is of another save"
                )
                raise damaged(path, what)
        for index, flat in enumerate(flats):
            filled = flat.filled[flat.ranks.index(rank)]
            for what, tensor in (("master", optim.masters[index]), *optim.slots[index].items()):
                if not isinstance(tensor, PickledTensor) or not tensor.shape:
                    continue
                if len(tensor.shape) != 1 or tensor.shape[0] not in (flat.padded, filled):
                    found = f"{shown(what):.100} of group {index} has the shape {list(tensor.shape)}"
                    raise damaged(path, f"does not fit the model file: {found} instead of [{flat.padded}]")

    # --- tensors ---

    def _add_trained(self, flats: Sequence[_Flat], optims: Sequence[OptimStates], values: FoundValues) -> None:
        """Add the master weights and the slots of all parameters."""
        for flat in flats:
            keys = [self._files.optim[rank] for rank in flat.ranks]
            mine = [optims[rank] for rank in flat.ranks]
            masters = [optim.masters[flat.group] for optim in mine]
            for name, shape, pieces in zip(flat.names, flat.shapes, flat.pieces, strict=True):
                self._table.cut(join("model", component(name)), shape, keys, masters, pieces)
            for slot in mine[0].slots[flat.group]:
                parts = [optim.slots[flat.group].get(slot) for optim in mine]
                self._add_slot(flat, slot, parts, values)

    def _add_slot(self, flat: _Flat, slot: str, parts: Sequence[object], values: FoundValues) -> None:
        keys = [self._files.optim[rank] for rank in flat.ranks]
        tensors = [part for part in parts if isinstance(part, PickledTensor)]
        if len({type(part) for part in parts}) > 1 or len({tensor.shape == () for tensor in tensors}) > 1:
            raise self._mixed(f"the ranks have {shown(slot):.100} in different forms")
        if not tensors or tensors[0].shape == ():
            self._check_equal(flat, slot, parts)
        for name, shape, pieces in zip(flat.names, flat.shapes, flat.pieces, strict=True):
            path = join("optimizer", "state", "model", component(name), component(slot))
            if not tensors:
                values.add(path, parts[0])
            elif tensors[0].shape == ():
                place = int(pieces.ranks[0]) if len(pieces.ranks) else 0
                self._table.whole(path, keys[place], tensors[place])
            else:
                self._table.cut(path, shape, keys, tensors, pieces)

    def _check_equal(self, flat: _Flat, slot: str, parts: Sequence[object]) -> None:
        """Refuse ranks that have counted other steps: their files come from different saves."""
        first = None
        for place, (rank, part) in enumerate(zip(flat.ranks, parts, strict=True)):
            found = part if not isinstance(part, PickledTensor) else self._table.bytes_of(self._files.optim[rank], part)
            first = found if place == 0 else first
            if found != first:
                raise self._mixed(f"rank {rank} has another {shown(slot):.100} than rank {flat.ranks[0]}")

    def _add_experts(self, layers: ExpertLayers, trained: frozenset[str], values: FoundValues) -> None:
        """Add what the module holds of the experts: frozen parameters, buffers, and copies of trained parameters."""
        for file in layers.files:
            for name, found in file.content.items():
                path = join("module" if name in trained else "model", component(name))
                if isinstance(found, PickledTensor):
                    self._table.whole(path, file.key, found)
                else:
                    values.add(path, found)


def _by_group(flats: Sequence[_Flat]) -> list[list[str]]:
    """The names of the parameters of each group, of all ranks."""
    return [
        list(chain.from_iterable(flat.names for flat in alike))
        for _, alike in groupby(flats, key=lambda flat: flat.group)
    ]


def _training(model: ModelStates) -> tuple[object, ...]:
    """The content that the model files of all ranks share: the parameters in their order, and the step."""
    return [list(group.items()) for group in model.groups], model.engine.get("global_steps")


def _fragments(flat: _Flat, place: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts of parameters that one of the ranks of a group has, as ``(start, numel)`` in its flat tensor."""
    for name, pieces in zip(flat.local, flat.pieces, strict=True):
        mine = pieces.ranks == place
        if mine.any():
            yield name, (int(pieces.firsts[mine].min()), int(pieces.sizes[mine].prod(axis=1).sum()))
