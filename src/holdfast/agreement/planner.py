"""Rank 0's side of the agreement on a plan: reuse the last plan or make one, compare copies, have the plan placed.

It knows layouts, values and copies, and nothing of runs: a `Placing` acts on the finished plan.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from holdfast import signing
from holdfast.agreement.local import NUM_TURNS, RankState
from holdfast.agreement.plan_messages import Compare, Described, Details, Digests, Questions
from holdfast.agreement.undeclared_copies import describe, diverged, merge_values
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.errors import StateError
from holdfast.format import values as value_codec
from holdfast.format.patterns import check_matched
from holdfast.format.values import Node
from holdfast.plan.save import ManifestTemplate, RankMessage, RankValues, SavePlan, plan_save

_log = logging.getLogger(__name__)

#: The message that tells all ranks about a placed plan.
P = TypeVar("P")
P_co = TypeVar("P_co", covariant=True)

Layouts = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True)
class PlanMemory:
    """The last plan of a group of ranks: the layouts that it was made for, the room that it reserves for values, the
    number of saves by it, and the names of the tensors whose copies differed at the last save."""

    plan_id: str
    layouts: Layouts
    plan: SavePlan
    draft: ManifestTemplate
    value_paths: tuple[tuple[bytes, bytes], ...]
    values: tuple[RankValues, ...]
    num_saves: int = 0
    diverged: tuple[str, ...] = ()

    @property
    def is_signed_as_now(self) -> bool:
        """Whether the checkpoints of the plan are signed exactly if this process has keys now."""
        return (signing.SIGNED in self.draft.table.reader_features) == (signing.SIGNED in signing.features())

    def has_room(self, messages: Sequence[Described], ranks: Sequence[int]) -> bool:
        """Whether all ranks' values have the paths that the plan was made for, and fit into the room reserved for
        them."""
        if tuple((message.value_paths, message.own_paths) for message in messages) != self.value_paths:
            return False
        room = {block.rank: block.capacity for block in self.values}
        needs = [message.own_nbytes for message in messages]
        needs[0] += messages[0].values_nbytes
        return all(need <= room.get(rank, 0) for rank, need in zip(ranks, needs, strict=True))


class AgreedPlan(NamedTuple):
    """A plan that holds for all ranks. `diverged` are the names of the tensors whose copies differ, `values` the merged
    shared values of all ranks. `is_known` says whether every rank has taken part in this plan before."""

    memory: PlanMemory
    diverged: tuple[str, ...]
    values: Mapping[str, Node]
    is_known: bool


class Placing(Protocol[P_co]):
    """Rank 0's action on a finished plan, such as giving the checkpoint its place."""

    def place(self, agreed: AgreedPlan) -> P_co:
        """Act on the plan, and return the message for all ranks. If it raises, all ranks raise the same error."""


