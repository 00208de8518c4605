"""The data of a load: everything that this rank's targets need, read into them."""

from __future__ import annotations

from holdfast.plan.load import Want, resharded
from holdfast.run.checkpoint import Checkpoint
from holdfast.state.bind import Binding
from holdfast.state.memory import LocalPieces
from holdfast.state.targets import MemoryTargets


class Filling:
    """Reads all that one rank's targets need."""

    def __init__(self, checkpoint: Checkpoint, binding: Binding, rank: int, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._binding = binding
        self._rank = rank
        self._verify = verify
        self.resharded: tuple[str, ...] = ()
        self.read_nbytes = 0
        self.needed_nbytes = 0

    def run(self) -> bytes:
        """Fill all targets."""
        checkpoint, targets = self._checkpoint, MemoryTargets()
        wants = self._wants(targets)
        num_files = max(checkpoint.manifest.body.num_files, 1)
        stats = checkpoint.read(wants, targets, verify=self._verify, first_file=self._rank % num_files)
        names = checkpoint.manifest.body.names
        self.resharded = tuple(sorted({names[want.tensor] for want in resharded(checkpoint.files, wants)}))
        self.read_nbytes = stats.bytes_read
        self.needed_nbytes = targets.nbytes
        return b""

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
