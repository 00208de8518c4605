"""Application of a mapping's rules to the names, tensors and values of a checkpoint. Pure.

Every rule rewrites a table of names without looking at the live state. So a load compares and plans with the result as
if the checkpoint had been saved like that, and a wrong mapping shows as a difference from the live state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from holdfast.format.patterns import Pattern, Template
from holdfast.format.values import Node
from holdfast.mapping import parts as geometry
from holdfast.mapping.draft import CheckpointTable, MappingState, Step
from holdfast.mapping.megatron_optimizers import add_masters, is_of_megatron, make_plain
from holdfast.mapping.parts import Made, StoredTensor
from holdfast.mapping.rules import (
    Cast,
    Crop,
    Drop,
    FromMegatron,
    Fuse,
    Pad,
    Rename,
    Rule,
    Split,
    Stack,
    ToMegatron,
    Transpose,
    Unstack,
    index_field,
)
from holdfast.mapping.whole_planes import check_whole_planes


def mapped(
    rules: Sequence[Rule], stored: Mapping[str, StoredTensor], aliases: Mapping[str, str], nodes: Mapping[str, Node]
) -> CheckpointTable:
    """Apply `rules` in order to a checkpoint's tensors, the other names (`aliases`) of its tensors, and its values.

    Raises `IncompatibleError`, code ``incompatible.mapping``, for a rule that matches nothing, gives a name that
    exists already, or is impossible for the shapes and dtypes of the tensors that it matches; and code
    ``incompatible.planes`` where the planes of a tensor would not stay together.
    """
    if not rules:
        return CheckpointTable(stored, aliases, nodes, {}, {})
    draft = MappingState(stored, aliases, nodes)
    for number, rule in enumerate(rules, 1):
        draft.rule = f"Rule {number}, {rule!r}"
        if isinstance(rule, Rename):
            _rename(draft, rule)
        elif isinstance(rule, Drop):
            _drop(draft, rule)
        elif isinstance(rule, Cast):
            _cast(draft, rule)
        elif isinstance(rule, FromMegatron | ToMegatron):
            _for_megatron(draft, rule)
        else:
            draft.run(_steps(draft, rule))
    table = draft.table()
    check_whole_planes(table, stored, aliases, nodes)
    return table


def _rename(draft: MappingState, rule: Rename) -> None:
    pattern, to = Pattern(rule.names), Template(rule.to)
    found = ((name, pattern.renamed(name, to)) for name in draft.subjects())
    renamed = {name: new for name, new in found if new is not None}
    if not renamed:
        raise draft.unmatched(rule.names)
    draft.move(renamed)


def _drop(draft: MappingState, rule: Drop) -> None:
    if not draft.drop(Pattern(rule.names)):
        raise draft.unmatched(rule.names)


def _cast(draft: MappingState, rule: Cast) -> None:
    pattern = Pattern(rule.names)
    names = draft.untied((name for name in draft.tensors() if pattern.match(name) is not None), in_place=True)
    for path, parameters in draft.optimizers.items():
        for parameter in parameters:
            slots = draft.slots_matching(pattern, path, parameter)
            names += [name for name in slots if name in draft.stored and not name.endswith("/step")]
    if geometry.is_floating(rule.dtype):
        names = [name for name in names if geometry.is_floating(draft.stored[name].dtype)]
    if not names:
        raise draft.unmatched(rule.names)
    for name in names:
        draft.put(name, draft.make([name], lambda made: [geometry.recast(made[0], rule.dtype)])[0])


def _for_megatron(draft: MappingState, rule: FromMegatron | ToMegatron) -> None:
    pattern = Pattern(rule.names)
    paths = [path for path in draft.optimizers if pattern.match(path) is not None]
    if not paths:
        raise draft.unmatched(rule.names)
    for path in paths:
        is_theirs = is_of_megatron(draft, path)
        if isinstance(rule, FromMegatron) and not is_theirs:
            text = "names no group for each parameter, as the optimizers do that a live job of Megatron has saved"
            raise draft.refused(f"{path!r} {text}; folders of Megatron itself do not say the groups", path)
        if isinstance(rule, ToMegatron) and is_theirs:
            raise draft.refused(f"the optimizer {path!r} was saved by a job of Megatron", path)
        if is_theirs:
            make_plain(draft, path)
        else:
            add_masters(draft, path)


def _steps(draft: MappingState, rule: Split | Fuse | Stack | Unstack | Transpose | Pad | Crop) -> list[Step]:
    """The steps of a rule: one for each tensor, or set of tensors, that it changes."""
    if isinstance(rule, Split):
        return _split(draft, rule)
    if isinstance(rule, Fuse):
        return _fuse(draft, rule)
    if isinstance(rule, Stack):
        return _stack(draft, rule)
    if isinstance(rule, Unstack):
        return _unstack(draft, rule)
    pattern = Pattern(rule.names)
    names = draft.untied((name for name in draft.tensors() if pattern.match(name) is not None), in_place=True)
    if not names:
        raise draft.unmatched(rule.names)
    return [Step((name,), (name,), partial(_reshaped, rule)) for name in names]


def _reshaped(rule: Transpose | Pad | Crop, made: Sequence[Made]) -> Sequence[Made]:
    (tensor,) = made
    if isinstance(rule, Transpose):
        return [geometry.transpose(tensor, rule.axes)]
    if isinstance(rule, Pad):
        return [geometry.pad(tensor, rule.axis, rule.size, zero=rule.fill == "zero")]
    return [geometry.crop(tensor, rule.axis, rule.size)]


def _split(draft: MappingState, rule: Split) -> list[Step]:
    shares = rule.shares or (1,) * len(rule.to)

    def make(made: Sequence[Made]) -> Sequence[Made]:
        return geometry.split(made[0], rule.axis, shares, rule.groups)

    to = [Template(text) for text in rule.to]
    return [
        Step((name,), tuple(template.fill(fields) for template in to), make)
        for name, fields in _whole_matches(draft, rule.names)
    ]


def _fuse(draft: MappingState, rule: Fuse) -> list[Step]:
    def make(made: Sequence[Made]) -> Sequence[Made]:
        return [geometry.fuse(made, rule.axis, rule.groups)]

    to = Template(rule.to)
    found = [{_key(fields): name for name, fields in _whole_matches(draft, text)} for text in rule.names]
    steps = []
    for key in dict.fromkeys(key for sources in found for key in sources):
        target = to.fill(dict(key))
        for text, sources in zip(rule.names, found, strict=True):
            if key not in sources:
                raise draft.refused(f"{text!r} matches nothing that belongs to {target!r}", target)
        steps.append(Step(tuple(sources[key] for sources in found), (target,), make))
    return steps


def _stack(draft: MappingState, rule: Stack) -> list[Step]:
    def make(made: Sequence[Made]) -> Sequence[Made]:
        return [geometry.stack(made, rule.axis)]

    to, index = Template(rule.to), index_field(rule)
    found: dict[tuple[tuple[str, str], ...], dict[int, str]] = defaultdict(dict)
    for name, fields in _whole_matches(draft, rule.names, number=index):
        at = int(fields.pop(index))
        found[_key(fields)][at] = name
    steps = []
    for key, sources in found.items():
        target, numbers = to.fill(dict(key)), range(rule.first, rule.first + len(sources))
        if sorted(sources) != list(numbers):
            has = ", ".join(map(str, sorted(sources)))
            text = f"the tensors for {target!r} have the numbers {has}, not {numbers[0]} to {numbers[-1]}"
            raise draft.refused(text, target)
        steps.append(Step(tuple(sources[number] for number in numbers), (target,), make))
    return steps


def _unstack(draft: MappingState, rule: Unstack) -> list[Step]:
    def make(made: Sequence[Made]) -> Sequence[Made]:
        return geometry.unstack(made[0], rule.axis)

    to, index = Template(rule.to), index_field(rule)
    steps = []
    for name, fields in _whole_matches(draft, rule.names):
        numbers = range(rule.first, rule.first + len(draft.make([name], make)))
        steps.append(Step((name,), tuple(to.fill(fields | {index: str(number)}) for number in numbers), make))
    return steps


def _whole_matches(draft: MappingState, names: str, *, number: str | None = None) -> list[tuple[str, dict[str, str]]]:
    """The tensors whose whole name matches, each untied, with their fields; field `number` must be a number."""
    pattern = Pattern(names)
    matches = ((name, pattern.fields_of(name)) for name in draft.tensors())
    found = {name: fields for name, fields in matches if fields is not None}
    if number is not None:
        found = {name: fields for name, fields in found.items() if _is_number(fields[number])}
    if not found:
        raise draft.unmatched(names)
    return [(name, found[name]) for name in draft.untied(found, in_place=False)]


def _key(fields: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(fields.items()))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and str(int(text)) == text
