"""Jobs that never ran: their events, and the fate of each step as a model knows it that carries states around."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.goodput_ledger import Part

BEGUN_S = 1_790_000_000.0
#: One step that was done once: the number of the step, and a number of its own.
Done = tuple[int, int]


class Steps(NamedTuple):
    """The loop does so many steps."""

    number: int
    step_s: float


class Save(NamedTuple):
    """The loop saves. `known`: who knows that the checkpoint is committed; "nobody" where it is not."""

    blocked_s: float
    known: Literal["rank 0", "rank 1", "history", "nobody"]


class Restore(NamedTuple):
    """The loop, or a job at its begin, restores: from the newest checkpoint but `back`, in `tier`."""

    took_s: float
    back: int
    tier: Literal["storage", "node memory"]


class Job(NamedTuple):
    """A job: seconds from the last one's end to its start and from there to its restore, what it does, and its end."""

    gap_s: float
    age_s: float
    restore: Restore
    deeds: Sequence[Steps | Save | Restore]
    end: Literal["closed", "early", "killed"]
    waited_s: float


class _Checkpoint(NamedTuple):
    place: str
    step: int
    state: tuple[Done, ...]
    is_committed: bool


@dataclass
class World:
    """A run on which jobs are lived. The rest are the truths that a ledger must find."""

    now_s: float = 0.0
    records: list[EventRecord] = field(default_factory=list)
    in_history: set[str] = field(default_factory=set)
    checkpoints: list[_Checkpoint] = field(default_factory=list)
    state: tuple[Done, ...] = ()
    told: set[Done] = field(default_factory=set)
    sure: set[Done] = field(default_factory=set)
    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))
    #: The seconds of each step, and those of first steps, which begin with a part of the start.
    took_s: dict[Done, float] = field(default_factory=dict)
    first_steps: set[Done] = field(default_factory=set)
    paused_s: float = 0.0
    num_done: int = 0
    num_jobs: int = 0
    end: str = "closed"
    #: The times when the first job began and the last one ended, and the seconds that other processes have run since.
    begun_s: float | None = None
    ended_s: float = 0.0
    idle_s: float = 0.0

    def live(self, job: Job) -> None:
        """Live `job`. If it neither trains nor saves, it is a process that leaves the run as it is."""
        visitor = copy.deepcopy(self)
        _Life(visitor, job).live()
        if (visitor.num_done, len(visitor.checkpoints)) == (self.num_done, len(self.checkpoints)):
            self.idle_s += visitor.now_s - self.now_s
            self.records, self.now_s, self.num_jobs = visitor.records, visitor.now_s, visitor.num_jobs
            return
        if self.begun_s is None:
            self.begun_s = self.now_s + job.gap_s
        _Life(self, job).live()
        self.end, self.ended_s, self.idle_s = job.end, self.now_s, 0.0

    def steps(self) -> dict[Part, int]:
        """The numbers of steps by their fate, of those that events tell of."""
        kept = self.told & set(self.state)
        sure = kept & self.sure
        return {
            Part.GOODPUT: len(sure),
            Part.PROVISIONAL: len(kept - sure),
            Part.WASTED: len(self.told - kept),
        }

    def kept_s(self) -> tuple[float, float]:
        """The seconds of the steps that are no waste: without first steps, and with them."""
        kept = self.told & set(self.state)
        return sum(self.took_s[each] for each in kept - self.first_steps), sum(self.took_s[each] for each in kept)


