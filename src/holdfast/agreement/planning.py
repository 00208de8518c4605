"""One rank's side of the agreement on a plan: describe the state, answer rank 0's questions, receive the placed plan.

A save, a save in the background and a transfer share this protocol. They differ in how they act on a plan (see
`holdfast.agreement.planner.Placing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from holdfast.agreement.assignment import T, WriteAssignment
from holdfast.agreement.local import NUM_TURNS, RankState
from holdfast.agreement.plan_messages import Compare, Described, Details, Digests, Questions
from holdfast.agreement.planner import PlanMemory, Planner
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.format.manifest import DecodedManifest
from holdfast.format.values import Node
from holdfast.phases import Stopwatch, attempt, done, told
from holdfast.state.collect import WalkCache
from holdfast.state.flatten import FlatState

P = TypeVar("P")


@dataclass
class PlanCache(Generic[T]):
    """A rank's memory of the last plan for a state: its own share in the plan, the caches of its walk through the
    state, and on rank 0 also the plan of all ranks."""

    memory: PlanMemory | None = None
    share: WriteAssignment[T] | None = None
    walk: Sequence[WalkCache] = ()

    def remember(self, share: WriteAssignment[T], memory: PlanMemory | None) -> None:
        """Keep this rank's share for the next agreement, and on rank 0 the plan too."""
        self.share = share
        if memory is not None:
            self.memory = memory


#: The cache of a rank whose checkpoints are stored.
StoredPlanCache: TypeAlias = PlanCache[DecodedManifest]


class Planning(Generic[P]):
    """One agreement on one rank, whose rank in the job is `rank`. Its result is a `P`, and `answers` is the union of
    the types that rank 0 may send: `Questions`, `Compare` and P.

    While a plan is known, each agreement compares one rotating share of the undeclared copies; with `compares_all`, it
    compares all of them.
    """

    def __init__(
        self,
        channel: Channel,
        deadline: Deadline,
        rank: int,
        planner: Planner[P],
        known: PlanCache[Any],
        watch: Stopwatch,
        *,
        answers: object,
        compares_all: bool = False,
    ) -> None:
        self._channel = channel
        self._deadline = deadline
        self._rank = rank
        self._planner = planner
        self._known = known
        self._watch = watch
        self._answers = answers
        self._compares_all = compares_all

    def agree(self, flat: Callable[[], FlatState]) -> tuple[P, RankState]:
        """Describe the state that `flat` returns, agree with all ranks, and return rank 0's message about the placed
        plan and this rank's description. Collective. Where one rank fails, `flat` included, all ranks raise."""
        with self._watch.phase("describe"):
            mine = attempt(lambda: RankState.of(flat(), number=self._channel.rank, rank=self._rank))
            answer: Questions | Compare | P = self._channel.exchange(
                "describe",
                told(mine, self._describe),
                lambda messages: self._planner.ask(messages, done(mine)),
                self._deadline,
                takes=Described,
                gives=self._answers,
            )
        with self._watch.phase("plan"):
            while isinstance(answer, Questions | Compare):
                answer = self._replied(answer, done(mine))
        return answer, done(mine)

    def values(self, mine: RankState) -> dict[str, Node]:
        """The values that this rank's data file holds."""
        values = dict(mine.flat.own_nodes)
        if self._channel.rank == 0:
            values.update(self._planner.values)
        return values

    def _describe(self, mine: RankState) -> Described:
        share = self._known.share
        self._known.walk = mine.flat.remembered
        turn = None if share is None or self._compares_all else share.turn % NUM_TURNS
        plan_id = "" if share is None else share.plan_id
        return mine.describe(turn, plan_id=plan_id, alone=self._channel.world_size == 1)

    def _replied(self, asked: Questions | Compare, mine: RankState) -> Questions | Compare | P:
        """Reply to a question of rank 0, and return its next message. All ranks get the same messages, so they take the
        same steps."""
        if isinstance(asked, Compare):
            digests = attempt(lambda: mine.compare(asked))
            return self._channel.exchange(
                "compare", digests, self._planner.compare, self._deadline, takes=Digests, gives=self._answers
            )
        return self._channel.exchange(
            "plan",
            attempt(lambda: mine.answer(asked)),
            lambda answers: self._planner.plan(asked, answers),
            self._deadline,
            takes=Details,
            gives=self._answers,
        )
