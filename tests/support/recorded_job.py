"""Events of a job that never ran, with times that are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.telemetry.event_record import EventRecord

#: The time when the first save began.
BEGUN_S = 1_790_000_000.0
#: The phases of a save into memory on rank 0.
PHASES = {"agree": 0.01, "copy": 0.05, "seal": 0.2, "store": 1.0}
NBYTES = 1000
#: Steps between saves, and the time between them.
EVERY, EVERY_S = 100, 60.0


class RankClock:
    """Makes the records of one rank. Its clock has a start of its own; its wall clock is that of all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def record(
        self,
        event: str,
        at_s: float,
        *,
        step: int | None = None,
        place: str = "",
        tier: str = "",
        seconds: dict[str, float] | None = None,
        numbers: dict[str, int] | None = None,
        message: str = "",
    ) -> EventRecord:
        """The record of an event `at_s` seconds after the first save began."""
        return EventRecord(
            event=event,
            unix_s=BEGUN_S + at_s,
            clock_s=1000.0 * self.rank + 100 + at_s,
            run="/runs/gpt",
            rank=self.rank,
            world_size=self.world_size,
            host=f"node{self.rank // 2}",
            process=4000 + self.rank,
            step=step,
            place=place,
            tier=tier,
            seconds=seconds or {},
            numbers=numbers or {},
            message=message,
        )


def recorded_save(
    rank: RankClock, number: int, *, slowness: float = 1.0, is_over: bool = True
) -> Iterator[EventRecord]:
    """The events of save `number`; the copy takes `slowness` times its time."""
    at_s, step = number * EVERY_S, (number + 1) * EVERY - 1
    yield rank.record("SaveBegun", at_s, step=step, tier="node memory")
    yield rank.record("SaveReturned", at_s + 0.004, step=step, seconds={"blocked": 0.004})
    at_s += PHASES["agree"]
    yield rank.record("SavePlaced", at_s, step=step, place=f"1.{number + 1}")
    at_s += PHASES["copy"] * slowness
    yield rank.record("SaveStaged", at_s, step=step, numbers={"nbytes": NBYTES})
    at_s += PHASES["seal"]
    yield rank.record("SaveSealed", at_s, step=step)
    if is_over:
        at_s += PHASES["store"]
        yield rank.record("SaveCommitted", at_s, step=step, numbers={"nbytes": NBYTES})


def recorded_job(*, num_ranks: int = 4, num_saves: int = 3, slow_rank: int | None = None) -> list[EventRecord]:
    """The events of a job that restored, and then saved every minute. The copies of `slow_rank` take four times as long
    as those of others."""
    records = []
    for number in range(num_ranks):
        rank = RankClock(number, num_ranks)
        phases = {"open": 0.1, "plan": 0.2, "read": 0.7}
        restored = rank.record("StateRestored", -1.0, step=None, tier="storage", seconds=phases, numbers={"nbytes": 10})
        records.append(msgspec.structs.replace(restored, step=7, place="1.1"))
        for save in range(num_saves):
            times = {"quiet": 0.5, "saving": 0.55}
            steps = {"quiet": 90, "saving": 10}
            at_s = save * EVERY_S - 0.001
            records.append(rank.record("StepsTimed", at_s, step=(save + 1) * EVERY - 1, seconds=times, numbers=steps))
            records.extend(recorded_save(rank, save, slowness=4.0 if number == slow_rank else 1.0))
    return records


def write_records(folder: Path, records: list[EventRecord]) -> None:
    """Write `records` into `folder`, a file for each process."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        with (folder / f"rank-{record.rank:05d}-{record.process}-00000000.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
