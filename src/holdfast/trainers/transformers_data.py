"""The position of a job of transformers in its data, and how its loader goes on from there.

Trainer counts epochs from 0 in each job, and asks its loader for one pass per epoch. `LoaderPosition` makes those
passes begin where the last job ended. On the same number of ranks, with the same batches, it skips whole batches, so
each rank gets the batches that it would have got. After a change it counts samples: each pass then has as many batches
as an epoch, but begins in the middle of the order. It also does so where an epoch ends with a step of fewer batches:
Trainer would not end that step in an epoch that begins in the middle.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch.utils.data import Sampler

from holdfast.data.batch_order import BatchOrder
from holdfast.trainers.loader_passes import (
    LoaderShape,
    countable_sampler,
    iterate,
    length_of,
    sampler_of,
    shape_of,
    skipping,
)

_log = logging.getLogger(__name__)

#: The number of batches of an epoch that was not trained on in whole batches of the present size.
_UNEVEN: Final = -1


class LoaderPosition:
    """The position of this job in the samples of `loader`, as an entry of the state.

    `epoch` is the number of whole epochs, `batches` the number of batches that each rank has trained on since. A step
    takes `group` batches.
    """

    def __init__(self, loader: Any, *, group: int, world_size: int, per_rank: int) -> None:
        self._loader = loader
        self._group = group
        batch_sampler = getattr(loader, "batch_sampler", None)
        #: An order of samples that knows its own position; None for other loaders.
        self.order = batch_sampler if isinstance(batch_sampler, BatchOrder) else None
        self._length = None if self.order is not None else length_of(loader)
        self._shape = shape_of(loader, world_size=world_size, per_rank=per_rank)
        self.epoch = 0
        self.batches = 0
        #: The order of samples that replaces that of the loader, where samples are counted.
        self._counted: CountedSampler | None = None
        self._passes = 0
        self._loaded: tuple[int, int, int, LoaderShape] | None = None
        self._undo = _nothing
        #: The number of batches after which the first epoch ends early; None if it ends by itself.
        self._last_batch: int | None = None

    def state_dict(self) -> dict[str, int | list[int]]:
        """The position. Equal on all ranks."""
        epoch, batches, samples = self.epoch, self.batches, self.batches * self._shape.batch_size
        if self._counted is not None:
            epoch, samples = divmod(self._counted.position(self.batches * self._shape.batch_size), self._counted.length)
            batches = _UNEVEN
        return {"epoch": epoch, "batches": batches, "samples": samples, "shape": list(self._shape)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Note the position of the save; `resume` goes there."""
        self._loaded = state["epoch"], state["batches"], state["samples"], LoaderShape(*state["shape"])

    def count_steps(self, num_steps: int, *, skip: bool) -> None:
        """Take the position from the number of steps, for a state without a position."""
        if self._length is not None:
            self.epoch, steps = divmod(num_steps, -(-self._length // self._group))
            self.batches = steps * self._group if skip else 0

    @property
    def has_loaded(self) -> bool:
        """Whether a position was loaded."""
        return self._loaded is not None

    @property
    def is_of_this_shape(self) -> bool:
        """Whether the job that was loaded had as many ranks, with the same batches."""
        return self._loaded is not None and self._loaded[3] == self._shape

    def resume(self, *, skip: bool) -> None:
        """Have the loader go on at the loaded position. Without `skip`, at the beginning of its epoch."""
        if self.order is not None:
            return
        samples = self.batches * self._shape.batch_size
        if self._loaded is not None:
            self.epoch, self.batches, samples, _ = self._loaded
        if not skip:
            self.batches = samples = 0
        is_even = self.batches != _UNEVEN and (self._loaded is None or self.is_of_this_shape)
        if samples and not (is_even and self._ends_with_a_step):
            self._go_to_sample(samples, is_even=is_even)
        if self._counted is None:
            self._go_to_batch()

    @property
    def _ends_with_a_step(self) -> bool:
        """Whether the last batch of the epoch ends a step, if Trainer counts batches from here on: it ends a shorter
        step there only if it has counted all batches of the epoch."""
        return self._length is None or (self._length - self.batches) % self._group == 0

    def _go_to_sample(self, samples: int, *, is_even: bool) -> None:
        sampler = countable_sampler(self._loader)
        if sampler is not None and self._length is not None:
            samples = min(samples, self._shape.num_samples)
            start = self.epoch * self._shape.num_samples + samples
            self._counted = CountedSampler(sampler, start=start, size=self._length * self._shape.batch_size)
            self._loader.set_sampler(self._counted)
            self.epoch = self.batches = 0
        elif not is_even:
            self.batches = samples // self._shape.batch_size
            _log.warning(
                "the job has another number of ranks or other batches, and its loader cannot be positioned by samples: "
                "it goes on at batch %d of epoch %d, and a few samples may be trained on twice, or not at all",
                self.batches,
                self.epoch,
            )

    def _go_to_batch(self) -> None:
        """Have the first pass begin after `batches` batches, and let later ones know their epochs."""
        if self._length is not None and self.batches:
            rest = (self._length - self.batches) % self._group
            if rest:
                _log.warning("the last %d of %d batches of epoch %d are left out", rest, self._length, self.epoch)
            if self.batches >= self._length - rest:
                self.epoch, self.batches = self.epoch + 1, 0
            elif rest:
                self._last_batch = self._length - rest
        if self.epoch and hasattr(self._loader, "base_dataloader"):
            self._tell_epochs()
        if self.batches:
            self._undo = skipping(self._loader, self.batches)

    def _tell_epochs(self) -> None:
        """Whatever epoch Trainer tells the loader, its sampler and dataset hear the epoch of the data."""
        loader, tell, sampler = self._loader, self._loader.set_epoch, sampler_of(self._loader)

        def set_epoch(_: int) -> None:
            tell(self.epoch)
            if hasattr(sampler, "set_epoch"):  # a loader that skips batches does not pass it on
                sampler.set_epoch(self.epoch)

        loader.set_epoch = set_epoch

    def finish(self) -> None:
        """Training is done: the loader has no batch any more."""
        iterate(self._loader, lambda: iter(()))

    def pass_begins(self) -> None:
        """Trainer begins an epoch."""
        if self._passes and self._counted is None:
            self._undo()
            self._undo, self._last_batch = _nothing, None
            self.epoch, self.batches = self.epoch + 1, 0
        elif self._counted is not None:
            self._counted.next_pass(self._passes)
            self.batches = self._passes * (self._length or 0)
        self._passes += 1

    def batch_ends(self) -> None:
        """All ranks have trained on one batch more."""
        if self.order is not None:
            self.order.advance()
        self.batches += 1

    @property
    def is_last_batch(self) -> bool:
        """Whether the first epoch has to end with the last batch, although the loader has more."""
        return self._last_batch == self.batches

    @property
    def is_at_beginning(self) -> bool:
        """Whether the job goes on at the beginning of an epoch."""
        return self._counted is None and self.batches == 0 and self.order is None

    @property
    def epochs(self) -> float | None:
        """The number of epochs that are done, with the share of the present one; None if nobody knows."""
        if self._counted is not None:
            return self._counted.position(self.batches * self._shape.batch_size) / self._counted.length
        return None if self._length is None else self.epoch + self.batches / self._length

    def steps_left(self, num_epochs: float, planned: int) -> int | None:
        """The number of steps until `num_epochs` epochs are done, which are `planned` steps for a whole job of this
        shape. None if nobody knows."""
        if self._length is None:
            return None
        per_epoch = -(-self._length // self._group)
        if self._counted is not None:
            samples = num_epochs * self._counted.length - self._counted.position(0)
            passes, batches = divmod(max(0, math.ceil(samples / self._shape.batch_size)), self._length)
            return passes * per_epoch - (-batches // self._group)
        left = planned - self.epoch * per_epoch - -(-self.batches // self._group)
        left_out = self._last_batch is not None and planned >= (self.epoch + 1) * per_epoch
        return max(0, left - left_out)


class CountedSampler(Sampler[int]):
    """The endless order of the samples that `sampler` gives in epoch after epoch, from the sample number `start` on, in
    passes of `size` samples."""

    def __init__(self, sampler: Any, *, start: int, size: int) -> None:
        self._sampler = sampler
        self.length = len(sampler)
        self._start = start
        self._size = size
        self._pass = 0

    def __len__(self) -> int:
        return self.length

    def next_pass(self, number: int) -> None:
        """The pass `number` begins."""
        self._pass = number

    def position(self, samples: int) -> int:
        """The number of samples of all epochs, after `samples` of this job."""
        return self._start + samples

    def __iter__(self) -> Iterator[int]:
        epoch, skipped = divmod(self._start + self._pass * self._size, self.length)
        left = self._size
        while left:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            for sample in [*self._sampler][skipped : skipped + left]:
                left -= 1
                yield sample
            epoch, skipped = epoch + 1, 0


def _nothing() -> None:
    pass
