"""The tensors that an export writes: chosen by name, after a mapping, each with the stored parts it is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod
from typing import Final, NamedTuple

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError, HoldfastError, IncompatibleError
from holdfast.exporting.chosen_values import readable_nodes, value_paths
from holdfast.format.dtypes import DTYPES, numpy_type
from holdfast.format.names import shown
from holdfast.format.patterns import Globs
from holdfast.format.values import Open
from holdfast.geometry import Box, Shape
from holdfast.mapping import Rule
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import Parts, as_stored, stored_tensors
from holdfast.mapping.whole_planes import chosen_in_part
from holdfast.plan.load import ReadRequest, plan_load
from holdfast.run.paths import some_quoted

#: Parts of the names of input embeddings, the likeliest first. Older loaders find a tied tensor only under such a name.
_EMBEDDINGS: Final = ("shared", "wte", "emb")


class ExportTensor(NamedTuple):
    """A tensor to write: its dtype and shape in the new files, and the stored parts that it is made of.

    `name` is its name after the mapping. `stored_dtype` is the dtype of its parts.
    """

    name: str
    dtype: str
    stored_dtype: str
    shape: Shape
    parts: Parts

    @property
    def itemsize(self) -> int:
        """Bytes per element in the new files."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements in the new files."""
        return prod(self.shape) * self.itemsize


class ChosenTensor(NamedTuple):
    """A tensor to write, and all its chosen names: the one that it is stored under first, then its aliases."""

    names: tuple[str, ...]
    tensor: ExportTensor


@dataclass(frozen=True)
class ChosenContent:
    """The tensors that an export writes, in the order in which their elements are stored, the paths of its values, and
    the table after the mapping.

    `equal` has, for a tensor that was fused from several of which it keeps one (a step counter), the others.
    """

    tensors: Sequence[ChosenTensor]
    values: Sequence[str]
    table: CheckpointTable
    equal: Sequence[tuple[ExportTensor, ExportTensor]]


def choose(
    state: StoredState, *, select: Globs | None, rules: Sequence[Rule], model_only: bool, is_mapped: bool
) -> ChosenContent:
    """Choose what `select` matches of the names that `rules` make: tensors and values, or, with `model_only`, tensors.

    Without `select`, that is everything, or, with `model_only`, the tensors of the state's only module; `is_mapped`
    says that rules may have changed names. Raises `IncompatibleError` and `ConfigurationError`, before any tensor is
    read, for rules and globs that fit nothing and for what cannot be written.
    """
    stored = stored_tensors(state.manifest)
    table = mapped(rules, stored, state.manifest.body.aliases, state.nodes)
    if select is not None and not model_only:
        table = replace(table, nodes=readable_nodes(table.nodes, select))
    aliases = defaultdict(list)
    for name, of in sorted(table.aliases.items()):
        aliases[of].append(name)
    compared = {name for others in table.equal.values() for name in others}
    below = _only_module(state) if model_only and select is None else ""
    found = []
    for name in sorted(table.stored):
        if name in compared:
            continue
        tensor = _tensor(state, table, name)
        names = [name, *aliases[name]]
        if select is not None:
            names = [one for one in names if one in select]
        elif below and is_mapped:
            sources = [part.source for part in tensor.parts if part.source is not None] or [name]
            names = names if all(_is_below(source, below) for source in sources) else []
        elif below:
            names = [one for one in names if _is_below(one, below)]
        if names:
            found.append(ChosenTensor(tuple(names), tensor))
    paths = () if model_only else tuple(value_paths(table.nodes))
    if select is not None:
        paths = tuple(path for path in paths if path in select)
    for glob, close in (select.unmatched() if select is not None else {}).items():
        raise _unmatched(glob, close)
    _check_all(found, table)
    kept = {one.tensor.name: one.tensor for one in found}
    equal = [(kept[name], _tensor(state, table, other)) for name in kept for other in table.equal.get(name, ())]
    return ChosenContent(_in_stored_order(state, found), paths, table, equal)


