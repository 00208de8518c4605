"""Random histories of jobs on nodes, and the model that says which state must be recoverable. Pure.

A history is drawn from a seed alone. The model judges it in two ways, which know nothing of each other:

- `Reports` keeps what ranks were told: a save is staged, protected, durable. A state that this promises must be
  recoverable, whatever lies where.
- `newest_whole` looks at what lies in the memory of nodes. A checkpoint that is whole there must be found.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from holdfast import Copies, Parity
from holdfast.format.records import Place

Policy: TypeAlias = Copies | Parity
Awaited: TypeAlias = Literal["nothing", "staged", "protected", "durable"]
Disturbance: TypeAlias = Literal["kill the keeper", "stop the node", "cut the node off", "slow the link"]
End: TypeAlias = Literal["kill", "kill one rank", "close", "lose nodes"]
Between: TypeAlias = Literal["lose a node", "reboot a node", "kill the keepers", "replace a node"]
Side: TypeAlias = Literal["all", "near", "both"]

POLICIES: Final[Sequence[Policy]] = (
    Copies(1),
    Copies(1),
    Copies(2),
    Parity(1),
    Parity(1, group=3),
    Parity(2),
    Parity(2, group=4),
)
MOST_NODES: Final = 5


# --- histories


@dataclass(frozen=True)
class PlannedSave:
    """A save, what the job then waits for, and what befalls node number `node` (modulo the nodes) during the save. (A
    link stays slow as long as the job lives, so protection lags behind saves.)"""

    memory_only: bool
    awaits: Awaited
    disturbance: Disturbance | None
    node: int
    note_nbytes: int


@dataclass(frozen=True)
class PlannedJob:
    """A job on `num_nodes` nodes, beginning with number `first` of those that are up, with `num_more` ranks more than
    nodes. Some time after its last save it meets its `end`. Before it, `before` happens, and a stopped node takes no
    part. With the side "near", the network is parted while it runs, and with "both", another job runs on the other
    side at the same time."""

    num_nodes: int
    first: int
    num_more: int
    saves: tuple[PlannedSave, ...]
    end: End
    num_lost: int
    delay_s: float
    before: tuple[tuple[Between, int], ...]
    side: Side
    stops: int | None


@dataclass(frozen=True)
class Sizes:
    """Rows of the tensors of a state."""

    weight: int
    table: int


@dataclass(frozen=True)
class History:
    """All that happens to a run."""

    seed: int
    policy: Policy
    sizes: Sizes
    num_nodes: int
    jobs: tuple[PlannedJob, ...]


def draw_history(seed: int) -> History:
    """The history of a seed."""
    dice = random.Random(seed)
    policy = dice.choice(POLICIES)
    least = least_nodes(policy)
    num_nodes = min(MOST_NODES, max(least, dice.choice((2, 3, 3, 4, 4, 5))))
    weight = dice.choice((7, 1000, 20_000, 60_000, 60_000, 400_000))
    sizes = Sizes(weight + dice.randrange(11), dice.randrange(1, 50_000))
    jobs = tuple(_draw_job(dice, num_nodes, least, is_first=number == 0) for number in range(dice.choice((2, 3, 3, 4))))
    return History(seed, policy, sizes, num_nodes, jobs)


def least_nodes(policy: Policy) -> int:
    """The least number of nodes with which a policy protects anything."""
    if isinstance(policy, Copies):
        return policy.n + 1
    return policy.losses + 1 if policy.group is None else policy.group


def _draw_job(dice: random.Random, most: int, least: int, *, is_first: bool) -> PlannedJob:
    num_nodes = most if dice.random() < 0.5 else dice.randint(min(2, most), most)
    if num_nodes < least and dice.random() < 0.7:
        num_nodes = least
    before: list[tuple[Between, int]] = []
    if not is_first:
        kinds: Sequence[Between] = ("lose a node", "lose a node", "reboot a node", "kill the keepers", "replace a node")
        before = [(dice.choice(kinds), dice.randrange(8)) for _ in range(dice.choice((0, 0, 1, 1, 2)))]
    return PlannedJob(
        num_nodes=num_nodes,
        first=dice.randrange(8),
        num_more=dice.choice((0, 0, 0, 1, 2)) if num_nodes < MOST_NODES else 0,
        saves=tuple(_draw_save(dice) for _ in range(dice.choice((0, 1, 2, 2, 3, 3, 4)))),
        end=dice.choice(("kill", "kill", "kill one rank", "close", "lose nodes", "lose nodes", "lose nodes")),
        num_lost=dice.choice((1, 1, 1, 2)),
        delay_s=dice.choice((0.0, 0.0, 0.01, 0.05, 0.2)),
        before=tuple(before),
        side="all" if is_first else dice.choice(("all", "all", "all", "all", "all", "near", "both")),
        stops=None if is_first or dice.random() < 0.9 else dice.randrange(8),
    )


def _draw_save(dice: random.Random) -> PlannedSave:
    kinds: Sequence[Disturbance] = ("kill the keeper", "stop the node", "cut the node off", "slow the link")
    return PlannedSave(
        memory_only=dice.random() < 0.75,
        awaits=dice.choice(("nothing", "staged", "protected", "protected", "protected", "durable")),
        disturbance=dice.choice(kinds) if dice.random() < 0.16 else None,
        node=dice.randrange(8),
        note_nbytes=dice.choice((0, 0, 100, 5_000, 150_000)),
    )


# --- the promises


@dataclass(frozen=True)
class Promise:
    """The nodes with the files of a protected checkpoint: for each owner, the nodes with its copies; or the groups that
    share parity, each of which may lose `losses` nodes."""

    copies: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    losses: int = 0

    def holds(self, nodes: Collection[int]) -> bool:
        """Whether the checkpoint is recoverable from these nodes alone."""
        for owner, holders in self.copies.items():
            if not {owner, *holders} & set(nodes):
                return False
        return all(len(set(group) - set(nodes)) <= self.losses for group in self.groups)


@dataclass
class SavedState:
    """A state that a job saved as a step, and what its ranks have heard of that so far. `owners` are the nodes of the
    job."""

    job: int
    step: int
    owners: frozenset[int]
    place: Place | None = None
    is_staged: bool = False
    is_durable: bool = False
    promise: Promise | None = None


class Reports:
    """All that the ranks of all jobs of a run were told. Nodes are known by numbers that are never used again; a node
    that boots gets a new one."""

    def __init__(self) -> None:
        self.saved: dict[tuple[int, int], SavedState] = {}
        #: The last job that has begun to save: its epoch ends those of earlier jobs.
        self._last = -1
        #: Places that are in storage, without a report that says so.
        self._in_storage: set[Place] = set()

    def begin(self, state: SavedState) -> None:
        """A job calls `save`."""
        self.saved[state.job, state.step] = state
        self._last = state.job

    def go_on_from(self, place: Place) -> None:
        """A job that restored the checkpoint at `place` has made its first save, which waits for the commit of that."""
        self._in_storage.add(place)

    def disturb(self, job: int) -> None:
        """Something befell a node of a job. Then slots are filled again without regard to protection, so the promise
        for an earlier step holds only until a later step is saved."""
        for state in self.saved.values():
            if state.job == job:
                state.promise = None

    def forget_memory(self) -> None:
        """From now on only storage counts: two jobs have gone on from the same state, and one of them in vain."""
        for state in self.saved.values():
            state.promise, state.is_staged = None, False

    def must_find(self, nodes: Collection[int]) -> Place | None:
        """The newest place that a job on `nodes` alone certainly finds; None for nothing."""
        return max(self._certain(nodes), default=None)

    def _certain(self, nodes: Collection[int]) -> Iterator[Place]:
        yield from self._in_storage
        for state in self.saved.values():
            if state.place is None:
                continue
            is_protected = state.promise is not None and state.promise.holds(nodes)
            is_here = is_protected or (state.is_staged and state.owners <= set(nodes))
            if state.is_durable or (is_here and state.job == self._last):
                yield state.place


# --- the memory of nodes


@dataclass(frozen=True)
class ParityRow:
    """A row of parity on a node: for each node of its group, by identity, the files that it had. `losses` of these may
    be lost."""

    group: tuple[tuple[str, frozenset[int]], ...]
    losses: int
    row: int


@dataclass(frozen=True)
class Holding:
    """The parts of one checkpoint in the memory of a node: files in its own slots, copies, and rows of parity."""

    own: frozenset[int] = frozenset()
    copies: frozenset[int] = frozenset()
    rows: tuple[ParityRow, ...] = ()


@dataclass(frozen=True)
class InMemory:
    """A checkpoint of which nodes have a part, by identity. `num_files` are all its files."""

    place: Place
    step: int
    num_files: int
    nodes: Mapping[str, Holding]

    @property
    def is_whole(self) -> bool:
        """Whether the nodes have all of it, or can rebuild what they lack."""
        found = {file for node in self.nodes.values() for file in node.own | node.copies}
        missing = set(range(self.num_files)) - found
        for group, losses in {(row.group, row.losses) for node in self.nodes.values() for row in node.rows}:
            if len([each for each, files in group if not self._has_all(each, files, group, losses)]) <= losses:
                missing -= {file for _, files in group for file in files}
        return not missing

    def _has_all(
        self, identity: str, files: Collection[int], group: tuple[tuple[str, frozenset[int]], ...], losses: int
    ) -> bool:
        node = self.nodes.get(identity, Holding())
        return set(files) <= node.own and len({row.row for row in node.rows if row.group == group}) >= losses


def newest_whole(found: Collection[InMemory], *, epoch: int, head: Place | None) -> InMemory | None:
    """The newest checkpoint in memory that a restore must take rather than an older one: it is the head, or a later one
    of the newest epoch. None if there is none, so that storage counts."""
    on_line = [
        each
        for each in found
        if each.place == head or (each.place.epoch == epoch and (head is None or head < each.place))
    ]
    return max((each for each in on_line if each.is_whole), key=lambda each: each.place, default=None)
