"""The policy `Auto` in real loops: it measures the first save, chooses an interval, and says why."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Auto, Checkpointer, EveryTime, Memory
from holdfast.checkpointer.auto_trigger import AutoTrigger, num_nodes
from holdfast.checkpointer.events import SaveBegun, SaveCommitted, SaveEvent, SaveFailed, SaveHeld, SaveReturned
from holdfast.errors import StorageError
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from tests.checkpointer.test_policies import committed
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


class Driver:
    """An `AutoTrigger` whose clock the test sets; its steps take a second."""

    def __init__(self, run: str, policy: Auto, monkeypatch: pytest.MonkeyPatch, *, has_memory: bool = False) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        where = location_of(run)
        self.trigger = AutoTrigger(policy, where, world_size=1, now_s=self.now_s, has_memory=has_memory)

    def steps(self, number: int) -> list[str]:
        """Enter so many steps. Returns the wishes."""
        wishes = []
        for _ in range(number):
            self.now_s += 1.0
            wishes.append(self.trigger.wish(None, self.now_s))
        return [wish.reason for wish in wishes if wish]

    def save(self, step: int, *, blocked_s: float, memory_only: bool = False) -> None:
        self.trigger.hear(SaveBegun(step, "node memory", is_first_rank=True, memory_only=memory_only))
        self.now_s += blocked_s
        self.trigger.hear(SaveReturned(step, blocked_s))
        self.trigger.saved(self.now_s, begun_s=self.now_s, memory_only=memory_only)

    def end(self, event: SaveEvent) -> None:
        self.trigger.hear(event)


@pytest.fixture
def driver(run: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(run, Auto(mttf_s=3600.0), monkeypatch)


def test_the_first_save_follows_after_the_steps_that_tell_how_long_a_step_takes(driver: Driver) -> None:
    assert driver.steps(16) == []
    assert driver.steps(2) == ["Auto measures a save"] * 2  # until there is one


def test_long_steps_wait_five_minutes_for_the_first_save(driver: Driver) -> None:
    driver.steps(1)
    driver.now_s += 300.0
    assert driver.steps(1) == ["Auto measures a save"]


def test_the_measured_cost_decides_the_interval(driver: Driver) -> None:
    driver.steps(17)
    driver.save(17, blocked_s=2.0)
    assert driver.steps(5) == []
    driver.end(SaveCommitted(17, 100))
    assert driver.steps(114) == []  # sqrt(2 * 2 s * 3600 s) = 120 s from the end of the call
    assert driver.steps(1) == ["every 2 min, as Auto has chosen"]


def test_no_save_is_wished_for_while_one_is_on_its_way(driver: Driver) -> None:
    driver.steps(17)
    driver.save(17, blocked_s=2.0)
    assert driver.steps(4000) == []


def test_a_failed_save_tells_nothing_and_is_tried_again(driver: Driver) -> None:
    driver.steps(17)
    driver.save(17, blocked_s=2.0)
    error = StorageError("The store is gone.", code="storage.error", action="Bring it back.")
    driver.end(SaveFailed(17, error))
    assert driver.steps(299) == []
    assert driver.steps(2) == ["Auto measures a save"] * 2


def test_a_second_save_meanwhile_is_not_mistaken_for_the_first(driver: Driver) -> None:
    driver.steps(17)
    driver.save(17, blocked_s=2.0)
    driver.save(18, blocked_s=50.0)
    driver.end(SaveCommitted(18, 100))
    driver.end(SaveCommitted(17, 100))
    assert driver.steps(119) == []
    assert driver.steps(1) == ["every 2 min, as Auto has chosen"]


def test_an_evaluation_right_after_the_first_save_is_not_its_cost(driver: Driver) -> None:
    """The interval was hours: `Auto` believed that each save takes the time of the evaluation."""
    driver.steps(17)
    driver.save(17, blocked_s=2.0)
    driver.now_s += 5.0
    committed = SaveCommitted(17, 100)
    driver.now_s += 3000.0
    driver.steps(1)
    driver.end(committed)
    assert driver.steps(1) == ["every 2 min, as Auto has chosen"]


class TestMemory:
    """Saves to memory alone between the others, each of which costs a quarter."""

    @pytest.fixture
    def driver(self, run: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
        driver = Driver(run, Auto(mttf_s=3600.0, max_overhead=0.5), monkeypatch, has_memory=True)
        driver.steps(17)
        driver.save(17, blocked_s=8.0)
        driver.end(SaveCommitted(17, 100))
        return driver

    def test_one_is_measured_soon_after_the_first_save(self, driver: Driver) -> None:
        assert driver.steps(15) == []
        assert driver.steps(1) == ["Auto measures a save to memory"]

    def test_a_skipped_one_is_tried_again_later(self, driver: Driver) -> None:
        driver.steps(16)
        driver.trigger.saved(driver.now_s, begun_s=driver.now_s, memory_only=True)
        assert driver.steps(15) == []
        assert driver.steps(1) == ["Auto measures a save to memory"]

    def test_each_tier_has_an_interval_of_its_own(self, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
        driver.steps(16)
        with caplog.at_level(logging.INFO, logger="holdfast"):
            driver.save(33, blocked_s=0.1, memory_only=True)
            driver.end(SaveHeld(33, 100))
            begun_s = driver.now_s
            driver.steps(1)
        assert "step 33 is being saved to memory alone: Auto measures such a save" in caplog.text
        choice = driver.trigger.choice
        assert choice is not None
        # sqrt(2 * 0.1 s * 3600 s / 0.23), and sqrt(2 * 8 s * 3600 s / 0.77)
        assert choice.memory_interval_s == pytest.approx(56.0, rel=0.01)
        assert choice.interval_s == pytest.approx(273.5, rel=0.01)
        assert "saves every 56 s to memory alone" in caplog.text
        wishes = driver.steps(300)
        assert wishes[0] == "every 56 s to memory, as Auto has chosen"
        assert wishes[-1] == "every 4.56 min, as Auto has chosen"
        assert driver.now_s > begun_s + 273.5

    def test_where_they_cost_as_much_as_the_others_there_are_none(self, driver: Driver) -> None:
        driver.steps(16)
        driver.save(33, blocked_s=8.0, memory_only=True)
        driver.end(SaveHeld(33, 100))
        driver.steps(1)
        choice = driver.trigger.choice
        assert choice is not None
        assert choice.memory_interval_s == math.inf


def test_a_save_that_ctrl_c_ended_is_tried_again(run: str) -> None:
    """`Auto` waited for the end of that save for ever, and saved nothing any more."""

    class Interrupting:
        def __init__(self) -> None:
            self.is_on = False

        def state_dict(self) -> dict[str, int]:
            if self.is_on:
                raise KeyboardInterrupt
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    part = Interrupting()
    with Checkpointer(run, {"part": part}, memory=None, save=Auto(mttf_s=0.1, max_overhead=0.9)) as own:
        for step in range(400):
            time.sleep(0.001)
            if step == 100:
                part.is_on = True
                with pytest.raises(KeyboardInterrupt):
                    own.save(step)
                part.is_on = False
            own.step(step)
    assert max(committed(run)) > 200


def test_it_counts_the_nodes_that_the_launcher_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert [num_nodes(world_size) for world_size in (1, 4, 5)] == [1, 1, 2]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_nodes(17) == 3


def test_a_loop_says_what_it_expects_and_why(run: str, memory: Memory, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(1000)}
    holdfast.save(run, state, 0)
    start_new_job()
    with (
        caplog.at_level(logging.INFO, logger="holdfast"),
        Checkpointer(run, state, memory=memory, save=Auto()) as own,
    ):
        for step in own.steps(200):
            time.sleep(0.005)
            handle = own.step(step)
            if handle is not None and not handle.memory_only:
                handle.durable.wait(20.0)
    text, *_ = [record.message for record in caplog.records if "Auto saves every" in record.message]
    assert "from 1 node as in llama3 and 1 job before this one" in text
    assert committed(run) == [0, 17, 199]


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1, True, "0.1"])
def test_a_budget_that_is_no_share_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="max_overhead is a share of the time"):
        Auto(max_overhead=wrong)  # type: ignore[arg-type]


def test_an_unknown_fleet_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"failures is one of 'llama3', 'rsc1'.*, not 'llama'"):
        Auto(failures="llama")


def test_two_rules_for_the_time_between_saves_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rules for the time between saves"):
        Auto() | EveryTime(600)


def loop_of_auto(run: str, node_dir: str) -> list[int]:
    """Three ranks with steps of unlike length; the steps after which each of them saved."""
    start_new_job()
    saved = []
    memory = Memory(node_dir=Path(node_dir))
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=memory, save=Auto(mttf_s=1.0, max_overhead=0.9)) as own:
        for step in own.steps(10_000):
            time.sleep(0.01 + 0.002 * dist.get_rank())
            handle = own.step(step)
            if handle is not None and not handle.memory_only:
                saved.append(step)
            if len(saved) == 3:
                break
    return saved


def test_all_ranks_save_after_the_same_steps(run: str, node_dir: Path) -> None:
    saved = run_ranks(3, loop_of_auto, run, str(node_dir))
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) == 3
    history = Run.open(open_store(location_of(run)))
    assert sorted(history.commit(place).step for place in history.places()) == saved[0]
    end_keepers(node_dir)
