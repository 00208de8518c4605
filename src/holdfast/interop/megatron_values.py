"""The values of a Megatron checkpoint, by the names that a live job has: from ``common.pt``, and from objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite, prod
from typing import Final, NamedTuple

from holdfast.errors import StateError
from holdfast.format.names import component, join
from holdfast.format.values import Open, Stateful, TableNode, TorchValue
from holdfast.interop.dcp_metadata import DcpMetadata
from holdfast.interop.foreign_format import damaged
from holdfast.interop.item_places import Item
from holdfast.interop.megatron_archives import ObjectArchive
from holdfast.interop.megatron_iterations import COMMON, IterationFolder
from holdfast.interop.megatron_names import (
    BUCKETS,
    MASTERS,
    buffer_name,
    group_name,
    group_of_buffers,
    optimizer_entry,
    random_shard,
)
from holdfast.interop.megatron_random import StoredRandom, random_tree
from holdfast.interop.pickle_machine import PickledObject, PickleError, UnknownGlobal, UnknownObject
from holdfast.interop.pickled_tree import PickledTree, pickled_tree
from holdfast.interop.torch_archive import ArchiveError, Windows
from holdfast.interop.torch_globals import BYTES_FILE, PickledTensor
from holdfast.mapping.megatron_optimizers import MASTER

#: The keys of ``common.pt`` that live objects have, too; all others are entries of `_JOB`.
OPTIMIZER: Final = "optimizer"
_SCHEDULER: Final = "opt_param_scheduler"
_JOB: Final = "megatron"
_ARGUMENTS: Final = "args"
#: The keys that a live state leaves out of a parameter group: they depend on the layout, or are entries of their own.
_NOT_HYPER: Final = frozenset(("params", "step", "is_expert_parallel"))
#: The packages whose objects among the arguments are shown as text.
_NAMED_IN: Final = ("megatron.", "torch.")
_GATHERED: Final = "param_state"
#: Where a distributed optimizer names its format, and those that are read.
_SHARDING: Final = "param_state_sharding_type"
_SHARDINGS: Final = ("fully_reshardable", "fully_sharded_model_space", "dp_reshardable", "dp_zero_gather_scatter")


class _OptimizerValues(NamedTuple):
    """The state of one optimizer of a chain, and where it was read."""

    number: int
    state: Mapping[object, object]
    source: ObjectArchive


class MegatronValues:
    """The values of an iteration's folder, and the tensors inside them."""

    def __init__(self, found: IterationFolder, metadata: DcpMetadata) -> None:
        self._found = found
        self._windows = Windows(found.folder.storage)
        self.tree = PickledTree()
        key = found.prefix + COMMON
        common = self._archive(Item(key, 0, found.folder.storage.nbytes(key) or 0))
        content = common.content
        if not isinstance(content, dict):
            raise damaged(found.folder.path(key), "holds no dict of values")
        #: The iteration, as the job has counted it; None for a folder that does not say it.
        counted = content.get("iteration")
        self.iteration = counted if isinstance(counted, int) and counted >= 0 else found.iteration
        self.tree.nodes[_JOB] = Open("dict")
        for key, value in content.items():
            if key == _SCHEDULER:
                self._add("scheduler", value, common)
                if isinstance(node := self.tree.nodes["scheduler"], TableNode):
                    self.tree.nodes["scheduler"] = Stateful(node)
            elif key != OPTIMIZER:
                self._add(join(_JOB, component(str(key))), _readable(value) if key == _ARGUMENTS else value, common)
        held = content.get(OPTIMIZER)
        self._unread = _unread_sharding(held)
        #: Whether the optimizer is in a format that is read.
        self.reads_optimizer = self._unread is None
        self._add_optimizer([*_in_common(held, common), *self._in_objects(metadata)], metadata)
        self._add_random(metadata, content.get(_ARGUMENTS))

    def _archive(self, item: Item) -> ObjectArchive:
        return ObjectArchive.open(self._found.folder, self._windows, item)

    def _in_objects(self, metadata: DcpMetadata) -> Iterator[_OptimizerValues]:
        """The optimizers whose values are objects: those of the formats that keep the layout of the save."""
        for name, (_, item) in sorted(metadata.values.items()):
            entry = optimizer_entry(name)
            if entry in (OPTIMIZER, "grad_scaler"):
                source = self._archive(item)
                for part in unpacked(source.content):
                    yield _OptimizerValues(_number_in_chain(name), {entry: part}, source)

    def _add_random(self, metadata: DcpMetadata, arguments: object) -> None:
        """Add the random numbers of all ranks."""
        stored: list[StoredRandom] = []
        for name, (_, item) in metadata.values.items():
            if (shard := random_shard(name)) is not None:
                source = self._archive(item)
                stored += [StoredRandom(shard, states, source) for states in unpacked(source.content)]
        fields = arguments.state if isinstance(arguments, PickledObject) else None
        found = random_tree(stored, fields if isinstance(fields, dict) else {})
        self.tree.nodes.update(found.nodes)
        self.tree.items.update(found.items)

    def _add_optimizer(self, optimizers: list[_OptimizerValues], metadata: DcpMetadata) -> None:
        slots = {tensor.path[1] for tensor in metadata.tensors.values() if tensor.path[0] == OPTIMIZER}
        if not optimizers and not slots:
            return
        if self._unread is not None:
            self.tree.nodes[OPTIMIZER] = self._unread
            return
        self.tree.nodes[OPTIMIZER] = Open("optimizer")
        has_buckets = BUCKETS in slots or self._add_buffers(metadata)
        entries = ("state", "param_groups", "group_of", *((BUCKETS,) if has_buckets else ()))
        self.tree.nodes.update((join(OPTIMIZER, entry), Open("dict")) for entry in entries)
        groups: dict[str, object] = {}
        steps: list[object] = []
        scalers: dict[int, tuple[object, ObjectArchive]] = {}
        for number, state, source in optimizers:
            inner = state.get(OPTIMIZER, state)
            for group in _groups(inner):
                values = {key: value for key, value in group.items() if key not in _NOT_HYPER}
                if groups.setdefault(group_name(group), values) != values:
                    groups[group_name(group)] = PickleError("two groups that nothing tells apart differ")
                steps += [source.number(group["step"])] if group.get("step") is not None else []
            steps += map(source.number, _common_step(inner))
            if "grad_scaler" in state:
                scalers.setdefault(number, (state["grad_scaler"], source))
        for name, found in groups.items():
            self._add(join(OPTIMIZER, "param_groups", component(name)), found, optimizers[0].source)
        for at, (scaler, source) in scalers.items():
            path = join(OPTIMIZER, "grad_scaler", str(at))
            self._add(path, scaler, source)
            if isinstance(scaler, dict) and isinstance(self.tree.nodes[path], Open):
                self.tree.nodes[path] = TableNode("dict", tuple(component(str(key)) for key in scaler))
        if scalers:
            self.tree.nodes[join(OPTIMIZER, "grad_scaler")] = Open("dict")
        if steps:
            self.tree.nodes.update(pickled_tree(join(OPTIMIZER, "step"), _one_count(steps)).nodes)

    def _add_buffers(self, metadata: DcpMetadata) -> bool:
        """Add the buffers that are in objects, each with all of its buckets, and return whether there are any."""
        found = [(name, item) for name, (_, item) in metadata.values.items() if optimizer_entry(name) == _GATHERED]
        for name, item in found:
            source = self._archive(item)
            for buffers in unpacked(source.content):
                for key, slots in _buffers(buffers, group_of_buffers(name)):
                    self._add(join(OPTIMIZER, BUCKETS, component(key)), slots, source)
        return bool(found)

    def _add(self, name: str, value: object, source: ObjectArchive) -> None:
        """Add a value, and the tensors in it. What cannot be read is an error where it is looked up."""
        try:
            found = pickled_tree(name, value)
            items = {each: source.items(tensor) for each, tensor in found.tensors.items()}
        except (ArchiveError, PickleError, StateError) as error:
            self.tree.nodes[name] = PickleError(str(error))
            return
        self.tree.nodes.update(found.nodes)
        self.tree.items.update(items)


