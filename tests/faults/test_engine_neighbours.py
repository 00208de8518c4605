"""Other jobs and other users on one node: saves into memory go on beside them, or are refused with the reason."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import holdfast
from holdfast.node_memory.slots import Slot, slot_names
from tests.faults.engine_job import (
    SMALL_NUMEL,
    WORLD_SIZE,
    Restored,
    Spec,
    Truth,
    job,
    keep,
    whole_in_memory,
)
from tests.faults.engine_points import Deed
from tests.faults.test_engine_faults import TRAINERS, after, leave_staged, save_once
from tests.support import nursery
from tests.support.nursery import until


def test_slots_that_are_committed_after_another_job_has_taken_them_over_are_its_own(spec: Spec, truth: Truth) -> None:
    leave_staged(spec)
    late = Deed("keeper", "COMMITTED.asked", stalls=True)
    with job(replace(after(spec, stop=8), deeds=(late,)), keeper=True, armed=("trainer", "keeper")) as training:
        training.until_told("saved", step=3)
        training.log.let("go-on-COMMITTED.asked")
        training.ended_well()
    assert truth.loaded(spec.run) == 7


def test_room_that_was_agreed_on_does_not_go_before_it_is_used(spec: Spec, truth: Truth) -> None:
    leave_staged(spec)
    # The keeper commits what another job staged while this job is about to fill the slot that it is in.
    late = Deed("keeper", "COMMITTED.asked", stalls=True)
    agreed = [Deed("trainer", "after describe", rank=rank, stalls=True) for rank in range(WORLD_SIZE)]
    following = replace(after(spec, stop=8), deeds=(late, *agreed), pauses={4: "staged"})
    with job(following, keeper=True, armed=("keeper",)) as training:
        training.until_told("paused", step=4)
        training.arm("trainer")
        training.log.let("pass-4")
        training.log.let("go-on-COMMITTED.asked")
        training.until_told("stalled")
        until(lambda: states_of(spec, step=3) == {"COMMITTED"})
        time.sleep(0.3)  # the keeper looks again
        training.log.let("go-on-after describe")
        training.ended_well()
    assert truth.loaded(spec.run) == 7


# Others.


def test_a_second_job_that_restored_nothing_is_refused_and_the_first_goes_on(spec: Spec, truth: Truth) -> None:
    with job(replace(spec, pauses={2: "durable"}, stop=5), keeper=True) as first:
        first.until_told("paused", step=2)
        before = whole_in_memory(spec)
        with job(replace(after(spec, stop=5), begins="anew")) as second:
            second.until_told("failed")
            assert {each["code"] for each in second.log.told("rank-1", "failed")} == {"config.unloaded_history"}
        assert whole_in_memory(spec) == before
        first.log.let("pass-2")
        first.ended_well()
    assert truth.loaded(spec.run) == 4


def test_a_job_whose_run_another_one_takes_over_is_fenced_and_the_other_goes_on(spec: Spec, truth: Truth) -> None:
    with job(replace(spec, pauses={2: "durable"}), keeper=True) as first:
        first.until_told("paused", step=2)
        with job(replace(after(spec, stop=4), begins="taking over", timeout_s=20.0)) as second:
            second.ended_well()
        first.log.let("pass-2")
        first.until_told("failed")
        (failed,) = first.log.told("rank-0", "failed")
        assert failed["code"].startswith("fenced.")
        assert "Stop this job" in failed["text"]
        assert [truth.loaded(f"{spec.run}@step={step}") for step in range(4)] == [0, 1, 2, 3]
        with job(replace(after(spec), log=spec.log.with_name("third"))) as third:
            assert third.restored(truth) == Restored(3, "node memory")


def test_a_job_that_restores_beside_another_one_takes_nothing_from_it(spec: Spec, truth: Truth) -> None:
    slow = Deed("trainer", "copy", rank=1, stalls=True)
    with job(replace(spec, pauses={2: "durable"}, deeds=(slow,), stop=5), keeper=True) as first:
        first.until_told("paused", step=2)
        first.arm("trainer")
        first.log.let("pass-2")
        first.until_told("stalled", ranks=[1])
        until(lambda: "SEALED" in states_of(spec, step=2))  # of rank 0
        with job(after(spec)) as second:
            assert second.restored(truth) == Restored(1, "node memory")
            second.ended_well()
        first.log.let("go-on-copy")
        first.ended_well()
        assert first.durable_steps() == {0, 1, 2, 3, 4}
    assert truth.loaded(spec.run) == 4


def states_of(spec: Spec, *, step: int) -> set[str]:
    """The states of all slots that hold a part of that step."""
    with spec.folder(spec.node_dirs[0]) as folder, ExitStack() as stack:
        records = [stack.enter_context(Slot(folder, name)).record for name in slot_names(folder)]
    return {record.state.name for record in records if record.contents and record.contents.step == step}


def test_a_job_that_takes_over_is_not_held_up_by_what_is_in_memory_in_part(spec: Spec, truth: Truth) -> None:
    slow = Deed("trainer", "copy", rank=1, stalls=True)
    with job(replace(spec, pauses={2: "durable"}, deeds=(slow,)), keeper=True) as first:
        first.until_told("paused", step=2)
        first.arm("trainer")
        first.log.let("pass-2")
        first.until_told("stalled", ranks=[1])
        until(lambda: "SEALED" in states_of(spec, step=2))  # of rank 0
        first.kill_ranks()
        with job(replace(after(spec, stop=4), begins="taking over", timeout_s=5.0)) as second:
            second.ended_well()
    assert truth.loaded(spec.run) == 3


@pytest.mark.parametrize("point", ["generation.unnamed", "copy", "STAGED"])
def test_what_killed_jobs_leave_behind_in_memory_goes(spec: Spec, truth: Truth, point: str) -> None:
    with job(replace(spec, deeds=(Deed("trainer", point, kills=TRAINERS),)), keeper=True, armed=("trainer",)) as first:
        first.ended_killed()
        with job(after(spec, stop=6)) as second:
            second.ended_well()
    with spec.folder(spec.node_dirs[0]) as folder:
        kinds = Counter(name.partition("-")[0] for name in folder.names())
    assert kinds["slot"] <= 2 * WORLD_SIZE
    assert kinds["generation"] <= 3  # in two are the slots; and one may be about to be forgotten
    assert {kind for kind in kinds if "." not in kind} == {"slot", "generation"}
    assert truth.loaded(spec.run) == 5


# Users.

SOMEBODY = 12345


@pytest.fixture
def open_node() -> Iterator[Path]:
    """A folder where everybody may make files, with one for the memory of a node in it."""
    if os.geteuid() != 0:
        pytest.skip("only root can become others")
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as name:
        folder = Path(name)
        (folder / "node").mkdir()
        for path in (folder, folder / "node"):
            path.chmod(0o1777)
        yield folder


def as_user(user: int, function: Callable[..., object], *arguments: object) -> None:
    """Be another user, and do it."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    function(*arguments)


