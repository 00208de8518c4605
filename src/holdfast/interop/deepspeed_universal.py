"""DeepSpeed's universal folders, of its own converter and of `holdfast export`: a file for each tensor of a parameter.

The names are those of DeepSpeed's other folders (`holdfast.interop.deepspeed`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format.names import component, join, shown
from holdfast.geometry import Shape
from holdfast.interop.deepspeed_archives import Archives
from holdfast.interop.deepspeed_folder import UniversalFiles, find_universal, is_universal
from holdfast.interop.deepspeed_layout import whole_piece
from holdfast.interop.deepspeed_module import add_module, mixed, second_names
from holdfast.interop.deepspeed_states import ModelStates, atom, model_states, universal_states
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.deepspeed_values import FoundValues
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.pickled_tree import CheckedNodes
from holdfast.interop.torch_globals import PickledTensor

_MASTER: Final = "fp32"
_STEP: Final = "step"


class UniversalFormat:
    """Universal folders of DeepSpeed: the folder itself, or the one above it with ``latest_universal``."""

    kind: Final = "a universal checkpoint of DeepSpeed"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`."""
        return is_universal(names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the pickles of all files."""
        return _UniversalOpening(folder, find_universal(folder)).state()


class _UniversalOpening:
    """The opening of one folder."""

    def __init__(self, folder: ForeignFolder, files: UniversalFiles) -> None:
        self._folder = folder
        self._files = files
        self._archives = Archives(folder)
        self._keys = [
            *files.model,
            files.optimizer,
            *chain.from_iterable(each.values() for each in files.atoms.values()),
        ]
        self._table = TensorTable(folder, self._archives.opened, self._keys)

    def state(self) -> ForeignState:
        """The state in the folder."""
        files = self._files
        models = [self._archives.read(key, partial(model_states, is_universal=True)) for key in files.model]
        model = models[0]
        if files.is_partitioned and len(models) != model.engine.get("dp_world_size"):
            what = f"has {len(models)} model files of {model.engine.get('dp_world_size')} ranks"
            raise damaged(files.root, what, action="Copy the folder again.")
        groups = self._groups(models)
        optim = self._archives.read(files.optimizer, partial(universal_states, num_flat=len(groups)))
        values = FoundValues(self._folder.path(files.model[0]))
        values.add_model(model)
        of_model = set(values.tensors)
        kind = model.option("optimizer", "type", default="")
        values.add_optimizer(optim, [list(group) for group in groups], kind=kind if isinstance(kind, str) else "")
        self._check_atoms([name for group in groups for name in group])
        for flat, group in enumerate(groups):
            self._add_group(group, optim.slots[flat].get(_STEP), values)
        trained = frozenset(chain.from_iterable(groups))
        if files.num_slices == 1:
            add_module(self._table, files.root, files.model, models, trained, is_partitioned=files.is_partitioned)
        else:
            self._add_untrained(models, trained, values)
        for name, tensor in values.tensors.items():
            self._table.whole(name, files.model[0] if name in of_model else files.optimizer, tensor)
        places = self._table.places(second_names(self._table, model))
        return ForeignState(
            self._folder,
            places,
            self._keys,
            kind=UniversalFormat.kind,
            identity=self._archives.digest(sorted(self._archives.opened)),
            nodes=CheckedNodes(lambda: values.table),
        )

    def _groups(self, models: Sequence[ModelStates]) -> list[dict[str, Shape]]:
        """The trained parameters of each group: those of all model-parallel ranks."""
        groups: list[dict[str, Shape]] = [{} for _ in models[0].groups]
        for model in models:
            if len(model.groups) != len(groups):
                raise mixed(self._files.root, "the model files have different groups")
            for group, found in zip(groups, model.groups, strict=True):
                group.update(found)
        return groups

    def _check_atoms(self, names: Sequence[str]) -> None:
        """Refuse a folder in which some trained parameters lack a file that others have: one optimizer wrote them."""
        atoms = self._files.atoms
        found = {slot for name in names for slot in atoms.get(name, {})}
        slots = (_MASTER, *sorted(found - {_MASTER}))
        missing = [f"zero/{name}/{slot}.pt" for name in names for slot in slots if slot not in atoms.get(name, {})]
        if missing:
            details = [f"{name} is missing" for name in missing[:5]]
            what = f"lacks files of parameters, such as {missing[0]:.300}"
            raise damaged(self._files.root, what, action="Copy the folder again, or convert it again.", details=details)

    def _add_group(self, group: Mapping[str, Shape], common: object, values: FoundValues) -> None:
        """Add the master weights and the slots of a group. `common` is a count of steps for parameters without one."""
        atoms = self._files.atoms
        for name, shape in group.items():
            self._add_tensor(join("model", component(name)), atoms[name][_MASTER], shape)
            state = join("optimizer", "state", "model", component(name))
            for slot in sorted(atoms[name].keys() - {_MASTER, _STEP}):
                self._add_tensor(join(state, component(slot)), atoms[name][slot], shape)
            key = atoms[name].get(_STEP)
            step = common if key is None else self._archives.read(key, atom)
            if isinstance(step, PickledTensor):
                self._table.whole(join(state, _STEP), self._files.optimizer if key is None else key, step)
            elif step is not None:
                values.add(join(state, _STEP), step)

    def _add_tensor(self, name: str, key: str, shape: Shape | None) -> None:
        """Add a tensor: whole, or as flat elements, which DeepSpeed's converter makes of ZeRO-3."""
        tensor = self._archives.read(key, atom)
        if not isinstance(tensor, PickledTensor):
            raise damaged(self._folder.path(key), "holds no tensor", tensor=name)
        if shape is None or tensor.shape == shape or self._files.num_slices > 1:
            self._table.whole(name, key, tensor)
        elif tensor.shape == (prod(shape),):
            self._table.cut(name, shape, [key], [tensor], whole_piece(shape))
        else:
            what = f"holds {shown(name):.200} with the shape {list(tensor.shape)}, and the model file has {list(shape)}"
            raise damaged(self._folder.path(key), what, tensor=name)

    def _add_untrained(self, models: Sequence[ModelStates], trained: frozenset[str], values: FoundValues) -> None:
        """Add what model-parallel ranks hold besides: what the folder has whole, and errors for their slices."""
        for name in sorted({name for model in models for name in model.module} - trained):
            path, key = join("model", component(name)), self._files.atoms.get(name, {}).get(_MASTER)
            if key is not None:
                self._add_tensor(path, key, None)
            elif any(isinstance(model.module.get(name), PickledTensor) for model in models):
                values.table[path] = self._sliced(name)

    def _sliced(self, name: str) -> HoldfastError:
        what = f"holds {shown(name):.200} in parts of model-parallel ranks, and does not say how to join them"
        return unreadable(self._files.root, what)
