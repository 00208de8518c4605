"""Layouts as people write them: a mesh, and rules that place tensors on it by their names. Pure.

    mesh = { dp = 8, tp = 8 }        # ranks 0 to 63 in row-major order: the last axis varies fastest
    default = { dp = "shard 0" }     # for tensors and mesh axes that no rule covers

    [[rule]]
    names = ["model/**.wq.weight", "model/**.w1.weight"]
    place = { tp = "shard 0", dp = "shard 1" }

Along a mesh axis, ranks divide a tensor (``shard N``: along its axis N), all hold it (``replicate``), or only those of
one coordinate hold it (``stage K``). For each mesh axis, the first rule that matches a tensor and names the axis
decides; then `default`; else the tensor is replicated. Without a `default`, no rank holds a tensor that no rule
matches.

Rules match the state that an optimizer keeps for a parameter by two names: its own, and the parameter's. A tensor that
lacks the axis that `default` divides is replicated, and so is state of another shape than its parameter's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.decoding import decode_toml
from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.format.dtypes import DTYPES, no_dtype
from holdfast.format.near import near
from holdfast.format.patterns import Pattern
from holdfast.geometry import Shape
from holdfast.mapping.parts import StoredTensor
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard

_PLACE = re.compile(r"(replicate)|(shard|stage) +([0-9]{1,6})")
_TABLE = re.compile(r"\s*\[\[\s*rule\s*\]\]")
_STATE = "/state/"
_SHOWN = 3


class PipelineStage(NamedTuple):
    """The place of a tensor that only the ranks of one coordinate along a mesh axis hold."""

    coordinate: int


Place = Placement | PipelineStage


class PlacementRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The placement of tensors whose names match: a place per mesh axis, and their dtype (default: as stored).

    The dtype does not apply to state of optimizers.
    """

    names: str | tuple[str, ...]
    place: dict[str, str] = {}
    dtype: str | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError("the rule has no names")
        for name in self.globs:
            Pattern(name)
        for text in self.place.values():
            _parsed(text)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(no_dtype(self.dtype))

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs in `names`, also where that is one string."""
        return (self.names,) if isinstance(self.names, str) else self.names


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mesh by the names and sizes of its axes, and the rules, in order."""

    mesh: dict[str, int]
    rule: tuple[PlacementRule, ...] = ()
    default: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.mesh or min(self.mesh.values()) < 1:
            raise ValueError("the mesh has no axis, or an axis without ranks")
        self._check_place("default", self.default or {})
        for index, rule in enumerate(self.rule):
            self._check_place(f"rule[{index}]", rule.place)

    def _check_place(self, where: str, places: Mapping[str, str]) -> None:
        for axis, text in places.items():
            if axis not in self.mesh:
                raise ValueError(f"{where}: the mesh has no axis {axis!r}; it has {', '.join(self.mesh)}")
            place = _parsed(text)
            if isinstance(place, PipelineStage) and place.coordinate >= self.mesh[axis]:
                raise ValueError(f"{where}: {axis!r} has no {text}; its stages are 0 to {self.mesh[axis] - 1}")

    @property
    def mesh_shape(self) -> Shape:
        """The sizes of the mesh's axes."""
        return tuple(self.mesh.values())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.mesh_shape)


@dataclass(frozen=True)
class HeldTensor:
    """The way in which ranks hold a tensor: a place per mesh axis, and its dtype there (None: as stored)."""

    places: tuple[Place, ...]
    dtype: str | None

    def placed(self, mesh_shape: Shape) -> Placed:
        """These places as placements on the mesh of the ranks that hold some of the tensor."""
        ranks = np.arange(prod(mesh_shape)).reshape(mesh_shape)
        stages = [
            (axis, place.coordinate) for axis, place in enumerate(self.places) if isinstance(place, PipelineStage)
        ]
        for axis, coordinate in stages:
            ranks = ranks.take([coordinate], axis)
        placements = tuple(Replicate() if isinstance(place, PipelineStage) else place for place in self.places)
        return Placed(Mesh(ranks.shape, tuple(ranks.reshape(-1).tolist())), placements)


def fsdp(world_size: int) -> Layout:
    """The layout that divides every tensor along its first axis over all ranks."""
    return Layout({"fsdp": world_size}, (), {"fsdp": "shard 0"})


def from_toml(text: str, *, path: str) -> Layout:
    """The layout in a TOML text. Raises `ConfigurationError`, code ``config.layout``, which says where the fault is."""
    try:
        return decode_toml(text, Layout)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not a valid layout: {_located(str(error), text)}.",
            code="config.layout",
            action='Write mesh = {dp = 8, tp = 8} and tables [[rule]] with names = "..." and place = {tp = "shard 0"}.',
            path=path,
        ) from error


