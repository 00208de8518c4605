"""SIGKILL at every named point of a save into memory: of a trainer, of all trainers, of the keeper, or of everything.
Durable checkpoints survive, and a snapshot that was whole in memory is restored bit for bit.

A job of two ranks has two durable checkpoints and saves the third one; the processes that die are real, and so are the
points (see `engine_points`). The work of each step, and its checks, are in `engine_job`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest

import holdfast
from tests.faults.engine_job import NUMEL, Job, Restored, Spec, Training, Truth, job, node_memory, whole_in_memory
from tests.faults.engine_points import BY_ONE, KEEPER, TRAINER, Deed, Role

TRAINERS: Final = ("rank-0", "rank-1")
#: Step of the save that is interrupted: the third one, so that it fills a slot again.
STEP: Final = 2
#: A job that goes on to its end makes so many steps.
STOP: Final = 5


@dataclass(frozen=True)
class Case:
    """At `point` of processes of `role` those of these names are killed."""

    role: Role
    point: str
    who: str
    rank: int

    def __str__(self) -> str:
        return f"{self.point}-kills-{self.who.replace(' ', '-')}"

    @property
    def kills(self) -> tuple[str, ...]:
        """The names of the processes that are killed."""
        one, of_both = f"rank-{self.rank}", (*TRAINERS, "keeper")
        return {"one trainer": (one,), "all trainers": TRAINERS, "the keeper": ("keeper",), "all": of_both}[self.who]

    @property
    def deed(self) -> Deed:
        """The action. (Ranks race to write a generation, so the rank is the one that wins.)"""
        rank = None if self.role == "keeper" or self.point in BY_ONE else self.rank
        return Deed(self.role, self.point, rank, kills=self.kills)


WHO: Final = ("one trainer", "all trainers", "the keeper", "all")
POINTS: Final[list[tuple[Role, str]]] = [
    *(("trainer", point) for point in TRAINER),
    *(("keeper", point) for point in KEEPER),
]
CASES: Final = [
    Case(role, point, who, rank)
    for (role, point), rank in zip(POINTS, cycle((1, 0)), strict=False)
    for who in WHO
    if not (point in BY_ONE and who == "one trainer")  # nobody could say which one it is
]
#: Killed at in every run of the tests; the others belong to the sweep.
SAMPLE: Final = {
    ("WRITING", "all trainers"),
    ("copy", "one trainer"),
    ("generation.unnamed", "all trainers"),
    ("STAGED", "all"),
    ("hash", "all"),
    ("SEALED", "the keeper"),
    ("data.half", "all trainers"),
    ("commit.linked", "all"),
}

#: Phases of a restore from memory, behind each of which ranks are killed.
RESTORE: Final = ("inventory", "match", "share", "read", "finish")


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(NUMEL)


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[Spec]:
    """A job on a run of its own, in the memory of a node of its own."""
    with node_memory(tmp_path) as node_dirs:
        yield Spec(str(tmp_path / "run"), node_dirs, tmp_path / "log", stop=STOP)


def after(spec: Spec, name: str = "next", stop: int = 10**9) -> Spec:
    """A job that comes after it, on the same node."""
    return Spec(spec.run, spec.node_dirs, spec.log.with_name(name), numel=spec.numel, stop=stop)


def test_a_save_passes_exactly_the_listed_points(spec: Spec) -> None:
    with job(paused_at_the_third(spec), keeper=True) as training:
        arm(training)
        training.ended_well()
        passed = {who: points(training, who) for who in (*TRAINERS, "keeper")}
    of_third = {who: passed[who][: passed[who].index("STAGED") + 1] for who in TRAINERS}
    for who in TRAINERS:
        assert sorted(set(of_third[who]) | BY_ONE, key=TRAINER.index) == TRAINER
    assert any("generation.named" in of_third[who] for who in TRAINERS)  # both, when they come at the same time
    assert list(dict.fromkeys(of_third["rank-0"])) == sorted(set(of_third["rank-0"]), key=TRAINER.index)
    assert set(passed["keeper"]) == set(KEEPER)


def points(training: Job, who: str) -> list[str]:
    return [each["point"] for each in training.log.told(who, "passed")]


def paused_at_the_third(spec: Spec, *deeds: Deed) -> Spec:
    """The job, standing still before its third save, when what it has saved is durable."""
    return Spec(
        spec.run, spec.node_dirs, spec.log, numel=spec.numel, stop=STOP, pauses={STEP: "durable"}, deeds=tuple(deeds)
    )


def arm(training: Job) -> None:
    """Have the deeds done from the third save on, and let it come."""
    training.until_told("paused", step=STEP)
    training.arm("trainer", "keeper")
    training.log.let(f"pass-{STEP}")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if (case.point, case.who) in SAMPLE else pytest.mark.slow, id=str(case))
        for case in CASES
    ],
)
@pytest.mark.few(4)
def test_after_a_death_at_a_point_nothing_is_lost_that_was_whole(spec: Spec, truth: Truth, case: Case) -> None:
    with job(paused_at_the_third(spec, case.deed), keeper=True) as training:
        arm(training)
        if case.who == "the keeper":
            training.ended_well()
            assert training.keeper is not None
            assert training.keeper.wait() == -9
        else:
            end_with_its_ranks(training, case)
        # Trainers are dead, and the keeper is, or goes on: what is whole now stays so.
        whole = whole_in_memory(spec)
        check_what_is_durable(spec, training, truth)
        assert max(whole) >= max(STEP - 1, training.durable())
        with job(after(spec, stop=max(whole) + 2), keeper=case.who == "all") as following:
            assert following.restored(truth) == Restored(max(whole), "node memory")
            following.ended_well()
            check_what_is_durable(spec, following, truth)
        assert truth.loaded(spec.run) == max(whole) + 1
    check_after_the_loss_of_the_node(spec, truth, step=max(whole) + 1)


def end_with_its_ranks(training: Job, case: Case) -> None:
    """Return when those are dead that die at the point, and the other rank, which a launcher would end then."""
    for who in case.kills:
        process = training.keeper if who == "keeper" else training.ranks[int(who.removeprefix("rank-"))]
        assert process is not None
        assert process.wait() == -9, process.err
    if case.who == "one trainer":
        training.until_told("saved", step=STEP, ranks=[1 - case.rank])  # this far it gets alone
    training.kill_ranks()


def check_what_is_durable(spec: Spec, training: Job, truth: Truth) -> None:
    """The newest checkpoint that is committed loads bit for bit, and so does every step of which a handle said that."""
    assert truth.loaded(spec.run) >= training.durable()
    for step in training.durable_steps():
        assert truth.loaded(f"{spec.run}@step={step}") == step


def check_after_the_loss_of_the_node(spec: Spec, truth: Truth, *, step: int) -> None:
    """A job on another node goes on from storage."""
    for node_dir in spec.node_dirs:
        for folder in node_dir.glob("holdfast-*"):
            shutil.rmtree(folder)
    training = Training(spec.numel)
    with holdfast.Checkpointer(
        spec.run, training.state, memory=holdfast.Memory(node_dir=spec.node_dirs[0])
    ) as checkpointer:
        report = checkpointer.restore()
    assert (report.step, report.tier) == (step, "storage")
    assert training.digest() == truth.digest(step)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(("rank-1",), marks=pytest.mark.slow, id="one"),
        pytest.param(TRAINERS, marks=pytest.mark.slow, id="all"),
        pytest.param((*TRAINERS, "keeper"), id="keeper-too"),
    ],
)
@pytest.mark.parametrize("phase", RESTORE)
@pytest.mark.few(2)
def test_after_a_death_in_a_restore_the_next_one_restores_the_same(
    spec: Spec, truth: Truth, phase: str, kills: tuple[str, ...]
) -> None:
    with job(paused_at_the_third(spec), keeper=True) as training:
        training.until_told("paused", step=STEP)
    deed = Deed("trainer", f"after {phase}", 1, kills=kills)
    dying = replace(after(spec, "dying"), deeds=(deed,))
    with job(dying, keeper=True, armed=("trainer",)) as killed:
        assert killed.ranks[1].wait() == -9, killed.ranks[1].err
        assert not killed.log.told("rank-1", "restored")
    with job(after(spec, stop=STEP + 1)) as following:
        assert following.restored(truth) == Restored(STEP - 1, "node memory")
        following.ended_well()
    assert truth.loaded(spec.run) == STEP


def test_every_point_has_a_case_for_each_kind_of_death() -> None:
    assert {(case.role, case.point) for case in CASES} == set(POINTS)
    assert {(case.point, case.who) for case in CASES} > SAMPLE