def test_users_have_folders_of_their_own_on_a_node(open_node: Path, truth: Truth) -> None:
    with ExitStack() as stack:
        for user in (0, SOMEBODY):
            spec = Spec(
                str(open_node / f"run-{user}"), (open_node / "node",), open_node / f"log-{user}", numel=SMALL_NUMEL
            )
            save_as(user, spec, stack)
            folder = open_node / "node" / f"holdfast-{user}"
            for path in (folder, *folder.rglob("*")):
                assert path.stat().st_uid == user
                assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
            assert truth.loaded(spec.run) == 0


def spec_at(folder: Path, user: int) -> Spec:
    """The job that a user trains in a folder."""
    return Spec(str(folder / f"run-{user}"), (folder / "node",), folder / f"log-{user}", numel=SMALL_NUMEL)


def save_as(user: int, spec: Spec, stack: ExitStack) -> None:
    """Save step 0 as a user, who has a keeper."""
    spec.log.mkdir()
    spec.log.chmod(0o1777)
    keeper = nursery.start(as_user, user, keep, spec, spec.node_dirs[0], err=spec.log / "keeper.err")
    stack.callback(keeper.kill)
    lock = spec.node_dirs[0] / f"holdfast-{user}"
    until(lambda: any(path.read_text() for path in lock.glob("*/keeper.lock")) or not keeper.is_running)
    trainer = nursery.start(as_user, user, save_once, spec, err=spec.log / "trainer.err")
    assert trainer.wait() == 0, trainer.err + keeper.err


@pytest.mark.parametrize(
    ("mode", "why"),
    [(0o700, "Permission denied"), (0o755, f"it belongs to user 0, but this process runs as user {SOMEBODY}")],
)
def test_a_folder_that_somebody_else_made_is_refused_and_saves_go_to_storage(
    open_node: Path, mode: int, why: str
) -> None:
    folder = open_node / "node" / f"holdfast-{SOMEBODY}"
    folder.mkdir(mode=mode)  # root's
    spec = spec_at(open_node, SOMEBODY)
    spec.log.mkdir()
    trainer = nursery.start(as_user, SOMEBODY, save_once, spec, err=spec.log / "trainer.err")
    assert trainer.wait() == 0, trainer.err
    assert f"[config.not_private] '{folder}' is not a private place for the state of a run: {why}" in trainer.err
    assert holdfast.open(spec.run).step == 0
    assert not list(folder.iterdir())
