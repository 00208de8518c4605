"""`GlobalOrder`: one order of the samples of one dataset for the whole job."""

from __future__ import annotations

import numpy as np

from holdfast.data.batch_order import BatchOrder
from holdfast.data.batch_share import batch_share
from holdfast.data.data_identity import VERSION, StateValue, checked_fingerprint, checked_length, checked_seed
from holdfast.data.permutation import Grids, Numbers, samples_at


class GlobalOrder(BatchOrder):
    """An endless order of the samples of a dataset with `length` samples, cut into global batches; and a position.

    Each epoch has every sample once, in an order of its own that follows from `seed` and the number of the epoch. A
    batch may begin in one epoch and end in the next: no sample is dropped, and none is added. Each rank trains on an
    equal part of each global batch, so `global_batch_size` must be a multiple of `world_size`. Without `rank` and
    `world_size`, all ranks of the job have parts of their own.

    It is a batch sampler: ``DataLoader(dataset, batch_sampler=order, num_workers=4)`` gives this rank's batches from
    the position on. The state is the position after the last batch that was trained on, however many batches workers
    have loaded ahead: take batches from ``order.follow(loader)``, or call `advance` after each step. The state is equal
    on all ranks and continues on any number of ranks and workers, and with another `global_batch_size`.

    `fingerprint` is a text that says which samples the dataset has, such as a digest of its files. A load raises
    `IncompatibleError` if it, `length` or `seed` is not that of the save (code ``incompatible.dataset``).
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch_size: int,
        seed: int = 0,
        fingerprint: str = "",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        length = checked_length("length", length)
        seed = checked_seed(seed)
        self._seeds = np.array([seed], dtype=np.uint64)
        self._grid = Grids.of([length])
        identity: dict[str, StateValue] = {
            "version": VERSION,
            "length": length,
            "seed": seed,
            "fingerprint": checked_fingerprint(fingerprint),
        }
        super().__init__(identity, length, batch_share(global_batch_size, rank, world_size))

    @property
    def epoch(self) -> int:
        """The epoch of the sample that the job trains on next, from 0 on."""
        return self._position // self._num_samples

    def _samples(self, places: Numbers) -> Numbers:
        return samples_at(places, self._seeds, self._grid)
