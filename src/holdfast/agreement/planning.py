"""The first half of a save, on one rank: describe the state, and agree with all ranks on a plan and a place for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from holdfast.agreement.assignment import Share
from holdfast.agreement.coordinator import Coordinator, PlanMemory
from holdfast.agreement.local import NUM_TURNS, Local
from holdfast.agreement.messages import Answer, Compare, Questions
from holdfast.control.channel import Channel, Deadline
from holdfast.decoding import decode_msgpack
from holdfast.format.values import Node
from holdfast.phases import Stopwatch, attempt
from holdfast.state.flatten import FlatState
from holdfast.state.gather import Remembered

T = TypeVar("T")


@dataclass
class Known:
    """What a rank remembers of the last save of a state: rank 0 what it knows of all ranks, each its share in the plan,
    and what its walk found."""

    memory: PlanMemory | None = None
    share: Share | None = None
    walk: Sequence[Remembered] = ()


class Planning(Generic[T]):
    """One save's planning on one rank, which is number `rank` of the job. The last answer is a `T`, one of `answers`
    beside questions."""

    def __init__(
        self,
        channel: Channel,
        deadline: Deadline,
        rank: int,
        coordinator: Coordinator,
        known: Known,
        watch: Stopwatch,
        *,
        answers: object = Answer,
    ) -> None:
        self._channel = channel
        self._deadline = deadline
        self._rank = rank
        self._known = known
        self._watch = watch
        self._answers = answers
        self.coordinator = coordinator

    def agree(self, flat: Callable[[], FlatState]) -> tuple[T, Local]:
        """What all ranks have agreed on, and what this one described: its `flat`; where that fails, all hear of it.
        Collective."""
        local: list[Local] = []
        with self._watch.phase("describe"):
            described = attempt(lambda: self.told(self._describe(flat, local)))
            answer = self._channel.exchange("describe", described, self.coordinator.ask, self._deadline)
        mine = local[0]
        with self._watch.phase("plan"):
            while isinstance(asked := self._decoded(answer), Questions | Compare):
                answer = self._replied(asked, mine)
        return asked, mine

    def told(self, described: bytes) -> bytes:
        """What this rank tells first: its `Described`, encoded."""
        return described

    def remember(self, share: Share) -> None:
        """Note this rank's share in what was agreed on, for the next save."""
        self._known.share = share
        if self.coordinator.memory is not None:
            self._known.memory = self.coordinator.memory

    def values(self, mine: Local) -> dict[str, Node]:
        """The values that this rank's data file holds."""
        values = dict(mine.flat.own_nodes)
        if self._channel.rank == 0:
            values.update(self.coordinator.values or mine.flat.nodes)
        return values

    def _decoded(self, answer: bytes) -> Questions | Compare | T:
        return cast("Questions | Compare | T", decode_msgpack(answer, self._answers))

    def _describe(self, flat: Callable[[], FlatState], local: list[Local]) -> bytes:
        share = self._known.share
        mine = Local.of(flat(), number=self._channel.rank, rank=self._rank)
        local.append(mine)
        self._known.walk = mine.flat.remembered
        turn = None if share is None else share.turn % NUM_TURNS
        return mine.describe(turn, alone=self._channel.world_size == 1)

    def _replied(self, asked: Questions | Compare, mine: Local) -> bytes:
        """The answer to what this rank replies to a question of rank 0. All ranks follow the same answers."""
        if isinstance(asked, Compare):
            digests = attempt(lambda: mine.compare(asked))
            return self._channel.exchange("compare", digests, self.coordinator.compare, self._deadline)
        details = attempt(lambda: mine.answer(asked))
        return self._channel.exchange(
            "plan", details, lambda payloads: self.coordinator.plan(asked, mine, payloads), self._deadline
        )