class Planner(Generic[P]):
    """Rank 0's side of one agreement. Other ranks have one too, but nothing calls its methods there.

    `what` names the operation in a warning. Copies that differ are an error with `strict`; else they are an error only
    if they have not been found equal at an earlier plan, which `memory` keeps, and no load has made them equal: `equal`
    gives the names for which one has.
    """

    def __init__(
        self,
        placing: Placing[P],
        ranks: Sequence[int],
        memory: PlanMemory | None,
        *,
        what: str,
        strict: bool,
        equal: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._placing = placing
        self._ranks = ranks
        self._what = what
        self._strict = strict
        self._equal = equal
        self._messages: list[Described] = []
        #: For each distinct table of values, the numbers of the ranks that have it.
        self._by_values: list[list[int]] = []
        self._compare = Compare(())
        #: The plan to place once the ranks' copies have been compared.
        self._next: PlanMemory | None = None
        #: The last plan; the caller keeps it for the next agreement.
        self.memory = memory
        #: The merged shared values of all ranks, on rank 0.
        self.values: Mapping[str, Node] = {}

    def ask(self, messages: list[Described], mine: RankState) -> Questions | Compare | P:
        """Answer all ranks' descriptions: with `Questions` where a plan has to be made, else as `_go_on` does."""
        self._messages, self.values = messages, mine.flat.nodes
        check_matched("select", [message.unmatched for message in messages], where="the state")
        by_layout: dict[bytes, int] = {}
        by_values: dict[bytes, list[int]] = {}
        for number, message in enumerate(messages):
            by_layout.setdefault(message.layout, number)
            by_values.setdefault(message.values, []).append(number)
        self._by_values = list(by_values.values())
        memory = self.memory
        planned = memory is not None and memory.layouts == self._layouts()
        questions = Questions(
            bodies=() if planned else tuple(by_layout.values()),
            values=tuple(numbers[0] for numbers in self._by_values) if len(by_values) > 1 else (),
        )
        asks = questions.bodies or questions.values
        if memory is None or asks or not (memory.is_signed_as_now and memory.has_room(messages, self._ranks)):
            return questions
        return self._go_on(memory)

    def plan(self, questions: Questions, answers: list[Details]) -> Compare | P:
        """Make the plan from all ranks' answers (or keep the last one where no layout changed), and go on with it."""
        if questions.values:
            ranks = [[self._ranks[number] for number in numbers] for numbers in self._by_values]
            tables = [value_codec.decode(answers[number].values) for number in questions.values]
            self.values = merge_values(list(zip(ranks, tables, strict=True)))
        memory = self.memory
        if memory is None or questions.bodies:
            bodies = {self._messages[number].layout: answers[number].body for number in questions.bodies}
            messages = [
                RankMessage(message.layout, answer.columns)
                for message, answer in zip(self._messages, answers, strict=True)
            ]
            plan = plan_save(messages, bodies, ranks=self._ranks)
        else:
            plan = memory.plan
        values = self._reserved(answers)
        if not (memory and memory.plan is plan and memory.is_signed_as_now and _covers(memory.values, values)):
            paths = tuple((message.value_paths, message.own_paths) for message in self._messages)
            draft = ManifestTemplate.of(plan, values, signing.features())
            memory = PlanMemory(secrets.token_hex(8), self._layouts(), plan, draft, paths, values)
        return self._go_on(memory)

    def compare(self, answers: list[Digests]) -> P:
        """Compare the ranks' copies, and have the plan placed.

        Raises:
            StateError: copies differ that must be equal, code ``state.diverged``.
        """
        assert self._next is not None
        found = diverged(self._compare.names, dict(zip(self._ranks, answers, strict=True)))
        names = tuple(one.name for one in found)
        if found:
            # Copies that were equal before, in the last plan or after a load, have drifted since: warn. Copies that
            # were never compared may differ on purpose, so that saving one holder's would lose the others': raise.
            before = self._compared() | self._equal()
            new = found if self._strict else [one for one in found if one.name not in before]
            text = describe(new or found)
            action = (
                "Make the copies equal, shard the tensor as a DTensor, or save it as holdfast.PerRank(tensor). For a "
                "module in DistributedDataParallel, save the wrapper, not its .module: the buffers of rank 0 count."
            )
            if new:
                raise StateError(text, code="state.diverged", action=action, tensor=new[0].name)
            if self.memory is not None and names != self.memory.diverged:
                _log.warning("%s: %s One holder's copy is saved. %s", self._what, text, action)
        return self._place(self._next, names)

    def _compared(self) -> set[str]:
        """The undeclared tensors of the last plan: all their copies were equal when it was made."""
        return set() if self.memory is None else set(self.memory.plan.undeclared(np.arange(max(self._ranks) + 1)))

    def _go_on(self, memory: PlanMemory) -> Compare | P:
        """Use the plan in `memory`: ask for the digests that must be compared first, or have it placed at once."""
        # Tensors that diverged mark each save until their copies are equal again.
        known = () if self.memory is None else self.memory.diverged
        self._compare = Compare(tuple(sorted({*self._suspects(memory), *known})))
        if not self._compare.names:
            return self._place(memory, ())
        self._next = memory
        return self._compare

    def _place(self, memory: PlanMemory, diverged: tuple[str, ...]) -> P:
        is_known = all(message.plan_id == memory.plan_id for message in self._messages)
        placed = self._placing.place(AgreedPlan(memory, diverged, self.values, is_known))
        self.memory = replace(memory, num_saves=memory.num_saves + 1, diverged=diverged)
        return placed

    def _suspects(self, memory: PlanMemory) -> tuple[str, ...]:
        """The tensors whose copies have to be compared one by one.

        Ranks that share a layout without pieces have sent one digest of all their undeclared copies, or of one share of
        them, so their copies are compared already. The tensors that they hold in common with other ranks are compared
        one by one when a plan is made, and at every `NUM_TURNS`-th save by it. All undeclared tensors are compared one
        by one when a plan is made and the digest of a rank covers one share only, and when those digests differ, to
        find the tensors that do.
        """
        alike = np.zeros(max(self._ranks) + 1, np.int64)
        first: dict[bytes, int] = {}
        differs = False
        for number, (rank, message) in enumerate(zip(self._ranks, self._messages, strict=True)):
            peer = first.setdefault(message.layout, number)
            alike[rank] = number if message.columns else peer
            differs |= message.compared != self._messages[peer].compared
        fresh = self.memory is None or self.memory.plan is not memory.plan
        if differs or (fresh and any(message.turn is not None for message in self._messages)):
            return memory.plan.undeclared(np.arange(len(alike)))
        return memory.plan.undeclared(alike) if fresh or memory.num_saves % NUM_TURNS == 0 else ()

    def _layouts(self) -> Layouts:
        return tuple((message.layout, message.columns) for message in self._messages)

    def _reserved(self, answers: Sequence[Details]) -> tuple[RankValues, ...]:
        """The values that each rank's file must have room for."""
        blocks = []
        for number, (rank, answer) in enumerate(zip(self._ranks, answers, strict=True)):
            paths, nbytes = answer.own_paths, self._messages[number].own_nbytes
            if number == 0:
                paths = (*self.values, *paths)
                nbytes += len(pack_values(dict(self.values)))
            if paths:
                blocks.append(RankValues(rank, nbytes, tuple(sorted(paths))))
        return tuple(blocks)


def _covers(reserved: Sequence[RankValues], needed: Sequence[RankValues]) -> bool:
    """Whether the `needed` values have the same ranks and paths as the `reserved` ones, and fit into their room."""
    return len(reserved) == len(needed) and all(
        (old.rank, old.paths) == (new.rank, new.paths) and new.nbytes <= old.capacity
        for old, new in zip(reserved, needed, strict=True)
    )
