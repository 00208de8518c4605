"""``python -m bench agreement``: the messages of saves into memory, from 64 to 8,960 simulated ranks.

One process is rank 0, with its real channels and its real planner. A few others play all other ranks, one after the
other: the channels of these are real too, and share one connection to the store, which is a real TCPStore in a process
of its own. All of them share the cores of this machine, on which every rank of a real job has a core of its own.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bench.benchmark import Bar, Benchmark, Options
from bench.costs import cpu_s, give_back, scratch
from bench.layouts import fsdp_layout
from bench.markdown import about, ours, table
from bench.runner import measured, messages
from bench.schema import OURS, WARM_UP, Contender, Part, Result, Sample
from holdfast.agreement.local import NUM_TURNS, RankState
from holdfast.agreement.plan_messages import Compare, Described, Details, Questions
from holdfast.agreement.planner import AgreedPlan, PlanMemory, Planner
from holdfast.checkpointer.snapshot_messages import ANSWERS, Agreed, MemoryStatus, SnapshotRoom
from holdfast.control.attempt import Attempt
from holdfast.control.channel import GROUP_SIZE, Channel
from holdfast.control.deadline import Deadline
from holdfast.control.envelopes import decoded, encoded
from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.node_board import NodeBoard
from holdfast.control.requests import Requests
from holdfast.control.torch_store import GroupStore, Member, StoreConnection, TorchMeeting
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.plan.body import RankLayout
from holdfast.plan.save import CheckpointIdentity
from holdfast.state.flatten import flatten

T = TypeVar("T")

WORLDS = (64, 512, 2048, 8960)
ROUNDS, NUM_PLAYERS, NODE_SIZE = 7, 2, 8
SECONDS_BAR, MEMORY_BAR_MIB = 1.0, 256.0
MEMBERS, RUN_ID, TIMEOUT_S = "holdfast", "f" * 32, 300.0
#: The exchanges of a save into memory, in their order; the last two are those of a first save.
MEMORY, DESCRIBE, PLAN, ROOM = "memory", "describe", "plan", "room"
#: The values of a small state of a training loop, which every rank has alike.
VALUES = {"progress": {"step": 700, "epoch": 1, "lr": 3e-4}, "scheduler": {"last_epoch": 700, "base_lrs": [3e-4]}}


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: KeyValueStore, requests: Counter[str]) -> None:
        self._store = store
        self._requests = requests

    def __getattr__(self, name: str) -> Any:
        self._requests[name] += 1
        return getattr(self._store, name)


class CountedMeeting(TorchMeeting):
    """A meeting whose requests are counted."""

    def __init__(
        self,
        member: Member,
        requests: Counter[str],
        number: int | None = None,
        *,
        deadline: Deadline,
        background: bool = False,
    ) -> None:
        super().__init__(member, number, deadline=deadline, background=background)
        self._requests = requests

    @property
    def store(self) -> KeyValueStore:
        return cast("KeyValueStore", Counted(super().store, self._requests))

    def in_background(self) -> CountedMeeting:
        return CountedMeeting(self._member, self._requests, self._number, deadline=self._deadline, background=True)


class NoThread(Requests):
    """Requests that the caller makes itself: no rank that is played can end."""

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None] | None = None) -> T:
        return call()


class PlayedConnection(StoreConnection):
    """The one connection of all ranks that a process plays."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store, TIMEOUT_S)
        self.requests = NoThread()


class MetRank(GroupStore):
    """A rank that has met all others: the bench does not measure how the ranks of a job find each other."""

    def attempt(self, members: str, rank: int) -> Attempt:
        return self._attempts.setdefault(members, Attempt("bench"))


class PlayedRank(MetRank):
    """One of many ranks that a process plays, on a node with its own board."""

    def __init__(self, store: dist.Store, connection: PlayedConnection, board: NodeBoard) -> None:
        super().__init__(store)
        self._played = connection
        self._node_board = board

    def connection(self, timeout_s: float) -> StoreConnection:
        return self._played

    def in_background(self, user: object, timeout_s: float) -> StoreConnection:
        return self._played

    def board(self, members: str) -> NodeBoard:
        return self._node_board


class Words:
    """The messages of the ranks of one job in a save, by a layout of FSDP."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.layout = RankLayout.of(fsdp_layout(world), {})
        self.mine = RankState.of(flatten(VALUES), number=0, rank=0)
        self.plan_id = ""

    def memory(self, rank: int, step: int) -> MemoryStatus:
        before = None if step == 0 else Place(1, step)
        oldest = None if step < 2 else Place(1, step - 1)
        is_later = step > 0
        return MemoryStatus(before, True, oldest, (), is_later, reached=before, run_id=RUN_ID)

    def describe(self, step: int) -> Callable[[int], Described]:
        """Each rank's description of its state. Only the values of the rank alone differ from rank to rank."""
        mine = self.mine.describe(step % NUM_TURNS if self.plan_id else None, plan_id=self.plan_id, alone=False)
        like = msgspec.structs.replace(mine, layout=self.layout.digest, columns=b"", own_nbytes=5_000)
        return lambda rank: msgspec.structs.replace(like, own_paths=rank.to_bytes(16))

    def details(self, rank: int, questions: Questions) -> Details:
        body = self.layout.body if rank in questions.bodies else b""
        values = self.mine.values if rank in questions.values else b""
        return Details(body, b"", (f"random@{rank}",), values)

    def identity(self, step: int) -> CheckpointIdentity:
        return CheckpointIdentity("c" * 16, RUN_ID, Place(1, step + 1), step, time.time(), {})


