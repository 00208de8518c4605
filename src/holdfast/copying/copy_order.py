"""The order in which the records of a run are copied, so that the copy is a valid run at every moment. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from holdfast.format.records import Place


class EpochStep(NamedTuple):
    """Create the record of epoch `number`, which was opened from `origin`."""

    number: int
    origin: Place | None


def copy_order(
    newest: int, places: Collection[Place], epochs: Mapping[int, Place | None]
) -> Iterator[EpochStep | Place]:
    """The steps that bring `places` and `epochs` into a copy; a place stands for its whole checkpoint.

    `epochs` are those that the copy lacks, each with the place that it was opened from. `newest` is the newest epoch of
    the lineage that comes first.

    The lineage comes first, from its oldest checkpoint on, and each epoch right behind the place that it was opened
    from. So a copy that ends early has a head on this lineage, and no abandoned checkpoint that is newer. Everything
    else follows, in the order of its places: it lies in epochs before `newest`, so it moves no head.
    """
    done: set[int | Place] = set()
    lineage = _lineage(newest, epochs)
    for number, last in [*lineage, *((number, None) for number in sorted({*epochs, *(each.epoch for each in places)}))]:
        if number in epochs and number not in done:
            yield EpochStep(number, epochs[number])
        of_epoch = (each for each in places if each.epoch == number and each not in done)
        steps = sorted(each for each in of_epoch if last is None or each <= last)
        yield from steps
        done.update(steps, (number,))


def _lineage(newest: int, epochs: Mapping[int, Place | None]) -> list[tuple[int, Place | None]]:
    """The epochs of the lineage, oldest first, back to the first one that the copy has; each with its last place on the
    lineage (None: all)."""
    found: list[tuple[int, Place | None]] = [(newest, None)]
    while (origin := epochs.get(found[-1][0])) is not None:
        found.append((origin.epoch, origin))
    return found[::-1]