class _Life:
    """One job."""

    def __init__(self, world: World, job: Job) -> None:
        self.world, self.job = world, job
        world.num_jobs += 1
        self.number = world.num_jobs
        self.since: list[Done] = []
        self.since_s = 0.0
        self.num_saves = 0
        self.is_first_step = True

    def live(self) -> None:
        world, job = self.world, self.job
        gap_s = world.idle_s + job.gap_s
        if world.ended_s:
            if world.end == "closed":
                world.paused_s += gap_s
            else:
                world.seconds[Part.RECOVERY] += gap_s
        world.now_s += job.gap_s + job.age_s
        self.tell("CheckpointerOpened", seconds={"age": job.age_s})
        world.seconds[Part.START] += job.age_s
        self.restore(job.restore)
        for deed in job.deeds:
            match deed:
                case Steps():
                    self.step(deed)
                case Save():
                    self.save(deed)
                case Restore():
                    self.restore(deed)
        if job.end != "killed":
            self.tell_steps()
            world.now_s += job.waited_s
            world.seconds[Part.SAVE] += job.waited_s
            self.tell(
                "CheckpointerClosed", seconds={"waited": job.waited_s}, numbers={"early": int(job.end == "early")}
            )
        else:  # its work since its last event is unknown, and counts as time until the next job starts
            world.now_s -= self.since_s

    def step(self, deed: Steps) -> None:
        world = self.world
        for _ in range(deed.number):
            world.num_done += 1
            done = (world.state[-1][0] + 1 if world.state else 0), world.num_done
            world.state = (*world.state, done)
            world.now_s += deed.step_s
            world.took_s[done] = deed.step_s
            if self.is_first_step:
                self.tell("FirstStepEnded", step=done[0])
                world.told.add(done)
                world.first_steps.add(done)
                self.is_first_step = False
            else:
                self.since.append(done)
                self.since_s += deed.step_s

    def tell_steps(self) -> None:
        if self.since:
            number = len(self.since)
            usual_s = self.since_s / number
            seconds = {"quiet": usual_s, "saving": 0.0, "quiet_total": self.since_s, "saving_total": 0.0}
            self.tell("StepsTimed", step=self.since[-1][0], seconds=seconds, numbers={"quiet": number, "saving": 0})
            self.world.told.update(self.since)
        self.since, self.since_s = [], 0.0

    def save(self, deed: Save) -> None:
        world = self.world
        if not world.state:
            return
        self.tell_steps()
        self.num_saves += 1
        step, place = world.state[-1][0], f"{self.number}.{self.num_saves}"
        for rank in (0, 1):
            self.tell("SaveBegun", step=step, rank=rank)
            self.tell("SavePlaced", step=step, place=place, rank=rank)
        world.now_s += deed.blocked_s
        world.seconds[Part.SAVE] += deed.blocked_s
        self.tell("SaveReturned", step=step, seconds={"blocked": deed.blocked_s})
        if deed.known in ("rank 0", "rank 1"):
            self.tell("SaveCommitted", step=step, rank=int(deed.known[-1]))
        elif deed.known == "history":
            world.in_history.add(place)
        is_committed = deed.known != "nobody"
        world.checkpoints.append(_Checkpoint(place, step, world.state, is_committed))
        if is_committed:
            world.sure.update(world.state)

    def restore(self, deed: Restore) -> None:
        world = self.world
        self.tell_steps()
        there = [each for each in world.checkpoints if each.is_committed or deed.tier == "node memory"]
        world.now_s += deed.took_s
        world.seconds[Part.RESTORE] += deed.took_s
        if there:
            found = there[max(len(there) - 1 - deed.back, 0)]
            world.state = found.state
            tier = "storage" if found.is_committed else "node memory"
            self.tell("StateRestored", step=found.step, place=found.place, tier=tier, seconds={"read": deed.took_s / 2})
        else:
            world.state = ()
            self.tell("StateRestored")
        self.tell("RestoreReturned", seconds={"took": deed.took_s})
        self.is_first_step = True

    def tell(
        self,
        event: str,
        *,
        rank: int = 0,
        step: int | None = None,
        place: str = "",
        tier: str = "",
        seconds: dict[str, float] | None = None,
        numbers: dict[str, int] | None = None,
    ) -> None:
        self.world.records.append(
            EventRecord(
                event=event,
                unix_s=BEGUN_S + self.world.now_s,
                clock_s=1000.0 * (rank + 2 * self.number % 7) + self.world.now_s,
                run="/runs/gpt",
                rank=rank,
                world_size=2,
                host="node0",
                process=rank,  # as in a container, where each job has the same numbers
                step=step,
                place=place,
                tier=tier,
                seconds=seconds or {},
                numbers=numbers or {},
            )
        )
