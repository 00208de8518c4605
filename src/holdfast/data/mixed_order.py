"""`MixedOrder`: one order of the samples of several datasets for the whole job, in fixed shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, cast

import numpy as np

from holdfast.data.batch_order import BatchOrder
from holdfast.data.batch_share import batch_share
from holdfast.data.data_identity import (
    VERSION,
    StateValue,
    checked_fingerprint,
    checked_length,
    checked_seed,
)
from holdfast.data.permutation import Grids, Numbers, keys_of, permuted, samples_at
from holdfast.options import checked_number
from holdfast.wording import kind_of

#: A round has at most so many samples, so that its numbers fit into the arithmetic of the permutation.
_MAX_ROUND: Final = 1 << 32


class _Phase(NamedTuple):
    """The time from place `start` on, in which `weights` hold; before it, `used` samples of each source came."""

    start: int
    weights: tuple[int, ...]
    used: tuple[int, ...]

    def rounds_until(self, place: int) -> int:
        """The number of rounds that begin before `place`."""
        return -(-(place - self.start) // sum(self.weights))

    def after(self, num_rounds: int, weights: tuple[int, ...]) -> _Phase:
        """The phase that follows this one after so many rounds."""
        used = tuple(used + num_rounds * weight for used, weight in zip(self.used, self.weights, strict=True))
        return _Phase(self.start + num_rounds * sum(self.weights), weights, used)


class MixedOrder(BatchOrder):
    """An endless order of the samples of several datasets, the sources; otherwise as `GlobalOrder`.

    `lengths` are the numbers of samples of the sources, `weights` their shares, as whole numbers: with ``{"web": 3,
    "code": 1}`` the order consists of rounds of 4 samples, 3 of "web" and 1 of "code", in an order of their own. Each
    source has epochs of its own, in which each of its samples comes once; within the round in which an epoch ends, the
    samples of the two epochs mix. A weight may be 0.

    A sample is a number into the sources one after another, as `torch.utils.data.ConcatDataset` counts:
    ``DataLoader(ConcatDataset([web, code]), batch_sampler=order)`` for the `lengths` of "web" and "code", in this
    order.

    `weights` are those at the start of the run; `reweight` changes them, and the state has all of them. A load raises
    `IncompatibleError` if `lengths`, `weights`, `seed` or `fingerprint` is not that of the save (code
    ``incompatible.dataset``).
    """

    def __init__(
        self,
        lengths: Mapping[str, int],
        *,
        weights: Mapping[str, int],
        global_batch_size: int,
        seed: int = 0,
        fingerprint: str = "",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not isinstance(lengths, Mapping):
            raise TypeError(
                f"lengths has the number of samples of each source by its name, not {kind_of(lengths)}: {lengths!r}"
            )
        checked = {name: checked_length(f"the length of {name!r}", length) for name, length in lengths.items()}
        if not checked:
            raise ValueError("an order needs a source, but lengths is empty")
        num_samples = checked_length("the length of all sources", sum(checked.values()))
        self._names = tuple(checked)
        first = self._checked_weights(weights)
        identity: dict[str, StateValue] = {
            "version": VERSION,
            "lengths": [[name, length] for name, length in checked.items()],
            "weights": list(first),
            "seed": checked_seed(seed),
            "fingerprint": checked_fingerprint(fingerprint),
        }
        super().__init__(identity, num_samples, batch_share(global_batch_size, rank, world_size))
        self._grids = Grids.of(list(checked.values()))
        #: The first sample of each source, as all sources are counted.
        self._offsets = _sums_before(list(checked.values()))
        seeds = keys_of(np.array([seed], dtype=np.uint64), np.arange(len(checked) + 1, dtype=np.uint64))
        #: The seed of the order in rounds, and that of each source.
        self._round_seed, self._seeds = seeds[:1], seeds[1:]
        self._phases = [_Phase(0, first, (0,) * len(checked))]

    @property
    def weights(self) -> dict[str, int]:
        """The weights of the round that begins next."""
        return dict(zip(self._names, self._phases[-1].weights, strict=True))

    def reweight(self, weights: Mapping[str, int]) -> None:
        """Change the weights from the next round on that has not begun at the position. Every sample of a source still
        comes once in each of its epochs.

        Call it on all ranks after the same step, such as after a restore. It does nothing if the weights are these
        already. Batches that were drawn and not yet trained on are drawn anew, by a new iteration of the loader.
        """
        new = self._checked_weights(weights)
        if new == self._phases[-1].weights:
            return
        while self._phases[-1].start > self._position:
            self._phases.pop()
        last = self._phases[-1]
        num_rounds = last.rounds_until(self._position)
        if not num_rounds:
            self._phases.pop()
        self._phases.append(last.after(num_rounds, new))
        self._restart()

    def _checked_weights(self, weights: Mapping[str, int]) -> tuple[int, ...]:
        if set(weights) != set(self._names):
            raise ValueError(f"weights has {sorted(weights)}, but the sources are {sorted(self._names)}")
        reason = "a source cannot have less than no samples"
        found = tuple(
            checked_number(f"the weight of {name!r}", weights[name], least=0, reason=reason) for name in self._names
        )
        if not 0 < sum(found) <= _MAX_ROUND:
            raise ValueError(f"the weights must have a sum from 1 to {_MAX_ROUND}, not {sum(found)}")
        return found

    def _samples(self, places: Numbers) -> Numbers:
        ends = [phase.start for phase in self._phases[1:]]
        parts = np.split(places, np.searchsorted(places, np.array(ends, dtype=np.uint64)))
        found = [self._samples_in(phase, part) for phase, part in zip(self._phases, parts, strict=True) if part.size]
        return np.concatenate(found)

    def _samples_in(self, phase: _Phase, places: Numbers) -> Numbers:
        """The samples at `places`, which all lie in one phase."""
        size = sum(phase.weights)
        rounds, slots = np.divmod(places - np.uint64(phase.start), np.uint64(size))
        keys = keys_of(self._round_seed, rounds * np.uint64(size) + np.uint64(phase.start))
        slots = permuted(slots, Grids.of([size]), keys)
        before = _sums_before(phase.weights)
        sources = np.searchsorted(before, slots, side="right") - 1
        slots -= before[sources]
        within: Numbers = rounds * np.array(phase.weights, dtype=np.uint64)[sources]
        within += np.array(phase.used, dtype=np.uint64)[sources] + slots
        return self._offsets[sources] + samples_at(within, self._seeds[sources], self._grids.at(sources))

    def state_dict(self) -> dict[str, StateValue]:
        """The position, the weights with the places from which on they hold, and what the order follows from. Equal on
        all ranks."""
        phases: list[StateValue] = [[phase.start, list(phase.weights)] for phase in self._phases]
        return {**super().state_dict(), "phases": phases}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on from the position and with the weights of a state that `state_dict` returned.

        Raises:
            IncompatibleError: the state is of other sources, or of another order (code ``incompatible.dataset``).
        """
        super().load_state_dict(state)
        first = self._phases[0]
        self._phases = [first]
        for start, weights in cast("Sequence[tuple[int, Sequence[int]]]", state["phases"]):
            if start:
                last = self._phases[-1]
                self._phases.append(last.after(last.rounds_until(start), tuple(weights)))
            else:
                self._phases = [_Phase(0, tuple(weights), first.used)]


def _sums_before(numbers: Sequence[int]) -> Numbers:
    """For each number, the sum of those before it."""
    return np.cumsum([0, *numbers[:-1]], dtype=np.uint64)