class Placed:
    """Rank 0's `Placing`, which asks no storage."""

    def __init__(self, identity: CheckpointIdentity) -> None:
        self._identity = identity

    def place(self, agreed: AgreedPlan) -> Agreed:
        identity, memory = self._identity, agreed.memory
        return Agreed(
            folder=records.folder_name(identity.step, identity.checkpoint_id),
            checkpoint_id=identity.checkpoint_id,
            run_id=identity.run_id,
            place=identity.place,
            incarnation="1" * 16,
            step=identity.step,
            created=identity.created,
            metrics={"loss": 1.25},
            diverged=agreed.diverged,
            plan_id=memory.plan_id,
            manifest=b"" if agreed.is_known else memory.draft.encode(identity, agreed.diverged),
            references=(),
        )


class Coordinator:
    """Rank 0 of the job."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.memory: PlanMemory | None = None
        self.requests = Counter[str]()
        self._job = MetRank(_get_default_store())

    def save(self, step: int) -> list[float]:
        """Agree on a save, and return when each exchange ended."""
        words, deadline, requests = self.words, Deadline(TIMEOUT_S), self.requests
        requests.clear()
        meeting = CountedMeeting(Member(self._job, MEMBERS, 0, words.world), requests, deadline=deadline)
        channel, ends = self._channel(meeting, step), []
        standings: Callable[[list[MemoryStatus]], SnapshotRoom] = partial(SnapshotRoom.of, run_id=RUN_ID)
        status = words.memory(0, step)
        channel.exchange(MEMORY, status, standings, deadline, takes=MemoryStatus, gives=SnapshotRoom)
        ends.append(time.monotonic())
        background = self._channel(meeting.in_background(), step)
        planner = Planner(Placed(words.identity(step)), range(words.world), self.memory, what="", strict=False)

        def ask(descriptions: list[Described]) -> Questions | Compare | Agreed:
            return planner.ask(descriptions, words.mine)

        answer = background.exchange(DESCRIBE, words.describe(step)(0), ask, deadline, takes=Described, gives=ANSWERS)
        ends.append(time.monotonic())
        if isinstance(answer, Questions):
            asked = answer
            answer = background.exchange(
                PLAN,
                words.details(0, asked),
                lambda answers: planner.plan(asked, answers),
                deadline,
                takes=Details,
                gives=ANSWERS,
            )
            background.confirm(ROOM, b"", deadline)
            ends.append(time.monotonic())
        assert isinstance(answer, Agreed)
        self.memory, words.plan_id = planner.memory, answer.plan_id
        background.leave()
        return ends

    def _channel(self, meeting: TorchMeeting, step: int) -> Channel:
        return Channel(meeting, rank=0, world_size=self.words.world, label=f"save of step {step}", step=step)


class Player:
    """A process that plays many ranks."""

    def __init__(self, words: Words, ranks: Sequence[int], memory: Path) -> None:
        self.words = words
        store, boards = _get_default_store(), dict[int, NodeBoard]()
        connection = PlayedConnection(store)
        for node in {rank // NODE_SIZE for rank in ranks}:
            folder = memory / str(node)
            folder.mkdir(exist_ok=True)
            boards[node] = NodeBoard(folder)
        # The first rank of a group waits for the others of its group, so it comes after them.
        ordered = sorted(ranks, key=lambda rank: rank % GROUP_SIZE == 0)
        self._ranks = {rank: PlayedRank(store, connection, boards[rank // NODE_SIZE]) for rank in ordered}

    def save(self, step: int) -> list[float]:
        """Let all ranks agree on a save, and return when each exchange ended."""
        words, deadline, ends = self.words, Deadline(TIMEOUT_S), list[float]()
        meetings = {
            rank: TorchMeeting(Member(job, MEMBERS, rank, words.world), deadline=deadline)
            for rank, job in self._ranks.items()
        }
        channels = {
            rank: Channel(meeting, rank=rank, world_size=words.world, label=f"save of step {step}", step=step)
            for rank, meeting in meetings.items()
        }
        self._exchange(channels, MEMORY, lambda rank: words.memory(rank, step), SnapshotRoom, deadline)
        ends.append(time.monotonic())
        background = {rank: channel.in_background() for rank, channel in channels.items()}
        answer = self._exchange(background, DESCRIBE, words.describe(step), ANSWERS, deadline)
        ends.append(time.monotonic())
        if isinstance(answer, Questions):
            asked = answer
            answer = self._exchange(background, PLAN, lambda rank: words.details(rank, asked), ANSWERS, deadline)
            self._exchange(background, ROOM, lambda _: b"", bytes, deadline)
            ends.append(time.monotonic())
        words.plan_id = answer.plan_id
        return ends

    def _exchange(
        self,
        channels: Mapping[int, Channel],
        phase: str,
        says: Callable[[int], object],
        gives: Any,
        deadline: Deadline,
    ) -> Any:
        """Do the two halves of `Channel.exchange` for each rank. Returns the answer, which is the same for all."""
        for rank, channel in channels.items():
            channel.gather(phase, encoded(says(rank)), deadline)
        answer = None
        for channel in channels.values():
            answer = decoded(channel.broadcast(phase, None, deadline), gives)
        return answer


def take_part(world: int, rounds: int, memory: Path, queue: Any) -> None:
    """Rank 0 of this process group is rank 0 of the job; the others play an even part of its ranks each."""
    words, me = Words(world), dist.get_rank()
    cuts = [1 + (world - 1) * number // NUM_PLAYERS for number in range(NUM_PLAYERS + 1)]
    part = Player(words, range(cuts[me - 1], cuts[me]), memory) if me else Coordinator(words)
    server = [psutil.Process(os.getppid())]
    give_back()
    if me:
        gc.disable()  # a process of a real job has one rank's objects
    before, used_s, server_s = _held_nbytes(), time.process_time(), cpu_s(server)
    for number in range(WARM_UP, rounds + 1):
        _forget_peak()
        dist.barrier()
        begun_s = time.monotonic()
        ends = part.save(number)
        every: list[Any] = [None] * dist.get_world_size()
        used_s, server_s = time.process_time() - used_s, cpu_s(server) - server_s
        dist.all_gather_object(every, (begun_s, ends, used_s))
        if isinstance(part, Coordinator):
            found = _figures(every)
            found["server_cpu_s"] = server_s
            found["requests"] = float(part.requests.total())
            found["peak_extra_nbytes"] = _peak_nbytes() - before
            queue.put(Sample(OURS, number, {key: (value,) for key, value in found.items()}))
        used_s, server_s = time.process_time(), cpu_s(server)


def _figures(every: Sequence[tuple[float, Sequence[float], float]]) -> dict[str, float]:
    """Seconds of a save and of each of its exchanges, from when the first process began to when the last ended."""
    begun_s = min(begun_s for begun_s, _, _ in every)
    ends = [max(each) for each in zip(*(ends for _, ends, _ in every), strict=True)]
    found = {"seconds": ends[-1] - begun_s, "cpu_s": every[0][2], "players_cpu_s": sum(each[2] for each in every[1:])}
    for name, start_s, end_s in zip((MEMORY, DESCRIBE, PLAN), (begun_s, *ends), ends, strict=False):
        found[f"{name}_s"] = end_s - start_s
    return found


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _held_nbytes() -> int:
    return _of_status("VmRSS")


def _peak_nbytes() -> int:
    return _of_status("VmHWM")


def _of_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(kib)


def measure_agreement(world: int, options: Options) -> Part:
    num_ranks = options.number(world, least=NUM_PLAYERS + 1)
    scenario = options.scenario(str(world), title=f"{num_ranks:,}", world=num_ranks, rounds=ROUNDS)
    with scratch(options.memory) as memory:
        samples = list(messages(take_part, num_ranks, scenario.rounds, memory, world=NUM_PLAYERS + 1))
    return measured(scenario, samples, options, contenders=(Contender(OURS),))


def tables(result: Result) -> Iterator[str]:
    yield table(
        "ranks",
        {part.scenario.title: part for part in result.parts},
        ("a save, s", ours("seconds")),
        ("`memory`, s", ours("memory_s")),
        ("`describe`, s", ours("describe_s")),
        ("a first save, s", lambda part: f"{_first(part, 'seconds'):.2f}"),
        ("CPU of the ranks, s", ours("players_cpu_s")),
        ("CPU of rank 0, s", ours("cpu_s")),
        ("CPU of the store, s", ours("server_cpu_s")),
        ("requests of rank 0", ours("requests", digits=0)),
        ("extra memory of rank 0, MiB", lambda part: f"{_mib(part):.0f}"),
    )
    yield about(result.parts[-1])


def bars(part: Part) -> Iterator[Bar]:
    if part.scenario.world == WORLDS[-1]:
        yield Bar("agreement of a save", part.median(OURS), SECONDS_BAR, " s")
        yield Bar("memory of the coordinator", _mib(part), MEMORY_BAR_MIB, " MiB")


def _first(part: Part, key: str) -> float:
    """A figure of the first save, which is the warm-up: it plans, and sends the manifest to all ranks."""
    return max(value for sample in part.taken(OURS) if sample.round == WARM_UP for value in sample.values[key])


def _mib(part: Part) -> float:
    return part.peak_nbytes(OURS) / 2**20


PARTS = {str(world): partial(measure_agreement, world) for world in WORLDS}
AGREEMENT = Benchmark("agreement", PARTS, tables, bars)
