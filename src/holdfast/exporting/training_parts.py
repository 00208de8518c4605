"""The parts of a stored training: the trained parameters with their optimizer, and everything beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.exporting.chosen_tensors import ChosenContent, ExportTensor, unfit
from holdfast.exporting.chosen_values import plain_key, value_paths
from holdfast.exporting.plain_values import plain_value
from holdfast.exporting.tensor_archives import whole_tensor
from holdfast.format.names import component, join, parse_component, split
from holdfast.format.values import Node, Open, Plain
from holdfast.run.paths import some_quoted

#: The names of schedulers, beside an optimizer.
_SCHEDULERS: Final = ("lr_scheduler", "scheduler")
_HALF: Final = frozenset(("float16", "bfloat16"))
_LEAVE_OUT: Final = "Leave it out with select (--select)."


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that the optimizer trains: its names in the module, the tensor, the index of its group, and its slots
    of its own shape. `step` is its count of steps: a number, a tensor, or None before the first step.

    Tensors of half precision have the dtype ``float32`` here.
    """

    names: tuple[str, ...]
    master: ExportTensor
    group: int
    slots: Mapping[str, ExportTensor]
    step: object


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a state, as `archive_file` takes them.

    `kept` has what the module holds besides the trained parameters. `beside` has the other values that belong to the
    optimizer or an engine, by the keys under which they lie beside the optimizer: ``lr_scheduler``, ``scaling``,
    ``engine``, ``scaler_options``. `client` is the rest of the state.
    """

    trained: Sequence[TrainedParameter]
    groups: Sequence[Mapping[str, object]]
    kept: Mapping[str, object]
    beside: Mapping[str, object]
    client: Mapping[str, object]


def training_parts(choice: ChosenContent) -> TrainingParts:
    """The parts of the chosen content, which must have one optimizer.

    Raises `ConfigurationError`, code ``config.export``, where there is none, or the caller must choose one, and
    `IncompatibleError`, code ``incompatible.export``, for state that does not lie at the parameters.
    """
    return _Partition(choice).parts()


@dataclass
class _Partition:
    """The division of chosen content into the parts."""

    choice: ChosenContent
    tensors: dict[str, ExportTensor] = field(init=False)
    aliases: dict[str, tuple[str, ...]] = field(init=False)
    left: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {name: one.tensor for one in self.choice.tensors for name in one.names}
        self.aliases = {name: one.names for one in self.choice.tensors for name in one.names}
        #: The names that no part has taken yet.
        self.left = {*self.tensors, *self.choice.values}

    @property
    def nodes(self) -> Mapping[str, Node]:
        """The values of the state."""
        return self.choice.table.nodes

    def parts(self) -> TrainingParts:
        """All parts."""
        path = self._optimizer()
        group_of = dict(self._group_of(path))
        roots = sorted({name.rpartition("/")[0] for name in group_of})
        if len(roots) != 1 or not roots[0]:
            text = f"trains parameters of other containers than one module: {some_quoted(roots) or 'none'}"
            raise unfit(path, text, "Export to dcp instead.")
        trained = self._trained(path, group_of)
        kept = {self._file_name(name): self._part(name) for name in self._below(roots[0])}
        groups = [self._group(join(path, "param_groups", index)) for index in self._indexes(path)]
        if stray := sorted(self._below(path, but=("group_of", "order", "class", "param_groups"))):
            raise unfit(stray[0], "belongs to no trained parameter", _LEAVE_OUT)
        self._take(path, roots[0])
        base = path.rpartition("/")[0]
        beside = dict(self._beside(base))
        copies = {component(name) for each in trained for name in each.names}
        self.left -= {name for name in self._below(join(base, "module")) if split(name)[-1] in copies}
        client = join(base, "client_state")
        found = self._rest(client) if client in self.nodes else {}
        self._take(client)
        again = self._rest("")
        if both := sorted(found.keys() & again.keys()):
            raise unfit(both[0], f"is in the state and in {client}", _LEAVE_OUT)
        return TrainingParts(trained, groups, kept, beside, {**found, **again})

    # --- the optimizer ---

    def _optimizer(self) -> str:
        """The path of the only optimizer that is chosen."""
        every = [path for path, node in self.nodes.items() if node == Open("optimizer")]
        found = sorted(path for path in every if next(self._below(path), None) is not None)
        if not found:
            raise ConfigurationError(
                "what is to be written has no optimizer, and DeepSpeed's universal folders are of a training.",
                code="config.export",
                action="Export the weights alone to hf or dcp.",
            )
        if len(found) > 1:
            raise ConfigurationError(
                f"the state has several optimizers, and a universal folder has one: {some_quoted(found)}.",
                code="config.export",
                action="Choose one of them, with its model: select (--select).",
            )
        return found[0]

    def _group_of(self, path: str) -> Iterator[tuple[str, int]]:
        """The full name of each trained parameter, and the index of its group."""
        above = join(path, "group_of") + "/"
        for name, node in self.nodes.items():
            if name.startswith(above) and isinstance(node, Plain) and type(node.value) is int:
                yield str(parse_component(name.removeprefix(above))), node.value

    def _trained(self, path: str, group_of: Mapping[str, int]) -> list[TrainedParameter]:
        """The trained parameters, in the order in which their tensors are stored."""
        slots = self._slots(path, group_of)
        order = {name: at for at, name in enumerate(self.tensors)}
        found = []
        for name in sorted(group_of, key=lambda name: order.get(name, len(order))):
            if (master := self.tensors.get(name)) is None:
                raise unfit(name, "is trained, but is not among the tensors to write", "Choose it, too: select.")
            names = tuple(self._file_name(each) for each in self.aliases[name])
            step, own = slots[name].pop("step", None), {}
            for slot, value in slots[name].items():
                if not isinstance(value, ExportTensor) or value.shape != master.shape:
                    text = f"has the slot {slot!r:.100} in another shape, which universal folders cannot hold"
                    raise unfit(name, text, "Export to dcp instead, or leave it out with select (--select).")
                own[slot] = _widened(value)
            found.append(TrainedParameter(names, _widened(master), group_of[name], own, step))
            self.left.difference_update(self.aliases[name])
        if len({frozenset(each.slots) for each in found}) > 1:
            least = min(found, key=lambda each: len(each.slots))
            text = "has no optimizer state, or another than other parameters, which DeepSpeed cannot hold in one tensor"
            raise unfit(least.master.name, text, "Train all parameters for a step first, or freeze this one.")
        return found

    def _slots(self, path: str, group_of: Mapping[str, int]) -> dict[str, dict[str, object]]:
        """For each parameter its slots: tensors, and values."""
        above = join(path, "state") + "/"
        slots: dict[str, dict[str, object]] = {name: {} for name in group_of}
        for name in list(self._below(above.removesuffix("/"))):
            parameter, _, slot = name.removeprefix(above).rpartition("/")
            if parameter not in slots:
                continue
            tensor = self.tensors.get(name)
            slots[parameter][plain_key(slot)] = plain_value(self.nodes, name) if tensor is None else tensor
            self.left.discard(name)
        return slots

    def _indexes(self, path: str) -> list[str]:
        """The components of the groups."""
        above = join(path, "param_groups") + "/"
        found = {name.removeprefix(above).partition("/")[0] for name in self.nodes if name.startswith(above)}
        return sorted(found, key=int)

    def _group(self, path: str) -> Mapping[str, object]:
        found = self._value(path)
        if not isinstance(found, dict):
            raise unfit(path, "is no group of an optimizer", _LEAVE_OUT)
        return dict(found)

    # --- the rest ---

    def _beside(self, base: str) -> Iterator[tuple[str, object]]:
        """The values beside the optimizer."""
        for key in (*_SCHEDULERS, "scaling", "engine", "scaler_options"):
            path = join(base, key)
            if next(self._below(path), None) is None or (
                key == "engine" and join(path, "global_steps") not in self.nodes
            ):
                continue
            yield ("lr_scheduler" if key in _SCHEDULERS else key), self._part(path)
            self._take(path)

    def _rest(self, path: str) -> dict[str, object]:
        """The content of the container at `path` that no part has taken."""
        found: dict[str, object] = {}
        depth = len(split(path)) if path else 0
        for key in sorted({split(name)[depth] for name in self._below(path) if name != path}):
            below = join(path, key)
            names = {name for name in (*value_paths(self.nodes), *self.tensors) if _is_below(name, below)}
            if names <= self.left:
                found[plain_key(key)] = self._part(below)
            elif below in self.nodes and any(_is_below(name, below) for name in self.left):
                found[plain_key(key)] = self._rest(below)
        return found

    def _part(self, path: str) -> object:
        """The value, the tensor or the container at `path`."""
        if path in self.tensors:
            return whole_tensor(self.tensors[path])
        if self.nodes.get(path) in (None, Open("module")):
            return {plain_key(split(name)[-1]): self._part(name) for name in self._below(path)}
        return self._value(path)

    def _value(self, path: str) -> object:
        inner = [
            name
            for name, node in self.nodes.items()
            if _is_below(name, path) and node in (Open("module"), Open("optimizer"))
        ]
        if inner:
            raise unfit(inner[0], "lies inside another container", _LEAVE_OUT)
        return plain_value(self.nodes, path, self._tensor)

    def _tensor(self, name: str) -> object:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise unfit(name, "is not chosen, but what it is a part of is", "Choose all of it, or nothing of it.")
        return whole_tensor(tensor)

    def _below(self, path: str, *, but: Sequence[str] = ()) -> Iterator[str]:
        """The names at and below a path that no part has taken, but those below some of its keys."""
        without = tuple(join(path, key) for key in but)
        return (
            name
            for name in sorted(self.left)
            if _is_below(name, path) and not any(_is_below(name, key) for key in without)
        )

    def _take(self, *paths: str) -> None:
        self.left = {name for name in self.left if not any(_is_below(name, path) for path in paths)}

    @staticmethod
    def _file_name(name: str) -> str:
        """The name of a tensor in its module, which becomes a folder."""
        found = plain_key(split(name)[-1])
        if "/" in found or "\0" in found or found in (".", ".."):
            raise unfit(name, "has a name that no folder can have", "Rename it with a mapping (--mapping).")
        return found


def _is_below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(path + "/")


def _widened(tensor: ExportTensor) -> ExportTensor:
    """A tensor in the precision in which optimizers go on."""
    return tensor._replace(dtype="float32") if tensor.dtype in _HALF else tensor
