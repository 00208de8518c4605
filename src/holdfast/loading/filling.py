"""What a load fills: all that this rank's targets need, and the memory for it."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.plan.load import Want, resharded
from holdfast.run.checkpoint import Checkpoint, Targets
from holdfast.state.bind import Binding
from holdfast.state.memory import LocalPieces
from holdfast.state.targets import MemoryTargets


class Filling:
    """The wants of one rank's targets."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, rank: int) -> None:
        self._checkpoint = checkpoint
        self._binding = binding
        self._rank = rank
        self.resharded: tuple[str, ...] = ()
        self.needed_nbytes = 0

    def plan(self) -> tuple[Sequence[Want], Targets]:
        """What is to be read, and where it goes."""
        checkpoint, targets = self._checkpoint, MemoryTargets()
        wants = self._wants(targets)
        names = checkpoint.manifest.body.names
        self.resharded = tuple(sorted({names[want.tensor] for want in resharded(checkpoint.files, wants)}))
        self.needed_nbytes = targets.nbytes
        return wants, targets

    def _wants(self, targets: MemoryTargets) -> list[Want]:
        """What is to be read; the memory of each goes to `targets`."""
        wants = []
        pieces, numbers = LocalPieces(self._rank), self._checkpoint.numbers
        for target in self._binding.targets:
            number = numbers[target.source]
            for box, view in pieces.of(target.local.layout, target.local.memory):
                wants.append(Want(number, box))
                targets.add(view)
        return wants
