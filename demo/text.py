"""Text that every Python has: the sources of its own standard library, in batches that do not depend on the world."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

#: A token is a byte.
VOCABULARY = 256
_MAX_NBYTES = 4_000_000


def standard_library() -> Tensor:
    """The sources at the top of Python's standard library, in the order of their names: a vector of uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:_MAX_NBYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Batches:
    """The batches of a training: `size` samples a step, all ranks together, each of `context` + 1 bytes of `text`.

    A sample is a function of seed, step and its index in the whole batch. So nothing of the data order has to be saved,
    and any number of ranks together train on the same bytes in the same steps.
    """

    text: Tensor
    size: int
    context: int
    seed: int = 0

    def local(self, step: int, *, rank: int, world_size: int) -> Tensor:
        """The samples of one rank in `step`: (size / world_size, context + 1) of int64."""
        if self.size % world_size:
            raise ValueError(f"a batch of {self.size} samples cannot be divided evenly among {world_size} ranks")
        share = self.size // world_size
        return torch.stack([self._sample(step, index) for index in range(rank * share, (rank + 1) * share)])

    def _sample(self, step: int, index: int) -> Tensor:
        chance = np.random.default_rng((self.seed, step, index))
        start = int(chance.integers(len(self.text) - self.context))
        return self.text[start : start + self.context + 1].long()
