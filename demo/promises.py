"""The promises of holdfast, judged by the notes of the recorder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from demo.records import Restored, State

#: Other numbers of ranks add up in another order. In nats; the loss itself is between 2 and 6.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Promise:
    """A promise of holdfast, whether the demo saw it kept, and the evidence."""

    text: str
    kept: bool
    seen: str


def same_state(text: str, saved: Iterable[State], loaded: Iterable[State]) -> Promise:
    """The states that all ranks saw before the save and after the load are one and the same."""
    before, *others = saved
    after = list(loaded)
    wrong = sorted(set().union(*(before.differences(state) for state in (*others, *after))))
    if wrong:
        return Promise(text, kept=False, seen=f"{len(wrong)} digests differ: {', '.join(wrong[:3])}")
    counts = f"{len(before.tensors)} names of tensors, {len(before.values)} tables of values"
    return Promise(text, kept=bool(after), seen=f"{counts}: equal SHA-256 on each of {len(after)} ranks")


def read_once(text: str, read: Sequence[int], stored_nbytes: int) -> Promise:
    """All ranks together read no more than the files hold."""
    seen = f"{len(read)} ranks read {sum(read) / 1e6:.2f} MB of files with {stored_nbytes / 1e6:.2f} MB"
    return Promise(text, 0 < sum(read) <= stored_nbytes, seen)


def newest_from_memory(text: str, restored: Sequence[Restored], *, whole: int, head: int) -> Promise:
    """All ranks restored from node memory the step that was `whole` there, newer than the `head` of storage."""
    found = sorted({(each.step, each.tier) for each in restored})
    told = " and ".join(f"step {step} from {tier}" for step, tier in found)
    seen = f"restored {told}, when storage was at step {head}"
    return Promise(text, kept=found == [(whole, "node memory")] and whole > head, seen=seen)


def same_losses(text: str, reference: Mapping[int, float], seen: Mapping[int, float], steps: range) -> Promise:
    """Every loss of `steps` has the bits of the reference."""
    num_equal = sum(step in seen and seen[step].hex() == reference[step].hex() for step in steps)
    return Promise(text, num_equal == len(steps) > 0, f"{num_equal} of {len(steps)} losses are equal bit by bit")


def close_losses(text: str, reference: Mapping[int, float], seen: Mapping[int, float], steps: range) -> Promise:
    """Every loss of `steps` is within `LOSS_TOLERANCE` of the reference."""
    differences = [abs(seen[step] - reference[step]) for step in steps if step in seen]
    largest = max(differences, default=0.0)
    kept = all(difference <= LOSS_TOLERANCE for difference in differences) and len(differences) == len(steps) > 0
    told = f"{len(differences)} of {len(steps)} losses, which differ by at most {largest:.1e}"
    return Promise(text, kept, f"{told} (allowed: {LOSS_TOLERANCE:.0e})")
