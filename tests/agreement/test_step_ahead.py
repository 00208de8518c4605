"""Ranks agree on a step ahead: in any order of events, and whoever dies, all act after the same steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agreement.lead import Lead
from holdfast.agreement.step_ahead import Appointment, ProposedStep, StepAhead

NUM_STEPS = 30


class SharedDict:
    """Registers in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.counters: dict[str, int] = {}

    def claim(self, key: str, value: bytes) -> bytes:
        return self.values.setdefault(key, value)

    def read(self, key: str) -> bytes | None:
        return self.values.get(key)

    def count(self, key: str) -> int:
        self.counters[key] = self.counters.get(key, 0) + 1
        return self.counters[key]

    def forget(self, key: str) -> None:
        self.values.pop(key, None)
        self.counters.pop(key, None)


@dataclass
class Rank:
    """A rank whose threads run one event at a time."""

    ahead: StepAhead
    registers: SharedDict
    step: int = -1
    kept: Appointment | None = None
    acted: list[int] = field(default_factory=list)
    is_dead: bool = False

    def advance(self) -> None:
        """The thread that trains: go on by one step, unless it waits for a verdict."""
        if self.kept is not None:
            if self.kept.is_agreed is None:
                return
            if self.kept.is_agreed:
                self.acted.append(self.step)
            self.kept = None
        elif self.step < NUM_STEPS:
            self.step += 1
            self.kept = self.ahead.arrive(self.step)

    def look(self) -> None:
        """The background thread."""
        self.ahead.look(self.registers)

    def lose_patience(self) -> None:
        """The thread that trains has waited too long."""
        if self.kept is not None and self.kept.is_agreed is None:
            self.ahead.give_up(self.kept, self.registers)

    def propose(self, lead: int) -> None:
        if self.ahead.is_idle(until=self.step + lead):
            self.ahead.propose(ProposedStep(self.step + lead, f"step {self.step}"), self.registers)


def job(world_size: int) -> list[Rank]:
    registers = SharedDict()
    return [Rank(StepAhead(world_size=world_size, is_first_rank=not rank), registers) for rank in range(world_size)]


def finish(ranks: list[Rank]) -> None:
    """Let all living ranks come to the end of the loop."""
    for number in range(1000):
        for rank in ranks:
            if not rank.is_dead:
                rank.look()
                rank.advance()
                if number % 10 == 9:
                    rank.lose_patience()
    assert all(rank.step == NUM_STEPS and rank.kept is None for rank in ranks if not rank.is_dead)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, str, int]]]:
    world_size = draw(st.integers(2, 4))
    events = st.tuples(
        st.integers(0, world_size - 1),
        st.sampled_from(["advance"] * 4 + ["look"] * 4 + ["propose", "lose_patience", "die"]),
        st.integers(1, 5),
    )
    return world_size, draw(st.lists(events, max_size=200))


@given(histories())
def test_all_ranks_act_after_the_same_steps_in_any_order_of_events(
    history: tuple[int, list[tuple[int, str, int]]],
) -> None:
    world_size, events = history
    ranks = job(world_size)
    for number, event, lead in events:
        rank = ranks[number]
        if rank.is_dead:
            continue
        match event:
            case "propose":
                rank.propose(lead)
            case "die":
                rank.is_dead = sum(not each.is_dead for each in ranks) > 1
            case _:
                getattr(rank, event)()
    finish(ranks)
    alive = [rank.acted for rank in ranks if not rank.is_dead]
    assert all(acted == alive[0] for acted in alive)
    for dead in (rank for rank in ranks if rank.is_dead):
        reached = dead.step if dead.kept is None else dead.step - 1
        assert dead.acted == [step for step in alive[0] if step <= reached]


@given(st.integers(2, 4), st.lists(st.integers(0, 3), min_size=20, max_size=60), st.integers(2, 6))
def test_ranks_that_look_in_every_step_agree_on_the_first_proposal(
    world_size: int, order: list[int], lead: int
) -> None:
    ranks = job(world_size)
    for rank in ranks:
        rank.advance()
    ranks[order[0] % world_size].propose(lead)
    for _ in range(NUM_STEPS + 2):
        for rank in ranks:
            rank.look()
            rank.look()
        for number in {each % world_size for each in order} | set(range(world_size)):
            ranks[number].advance()
    finish(ranks)
    assert [rank.acted for rank in ranks] == [[lead]] * world_size


def test_a_rank_that_is_past_the_step_already_refuses_it_for_all() -> None:
    ahead, behind = job(2)
    for _ in range(5):
        ahead.advance()
    behind.propose(2)
    finish([ahead, behind])
    assert ahead.acted == behind.acted == []
    assert ahead.ahead.num_refused == behind.ahead.num_refused == 1


def test_a_rank_waits_at_the_step_for_the_promise_of_the_others() -> None:
    first, second = job(2)
    first.propose(2)
    first.look()
    for _ in range(5):
        first.advance()
    assert first.step == 1
    assert first.acted == []
    second.look()  # promises, and so makes the verdict
    first.look()
    first.advance()
    assert first.acted == [1]


def test_two_ranks_that_propose_at_once_get_one_step() -> None:
    ranks = job(2)
    ranks[0].propose(3)
    ranks[1].propose(5)
    finish(ranks)
    assert [rank.acted for rank in ranks] == [[2], [2]]


def test_old_agreements_leave_nothing_in_the_store() -> None:
    ranks = job(3)
    for number in range(5):
        ranks[number % 3].propose(2)
        for _ in range(4):
            for rank in ranks:
                rank.look()
                rank.advance()
    finish(ranks)
    registers = ranks[0].registers
    assert len(ranks[0].acted) == 5
    assert len(registers.values) + len(registers.counters) == 3  # those of the last agreement


class TestLead:
    def test_it_covers_the_time_of_an_agreement(self) -> None:
        lead = Lead(0.25)
        lead.note_step(0.125)
        assert lead.steps == 3

    def test_it_is_one_step_where_steps_take_long(self) -> None:
        lead = Lead(0.2)
        assert lead.steps == 2
        lead.note_step(100.0)
        assert lead.steps == 1

    def test_it_grows_with_each_refusal_and_shrinks_with_agreements(self) -> None:
        lead = Lead(0.2)
        lead.note_step(0.1)
        before = lead.steps
        lead.note_refusal()
        grown = lead.steps
        for _ in range(50):
            lead.note_verdict(0.05)
        assert before < grown
        assert lead.steps == before

    @pytest.mark.parametrize("step_s", [0.0, -1.0])
    def test_a_clock_that_stands_still_does_no_harm(self, step_s: float) -> None:
        lead = Lead(0.2)
        lead.note_step(step_s)
        assert lead.steps > 2