def unpacked(value: object) -> Iterator[object]:
    """The content of an object: Megatron stores a list of one, and for modules without extra state nothing in it."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, PickledObject) and item.name == BYTES_FILE:
            state = item.state if isinstance(item.state, tuple) else item.args
            data = state[0] if state else b""
            if data:
                yield data
        elif item is not None and not (isinstance(item, PickledTensor) and not prod(item.shape)):
            yield item


def _in_common(held: object, source: ObjectArchive) -> Iterator[_OptimizerValues]:
    """The optimizers in ``common.pt``: one, or a chain, by numbers. Those whose values are objects have only the name
    of their format there."""
    if not isinstance(held, dict):
        return
    chained = held.items() if held and all(type(key) is int for key in held) else [(0, held)]
    for number, state in chained:
        if isinstance(state, dict) and (OPTIMIZER in state or "param_groups" in state):
            yield _OptimizerValues(number, state, source)


def _unread_sharding(held: object) -> PickleError | None:
    """An error, if ``common.pt`` says that the distributed optimizer is in a format that is not read."""
    parts = [held, *held.values()] if isinstance(held, dict) else []
    for part in parts:
        sharding = part.get(_SHARDING) if isinstance(part, dict) else None
        if sharding is not None and sharding not in _SHARDINGS:
            known = f"{', '.join(_SHARDINGS[:-1])} and {_SHARDINGS[-1]}"
            return PickleError(f"the distributed optimizer is in the format {sharding!r:.60}; {known} are read")
    return None


def _buffers(content: object, group: str) -> Iterator[tuple[str, dict[str, PickledTensor]]]:
    """The buffers of a data-parallel group, by their names, with their slots."""
    for number, of_dtypes in content.items() if isinstance(content, dict) else ():
        for dtypes, held in of_dtypes.items() if type(number) is int and isinstance(of_dtypes, dict) else ():
            if isinstance(held, dict) and type(dtypes) is tuple:
                text = ", ".join(f"torch.{each.text}" for each in dtypes if isinstance(each, TorchValue))
                slots = {
                    MASTER if slot in MASTERS else slot: tensor
                    for slot, tensor in held.items()
                    if isinstance(slot, str) and isinstance(tensor, PickledTensor)
                }
                yield buffer_name(group, number, f"({text})"), slots


def _number_in_chain(name: str) -> int:
    found = name.partition(".")[0].removeprefix("chained_")
    return int(found) if found.isdigit() else 0


def _groups(inner: object) -> Iterator[dict[str, object]]:
    groups = inner.get("param_groups") if isinstance(inner, dict) else None
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict):
            yield {key: value for key, value in group.items() if isinstance(key, str)}


def _common_step(inner: object) -> Iterable[object]:
    state = inner.get("state") if isinstance(inner, dict) else None
    return [state["common_step"]] if isinstance(state, dict) and "common_step" in state else []


def _one_count(steps: Sequence[object]) -> object:
    """The number of steps that all parameters have done."""
    counts: set[int] = set()
    for step in steps:
        if not isinstance(step, int | float) or not isfinite(step):
            return PickleError(f"an optimizer has done {step!r} steps, which is no count")
        counts.add(int(step))
    if len(counts) != 1:
        return PickleError("the optimizers have done different numbers of steps")
    return counts.pop()


def _readable(arguments: object) -> object:
    """The arguments of the job as a dict. An object among them that is no value is its text."""
    if not isinstance(arguments, PickledObject) or not isinstance(arguments.state, dict):
        return arguments
    return {key: _readable_items(value) for key, value in arguments.state.items()}


def _readable_items(value: object) -> object:
    if isinstance(value, list):
        return [_text(item) for item in value]
    return tuple(_text(item) for item in value) if type(value) is tuple else _text(value)


def _text(value: object) -> object:
    """An enumeration or a function of Megatron or torch as its text; anything else as it is."""
    if not isinstance(value, UnknownGlobal | UnknownObject) or not value.name.startswith(_NAMED_IN):
        return value
    name = value.name.replace(" ", ".")
    if isinstance(value, UnknownGlobal):
        return name
    return f"{name}({', '.join(repr(item) for item in value.args if isinstance(item, str | int | float))})"
