"""The parts of the published weights that one inference worker needs, found by running its own `load_weights`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from holdfast.errors import HoldfastError, IncompatibleError
from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box, intersect, subtract
from holdfast.inference.loaded_weights import CopySink, LoadedWeight, WeightPart
from holdfast.inference.protected_model import ProtectedModel
from holdfast.inference.strided_views import ViewPart, view_parts
from holdfast.inference.weights import PublishedTensor

#: `load_weights` of an engine's model: it takes pairs of a name and a weight.
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


@dataclass(frozen=True)
class EngineNeeds:
    """The parts of `weights` that a worker needs: disjoint boxes of each weight, none of those that it does not read.

    `unread` are the names of the weights that its loaders copy nothing of.
    """

    weights: tuple[PublishedTensor, ...]
    boxes: Mapping[str, tuple[Box, ...]]

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of the weights that this worker does not read."""
        return tuple(each.name for each in self.weights if each.name not in self.boxes)

    @property
    def nbytes(self) -> int:
        """The bytes that this worker needs."""
        return sum(
            each.dtype.itemsize * prod(box.size) for each in self.weights for box in self.boxes.get(each.name, ())
        )


class _Recorder:
    """The sink that records which boxes of each weight are copied, and copies nothing."""

    def __init__(self) -> None:
        self.boxes: dict[str, list[Box]] = {}

    def copied(self, target: torch.Tensor, weight: LoadedWeight) -> None:
        """As `CopySink.copied`."""
        for part in _parts(weight):
            known = self.boxes.setdefault(part.weight.name, [])
            for each in _boxes(part):
                if each.box not in known:
                    known.append(each.box)


def disjoint(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes that together cover the same elements."""
    known: list[Box] = []
    for box in dict.fromkeys(boxes):
        rest = [box]
        for other in known:
            rest = [piece for old in rest for piece in subtract(old, other)]
        known += rest
    return known


def discover(load_weights: LoadWeights, weights: Sequence[PublishedTensor], *, model: nn.Module) -> EngineNeeds:
    """The parts of `weights` that `load_weights` copies into this worker's `model`, which stays as it is.

    Runs the engine's own loaders once, on tensors without elements: no weight is read, and none is materialised. Writes
    to the parameters and buffers of `model` are left out. Works for every loader that selects by views (slices, splits,
    reshapes, permutations, joins, casts) and copies.

    Raises:
        IncompatibleError: a loader needs elements (``incompatible.loader``, with the operation's name), replaces
            parameters instead of filling them, or raises another error, which the message has with the weight.
    """
    recorder = _Recorder()
    with ProtectedModel(model):
        _run(load_weights, weights, recorder)
    return EngineNeeds(
        tuple(weights), {name: tuple(disjoint(boxes)) for name, boxes in recorder.boxes.items() if boxes}
    )


def _run(load_weights: LoadWeights, weights: Sequence[PublishedTensor], sink: CopySink) -> None:
    """Run `load_weights` on stand-ins of `weights`. An error that it raises names the weight that it was loading."""
    current = ""

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for each in weights:
            current = each.name
            yield each.name, LoadedWeight.whole(each, sink)
        current = ""

    try:
        load_weights(given())
    except HoldfastError:
        raise
    except Exception as error:
        where = f"at the weight {current!r}" if current else "after the last weight"
        raise IncompatibleError(
            f"load_weights of the engine raises {type(error).__name__} {where}: {error}.",
            code="incompatible.loader",
            action="Publish weights with the names and shapes that load_weights of the engine takes.",
            tensor=current or None,
        ) from error


def _parts(weight: LoadedWeight) -> Iterator[WeightPart]:
    if isinstance(weight.content, WeightPart):
        yield weight.content
    else:
        for part in weight.content.parts:
            yield from _parts(part)


def _boxes(part: WeightPart) -> Iterator[ViewPart]:
    try:
        yield from view_parts(part.weight.shape, part.strided)
    except ValueError as error:
        raise IncompatibleError(
            f"load_weights selects elements of {part.weight.name!r} that are no few boxes of it: {error}.",
            code="incompatible.loader",
            action="Publish to this engine through a backend that sends whole weights.",
            tensor=part.weight.name,
        ) from error


class StagedVersion:
    """Memory on the host for one version of the parts that a worker needs. `apply` shows it to the engine."""

    def __init__(self, needs: EngineNeeds) -> None:
        self.needs = needs
        self.is_whole = False
        self._memory = {
            each.name: [(box, torch.empty(box.size, dtype=each.dtype)) for box in needs.boxes.get(each.name, ())]
            for each in needs.weights
        }

    def target(self) -> dict[str, object]:
        """The parts as a target of `transfer` and `load`, by the names of the weights."""
        return {
            each.name: Piecewise(each.shape, self._memory[each.name], dtype=each.dtype) for each in self.needs.weights
        }

    def apply(self, load_weights: LoadWeights) -> None:
        """Have the engine's own loaders copy this version into its parameters."""
        if not self.is_whole:
            raise ValueError("the version is not whole")
        with torch.no_grad():
            _run(load_weights, self.needs.weights, self)

    def copied(self, target: torch.Tensor, weight: LoadedWeight) -> None:
        """As `CopySink.copied`: copy the staged elements."""
        if not target.is_meta:  # as where an engine counts elements only
            target.copy_(self._elements(weight))

    def _elements(self, weight: LoadedWeight) -> torch.Tensor:
        if not isinstance(weight.content, WeightPart):
            return torch.cat([self._elements(part) for part in weight.content.parts], weight.content.dim)
        part = weight.content
        found = list(_boxes(part))
        if len(found) == 1:
            elements = self._shown(part, found[0])
        else:
            elements = torch.empty(part.shape, dtype=part.weight.dtype)
            for each in found:
                elements[each.within.slices()] = self._shown(part, each)
        for dtype in part.casts:
            elements = elements.to(dtype)
        return elements

    def _shown(self, part: WeightPart, shown: ViewPart) -> torch.Tensor:
        memory = self._box(part.weight, shown.box)
        return memory.as_strided(shown.sizes, shown.strides).reshape(shown.within.size)

    def _box(self, weight: PublishedTensor, box: Box) -> torch.Tensor:
        """The elements of `box` in contiguous memory."""
        staged = self._memory[weight.name]
        for held, memory in staged:
            if held == box:
                return memory
        out = torch.empty(box.size, dtype=weight.dtype)
        missing = box.numel
        for held, memory in staged:
            common = intersect(box, held)
            if common is not None:
                inside = memory[common.relative_to(held.start).slices()]
                out[common.relative_to(box.start).slices()] = inside
                missing -= common.numel
        if missing:
            raise IncompatibleError(
                f"load_weights takes other parts of {weight.name!r} than it took when they were discovered.",
                code="incompatible.loader",
                action="Initialise the weight transfer again, after every change of the engine's layout.",
                tensor=weight.name,
            )
        return out