def _tensor(state: StoredState, table: CheckpointTable, name: str) -> ExportTensor:
    dtype, shape = table.stored[name]
    parts = table.parts.get(name)
    if parts is None:
        parts = as_stored(name, table.stored[name]).parts
    source = next((part.source for part in parts if part.source is not None), None)
    stored = dtype if source is None else state.manifest.dtype(state.numbers[source])
    return ExportTensor(name, dtype, stored, shape, parts)


def _only_module(state: StoredState) -> str:
    """The path of the state's only module, or of the only container of tensors in a state without modules; "" for a
    state whose names have no containers."""
    modules = [path for path, node in state.nodes.items() if node == Open("module")]
    if not modules:
        modules = sorted({name.partition("/")[0] if "/" in name else "" for name in state.manifest.body.names})
    if len(modules) > 1:
        raise ConfigurationError(
            f"{state.folder} holds several sets of tensors, and only one can become a model: {some_quoted(modules)}.",
            code="config.export",
            action=f"Choose one, such as select={modules[0] or '*'!r} (--select {modules[0] or '*'!r}).",
            path=state.folder,
        )
    return modules[0] if modules else ""


def _is_below(name: str, path: str) -> bool:
    return name == path or name.startswith(path + "/")


def _unmatched(glob: str, close: Sequence[str]) -> IncompatibleError:
    return IncompatibleError(
        f"select: nothing to write has a name that matches {glob!r}.",
        code="incompatible.select",
        action=f"Did you mean {some_quoted(list(close))}?" if close else "`holdfast show` lists the names.",
    )


def _check_all(chosen: Sequence[ChosenTensor], table: CheckpointTable) -> None:
    names = [name for one in chosen for name in one.names]
    if (in_part := chosen_in_part(names, {*table.stored, *table.aliases})) is not None:
        raise in_part
    for one in chosen:
        _check(one.tensor)


def _check(tensor: ExportTensor) -> None:
    if any(part.source is None and not part.zero for part in tensor.parts):
        text = "has elements that the checkpoint does not hold"
        raise unfit(tensor.name, text, 'Fill them: a rule Pad takes fill="zero".')
    numpy_types = map(numpy_type, (tensor.dtype, tensor.stored_dtype))
    if tensor.dtype != tensor.stored_dtype and any(dtype is None for dtype in numpy_types):
        text = f"cannot be cast from {tensor.stored_dtype} to {tensor.dtype} by an export"
        raise unfit(tensor.name, text, "Leave out the cast of this tensor.")


def unfit(name: str, what: str, action: str) -> HoldfastError:
    """The error for a tensor that cannot be written; `what` follows its name."""
    return IncompatibleError(f"{shown(name)} {what}.", code="incompatible.export", action=action, tensor=name)


def _in_stored_order(state: StoredState, chosen: Sequence[ChosenTensor]) -> list[ChosenTensor]:
    """Largest elements first, so that all are aligned; then in the order of the files that hold them, so that an export
    goes through each of these once, front to back."""
    wants, of_want = [], []
    for index, one in enumerate(chosen):
        part = next((part for part in one.tensor.parts if part.source is not None), None)
        if part is not None and part.source is not None:
            wants.append(ReadRequest(state.numbers[part.source], Box(part.start, (1,) * len(part.start))))
            of_want.append(index)
    places: dict[int, tuple[int, int]] = {}
    for reads in plan_load(state.files, wants):
        for want, start in zip(reads.wants.tolist(), reads.starts.tolist(), strict=True):
            places[of_want[want]] = reads.file, start
    order = sorted(range(len(chosen)), key=lambda at: (-chosen[at].tensor.itemsize, places.get(at, (0, 0)), at))
    return [chosen[at] for at in order]


def without_common_container(names: Sequence[str]) -> dict[str, str]:
    """Each name without the path of the innermost container that all of `names` lie in."""
    above = [name.split("/")[:-1] for name in names]
    columns = zip(*above, strict=False)  # as many as the least number of containers
    alike = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return {name: "/".join(name.split("/")[alike:]) for name in names}


def embedding_likeness(name: str) -> int:
    """The rank of a tied tensor's name among its names, of which the least is that of the input embedding."""
    return next((rank for rank, part in enumerate(_EMBEDDINGS) if part in name), len(_EMBEDDINGS))
