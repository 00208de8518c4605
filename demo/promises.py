"""The promises of holdfast, judged by the notes of the witness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Other numbers of ranks add up in another order. In nats; the loss itself is between 2 and 6.
LOSS_TOLERANCE = 1e-4

Losses = Mapping[int, float]
Notes = Sequence[Mapping[str, Any]]


class Promise(NamedTuple):
    """A promise of holdfast, whether it was kept here, and what was seen."""

    text: str
    kept: bool
    seen: str


def same_state(text: str, saved: Notes, loaded: Notes) -> Promise:
    """The states that all ranks saw before the save and after the load are one and the same."""
    before, *others = ({*note["digests"].items()} for note in (*saved, *loaded))
    wrong = sorted({name for other in others for name, _ in before ^ other})
    if wrong:
        return Promise(text, kept=False, seen=f"{len(wrong)} digests differ: {', '.join(wrong[:3])}")
    seen = f"equal SHA-256 of {len(before)} names of tensors and tables of values on each of {len(loaded)} ranks"
    return Promise(text, kept=bool(loaded), seen=seen)


def read_once(text: str, restored: Notes, stored_nbytes: int) -> Promise:
    """All ranks together read no more than the files hold."""
    read = sum(note["nbytes"] for note in restored)
    seen = f"{len(restored)} ranks read {read / 1e6:.2f} MB of files with {stored_nbytes / 1e6:.2f} MB"
    return Promise(text, 0 < read <= stored_nbytes, seen)


def newest_from_memory(text: str, restored: Notes, *, whole: int, head: int) -> Promise:
    """All ranks restored from node memory the step that was `whole` there, newer than the `head` of storage."""
    found = sorted({(note["step"], note["tier"]) for note in restored})
    told = " and ".join(f"step {step} from {tier}" for step, tier in found)
    seen = f"restored {told}, when storage was at step {head}"
    return Promise(text, kept=found == [(whole, "node memory")] and whole > head, seen=seen)


def newest_from_peers(text: str, restored: Notes, *, protected: int, head: int) -> Promise:
    """All ranks restored one step from peer memory: the newest `protected` one, or one that was protected after that
    was noted; newer than the `head` of storage."""
    found = sorted({(note["step"], note["tier"]) for note in restored})
    told = " and ".join(f"step {step} from {tier}" for step, tier in found)
    kept = len(found) == 1 and found[0][0] >= protected > head and found[0][1] == "peer memory"
    return Promise(text, kept, f"restored {told}, when storage was at step {head}")


def same_losses(text: str, reference: Losses, seen: Losses, steps: range) -> Promise:
    """Every loss of `steps` has the bits of the reference."""
    num_equal = sum(step in seen and seen[step].hex() == reference[step].hex() for step in steps)
    return Promise(text, num_equal == len(steps) > 0, f"{num_equal} of {len(steps)} losses are equal bit by bit")


def close_losses(text: str, reference: Losses, seen: Losses, steps: range) -> Promise:
    """Every loss of `steps` is within `LOSS_TOLERANCE` of the reference."""
    differences = [abs(seen[step] - reference[step]) for step in steps if step in seen]
    largest = max(differences, default=0.0)
    kept = all(difference <= LOSS_TOLERANCE for difference in differences) and len(differences) == len(steps) > 0
    told = f"{len(differences)} of {len(steps)} losses, which differ by at most {largest:.1e}"
    return Promise(text, kept, f"{told} (allowed: {LOSS_TOLERANCE:.0e})")


def saved_together(
    text: str, saved: Sequence[Sequence[int]], exit_codes: Sequence[int], *, signalled: int, every: int
) -> Promise:
    """All ranks `saved` after the same steps: those of a schedule up to the last one, which follows the signal after
    step `signalled`; and all exited with 75."""
    together = sorted(set(map(tuple, saved)))
    steps = together[0] or (-1,)
    scheduled = [*range(every, steps[-1], every)]
    kept = len(together) == 1 and steps[-1] > signalled and [*steps[:-1]] == scheduled and {*exit_codes} == {75}
    told = " and ".join(", ".join(map(str, each)) for each in together)
    seen = f"saved after steps {told}; the exit codes are {' and '.join(map(str, exit_codes))}"
    return Promise(text, kept, seen)


def each_sample_once(
    text: str, jobs: Sequence[Mapping[int, Sequence[int]]], *, num_samples: int, num_steps: int, batch_size: int
) -> Promise:
    """The samples of the steps of all jobs together, one job after the other: each step is there once, and of each
    `num_samples` in a row none is there twice."""
    steps = [step for job in jobs for step in sorted(job)]
    samples = [number for job in jobs for step in sorted(job) for number in job[step]]
    epochs = [samples[begin : begin + num_samples] for begin in range(0, len(samples), num_samples)]
    are_whole = steps == [*range(num_steps)] and len(samples) == num_steps * batch_size
    num_doubled = sum(len(epoch) - len(set(epoch)) for epoch in epochs)
    seen = f"{len(steps)} steps, {len(samples)} samples in {len(epochs)} epochs, of which {num_doubled} came twice"
    return Promise(text, are_whole and num_doubled == 0, seen)


def kept_the_newest(text: str, stored: Sequence[int], saved: Sequence[int], *, number: int) -> Promise:
    """Of the steps that were saved the newest are stored, newest first, and no others."""
    newest = sorted(saved)[-number:][::-1]
    return Promise(
        text, [*stored] == newest and len(saved) > number, f"{len(saved)} were saved, steps {[*stored]} stay"
    )
