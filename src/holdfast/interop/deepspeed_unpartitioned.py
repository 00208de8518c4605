"""Folders that DeepSpeed saved with experts and without ZeRO.

Each expert-parallel rank has a file with the whole state of its optimizer: of the dense parameters, which all have, and
of its own experts. No file names the parameters, so their order is found from their shapes (`parameter_order`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from holdfast.format.names import component, join
from holdfast.geometry import Shape
from holdfast.interop.deepspeed_archives import Archives
from holdfast.interop.deepspeed_folder import FoundFiles, missing_optimizers
from holdfast.interop.deepspeed_layers import ExpertFile, read_layers
from holdfast.interop.deepspeed_module import mixed
from holdfast.interop.deepspeed_states import OptimStates, WholeOptimizer, model_states, whole_optimizer
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.deepspeed_values import FoundValues
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.parameter_order import OrderError, only_order
from holdfast.interop.pickled_tree import CheckedNodes
from holdfast.interop.torch_globals import PickledTensor

_STEP: Final = "step"
#: The name of a group of experts: the number of expert-parallel ranks.
_SIZE: Final = re.compile(r"ep_size_([1-9][0-9]{0,5})")
_ACTION: Final = "Load it with DeepSpeed on as many ranks as saved it, and save that engine by holdfast."


class _OwnTensor(NamedTuple):
    """A tensor of the module, by its name in the whole model, and the file that has it."""

    name: str
    key: str
    tensor: PickledTensor


def open_without_zero(folder: ForeignFolder, found: FoundFiles, *, kind: str) -> ForeignState:
    """The state in a folder with optimizer files of expert-parallel ranks. Raises as `ForeignFormat.open`."""
    return _UnpartitionedOpening(folder, found).state(kind)


class _UnpartitionedOpening:
    """The opening of one folder."""

    def __init__(self, folder: ForeignFolder, found: FoundFiles) -> None:
        self._folder = folder
        self._found = found
        self._archives = Archives(folder)
        model = found.model.get(None)
        if found.optim:
            what = (
                "has optimizer files of experts without ZeRO, and others of ZeRO: of two saves, or of an old DeepSpeed"
            )
            raise unreadable(found.root, what, action=_ACTION)
        if model is None:
            what = "lacks mp_rank_00_model_states.pt, which has all weights but those of the experts"
            raise damaged(found.root, what, action="Copy the missing file again.")
        self._model_key = model
        self._model = self._archives.read(model, partial(model_states, has_zero=False))
        self._layers = read_layers(found, self._model, self._archives)
        first = found.whole_optimizers[min(found.whole_optimizers)]
        size = self._size(first, self._archives.read(first, whole_optimizer))
        if (fault := missing_optimizers(found, size)) is not None:
            raise fault
        self._keys = [found.whole_optimizers[rank] for rank in range(size)]
        self._optims = [self._archives.read(key, whole_optimizer) for key in self._keys]
        files = [model, *self._keys, *self._layers.keys]
        self._table = TensorTable(folder, self._archives.opened, files)
        self._files = files

    def state(self, kind: str) -> ForeignState:
        """The state in the folder."""
        self._check_alike()
        values = FoundValues(self._folder.path(self._model_key))
        values.add_model(self._model)
        of_model = set(values.tensors)
        dense, aliases = self._dense()
        names = self._add_trained(dense, values)
        optim = self._optims[0]
        states = OptimStates(
            0,
            self._model.engine.get("ds_version"),
            [],
            [],
            [],
            optim.param_groups,
            {group: group for group in range(len(names))},
            None,
            None,
            optim.loss_scaler,
            {},
        )
        given = self._model.option("optimizer", "type", default="")
        values.add_optimizer(states, names, kind=given if isinstance(given, str) else "")
        self._add_module(dense, values)
        for name, tensor in values.tensors.items():
            self._table.whole(name, self._model_key if name in of_model else self._keys[0], tensor)
        return ForeignState(
            self._folder,
            self._table.places(aliases),
            self._files,
            kind=kind,
            identity=self._archives.digest(self._files),
            nodes=CheckedNodes(lambda: values.table),
        )

    # --- checks ---

    def _size(self, key: str, optim: WholeOptimizer) -> int:
        """The number of expert-parallel ranks, by the names of the groups of experts."""
        names = {str(group.get("name")) for group in optim.param_groups if group.get("moe") is True}
        sizes = {int(match[1]) for match in map(_SIZE.fullmatch, names) if match is not None}
        if len(names) != 1 or len(sizes) != 1:
            what = f"has groups of experts named {', '.join(sorted(names)) or 'by nothing'}; holdfast reads one ep_size"
            raise unreadable(self._folder.path(key), what, action=_ACTION)
        size = sizes.pop()
        if any(total % size for total in self._found.num_experts):
            raise mixed(self._found.root, f"{size} expert-parallel ranks cannot divide the experts of its layers")
        return size

    def _check_alike(self) -> None:
        """Refuse files that come from different saves."""
        first = self._optims[0]
        for rank, optim in enumerate(self._optims):
            if optim.param_groups != first.param_groups:
                raise mixed(self._found.root, f"rank {rank} has other parameter groups than rank 0")
            if [*map(len, optim.numbers)] != [*map(len, first.numbers)] or self._step(rank) != self._step(0):
                raise mixed(self._found.root, f"rank {rank} has done other steps, or trains another model, than rank 0")

    def _step(self, rank: int) -> object:
        """The number of steps that a rank has counted for the first dense parameter."""
        optim = self._optims[rank]
        dense = (number for group in _groups(optim, of_experts=False) for number in optim.numbers[group])
        found = next((optim.state[number].get(_STEP) for number in dense if number in optim.state), None)
        return self._table.bytes_of(self._keys[rank], found) if isinstance(found, PickledTensor) else found

    # --- tensors ---

    def _dense(self) -> tuple[list[_OwnTensor], dict[str, str]]:
        """The dense parameters of the module in its order, and other names of them."""
        first: dict[PickledTensor, str] = {}
        held, aliases = [], {}
        for name, tensor in self._model.module.items():
            if not isinstance(tensor, PickledTensor):
                continue
            if tensor in first:
                aliases[join("model", component(name))] = join("model", component(first[tensor]))
                continue
            first[tensor] = name
            held.append(_OwnTensor(name, self._model_key, tensor))
        return held, aliases

    def _of_experts(self, rank: int) -> list[_OwnTensor]:
        """The tensors of the experts of a rank, in the order of its module."""
        found = []
        for file in self._files_of(rank):
            for name, tensor in file.content.items():
                if isinstance(tensor, PickledTensor):
                    found.append(_OwnTensor(name, file.key, tensor))
        return found

    def _files_of(self, rank: int) -> list[ExpertFile]:
        """The files of the experts of a rank, by layers."""
        found: list[ExpertFile] = []
        first = 0
        for total in self._found.num_experts:
            held = total // len(self._keys)
            found += self._layers.files[first + rank * held : first + (rank + 1) * held]
            first += total
        return found

    def _add_trained(self, dense: Sequence[_OwnTensor], values: FoundValues) -> list[list[str]]:
        """Add the slots of all parameters. Returns the names of the parameters of each group, of all ranks."""
        names: list[list[str]] = [[] for _ in self._optims[0].param_groups]
        for rank, optim in enumerate(self._optims):
            parts = [(_groups(optim, of_experts=True), self._of_experts(rank))]
            if rank == 0:
                parts.append((_groups(optim, of_experts=False), [*dense]))
            for groups, held in parts:
                parameters = [each for each in held if not self._is_buffer(each.name)]
                for group, chosen in zip(groups, self._order(rank, groups, parameters), strict=True):
                    names[group] += [each.name for each in chosen]
                    for number, each in zip(optim.numbers[group], chosen, strict=True):
                        self._add_slots(rank, each.name, optim.state.get(number, {}), values)
                        self._add_master(rank, each, optim.masters.get(number))
        return names

    def _order(self, rank: int, groups: Sequence[int], parameters: Sequence[_OwnTensor]) -> list[list[_OwnTensor]]:
        """The parameters of some groups of a rank's optimizer, in the order of these groups."""
        optim = self._optims[rank]
        shapes = [[_shape(optim, number) for number in optim.numbers[group]] for group in groups]
        try:
            found = only_order([each.tensor.shape for each in parameters], shapes)
        except OrderError as error:
            what = f"knows its parameters by their order alone, and {error}"
            raise unreadable(self._folder.path(self._keys[rank]), what, action=_ACTION) from error
        return [[parameters[number] for number in numbers] for numbers in found]

    def _add_master(self, rank: int, held: _OwnTensor, master: PickledTensor | None) -> None:
        """Add the master weight of a parameter, of which the module then has a copy in another dtype."""
        if master is not None:
            self._table.whole(join("model", component(held.name)), self._keys[rank], master)

    def _add_slots(self, rank: int, name: str, slots: Mapping[str, object], values: FoundValues) -> None:
        for slot, value in slots.items():
            path = join("optimizer", "state", "model", component(name), component(slot))
            if isinstance(value, PickledTensor):
                self._table.whole(path, self._keys[rank], value)
            else:
                values.add(path, value)

    def _add_module(self, dense: Sequence[_OwnTensor], values: FoundValues) -> None:
        """Add what the module holds: weights that are their own master weights, copies of others, and buffers."""
        everywhere = [held for rank in range(len(self._keys)) for held in self._of_experts(rank)]
        for held in (*dense, *everywhere):
            name = join("model", component(held.name))
            name = join("module", component(held.name)) if name in self._table else name
            self._table.whole(name, held.key, held.tensor)
        for file in self._layers.files:
            for name, value in file.content.items():
                if not isinstance(value, PickledTensor):
                    values.add(join("model", component(name)), value)

    def _is_buffer(self, name: str) -> bool:
        """Whether this is a buffer. Those of experts are named as rank 0 numbers them."""
        return self._layers.local_name(name, len(self._keys)) in self._model.buffers


def _groups(optim: WholeOptimizer, *, of_experts: bool) -> list[int]:
    """The groups of experts, or the others."""
    return [group for group, each in enumerate(optim.param_groups) if (each.get("moe") is True) == of_experts]


def _shape(optim: WholeOptimizer, number: int) -> Shape | None:
    """The shape of a parameter, by its master weight or its slots; None where it has none, or slots of several."""
    if number in optim.masters:
        return optim.masters[number].shape
    slots = optim.state.get(number, {}).items()
    shapes = {value.shape for slot, value in slots if isinstance(value, PickledTensor) and slot != _STEP}
    return shapes.pop() if len(shapes) == 1 else None