def assign(layout: Layout, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> dict[str, HeldTensor]:
    """The placement of each tensor on ranks; tensors that no rank holds are left out. Rules match a tied tensor by all
    its names.

    Raises `IncompatibleError`, code ``incompatible.layout``, for a rule that matches nothing, and for one that divides
    a tensor along an axis that it does not have.
    """
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    rules = [_Compiled.of(number, rule) for number, rule in enumerate(layout.rule, 1)]
    found = {}
    for name, stored in tensors.items():
        owner = parameter_of(name, tensors, aliases)
        parameter = None if owner is None else owner[1]
        known = [name, *others.get(name, ()), *([] if parameter is None else [parameter])]
        held = _hold(layout, rules, _PlacedTensor(name, known, stored.shape, _shape(parameter, tensors, aliases)))
        if held is not None:
            found[name] = held
    for rule in rules:
        if not rule.matched:
            raise _unmatched(rule, [*tensors, *aliases])
    return found


def parameter_of(name: str, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> tuple[str, str] | None:
    """The paths of the optimizer and of the parameter of a tensor ``<path>/state/<parameter>/<slot>``, else None."""
    at = name.find(_STATE)
    while at >= 0:
        parameter = name[at + len(_STATE) :].rpartition("/")[0]
        while parameter:
            if parameter in tensors or parameter in aliases:
                return name[:at], parameter
            parameter = parameter.rpartition("/")[0]
        at = name.find(_STATE, at + 1)
    return None


class _PlacedTensor(NamedTuple):
    """A tensor to place: the names by which rules match it, and for optimizer state the shape of its parameter."""

    name: str
    names: list[str]
    shape: Shape
    parameter_shape: Shape | None


@dataclass
class _Compiled:
    """A rule with its parsed patterns and places, and whether it has matched any tensor."""

    number: int
    rule: PlacementRule
    patterns: list[Pattern]
    places: dict[str, Place]
    matched: bool = field(default=False)

    @staticmethod
    def of(number: int, rule: PlacementRule) -> _Compiled:
        places = {axis: _parsed(text) for axis, text in rule.place.items()}
        return _Compiled(number, rule, [Pattern(text) for text in rule.globs], places)

    def match(self, names: Iterable[str]) -> bool:
        found = any(pattern.match(name) is not None for name in names for pattern in self.patterns)
        self.matched = self.matched or found
        return found


def _hold(layout: Layout, rules: list[_Compiled], subject: _PlacedTensor) -> HeldTensor | None:
    """The placement of one tensor on ranks; None where no rank holds it."""
    matching = [rule for rule in rules if rule.match(subject.names)]
    if not matching and layout.default is None:
        return None
    is_state = subject.parameter_shape is not None
    is_alone = is_state and subject.shape != subject.parameter_shape
    num_axes = 0 if is_alone else len(subject.shape)
    places: dict[str, Place] = {}
    for rule in matching:
        for axis, place in rule.places.items():
            if axis in places:
                continue
            if isinstance(place, Shard) and place.axis >= num_axes and not is_alone:
                raise _beyond(rule, axis, place, subject)
            places[axis] = place
    for axis, text in (layout.default or {}).items():
        places.setdefault(axis, _parsed(text))
    reached = tuple(_within(places.get(axis, Replicate()), num_axes) for axis in layout.mesh)
    dtype = None if is_state else next((rule.rule.dtype for rule in matching if rule.rule.dtype is not None), None)
    return HeldTensor(reached, dtype)


def _within(place: Place, num_axes: int) -> Place:
    return Replicate() if isinstance(place, Shard) and place.axis >= num_axes else place


def _parsed(text: str) -> Place:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ValueError(f'{text!r} is not a placement; use "replicate", "shard N" or "stage K"')
    if found[1]:
        return Replicate()
    number = int(found[3])
    return Shard(number) if found[2] == "shard" else PipelineStage(number)


def _shape(name: str | None, tensors: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> Shape | None:
    return None if name is None else tensors[aliases.get(name, name)].shape


def _located(message: str, text: str) -> str:
    """`message` with rules counted from 1, each with the line on which it begins."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _TABLE.match(line)]

    def told(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"rule {index + 1}" + (f" (line {lines[index]})" if index < len(lines) else "")

    return re.sub(r"(?:\$\.)?rule\[([0-9]+)\]", told, message)


def _unmatched(rule: _Compiled, names: Iterable[str]) -> IncompatibleError:
    known = list(names)
    close = list(dict.fromkeys(name for glob in rule.rule.globs for name in near(glob, known)))[:_SHOWN]
    hint = f"; did you mean {', '.join(map(repr, close))}?" if close else "."
    return IncompatibleError(
        f"Rule {rule.number} of the layout matches no tensor of the checkpoint: {_listed(rule.rule.globs)}{hint}",
        code="incompatible.layout",
        action="Correct or remove the rule. 'holdfast show' lists the names; a mapping changes them first.",
    )


def _beyond(rule: _Compiled, mesh_axis: str, place: Shard, subject: _PlacedTensor) -> IncompatibleError:
    what = f"divides axis {place.axis} along {mesh_axis!r}, but {subject.name!r} has shape {subject.shape}"
    return IncompatibleError(
        f"Rule {rule.number} of the layout, {_listed(rule.rule.globs)}, {what}.",
        code="incompatible.layout",
        action='Narrow the rule, or put a rule before it that places that tensor as "replicate".',
        tensor=subject.name,
    )


def _listed(globs: tuple[str, ...]) -> str:
    more = f" and {len(globs) - _SHOWN} more" if len(globs) > _SHOWN else ""
    return ", ".join(map(repr, globs[:_SHOWN])) + more
