"""Nodes of a job whose memory is protected by copies: one is lost in each phase of a save, or several, or they stand
still, are slow, cut off, replaced or wrong. A protected state is restored bit for bit from the memory that is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import pytest

from holdfast.node_memory.slots import copy_names
from tests.faults.engine_job import Restored, Truth
from tests.faults.engine_points import Deed, Role
from tests.faults.node_job import NODE_NUMEL, node_job
from tests.faults.protected_job import STEP, flip, goes_on, protected_job, spec_of, until_last_is_protected
from tests.support.nodes import Network, Node
from tests.support.nursery import until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(NODE_NUMEL)


@dataclass(frozen=True)
class Loss:
    """A node is lost when a process gets to a point: the one of that process, or its partner, which holds its copy."""

    phase: str
    role: Role
    point: str
    lost: Literal["its own", "its partner's"] = "its own"
    is_durable: bool = False

    @property
    def may_be_protected(self) -> bool:
        """Whether all files of the checkpoint may be in the memory of other nodes, or in storage, in spite of it."""
        return self.is_durable or self.lost == "its partner's" or self.point.startswith("copy ")

    def __str__(self) -> str:
        return f"{self.phase}-{self.point.replace(' ', '.')}-{self.lost.replace(' ', '-')}"


LOSSES: Final = [
    Loss("protect", "keeper", "PutRange.asked"),
    Loss("stage", "trainer", "WRITING.asked"),
    Loss("stage", "trainer", "copy"),
    Loss("stage", "trainer", "copy", "its partner's"),
    Loss("stage", "trainer", "STAGED.asked"),
    Loss("seal", "keeper", "hash"),
    Loss("seal", "keeper", "hash", "its partner's"),
    Loss("seal", "keeper", "HELD.asked"),
    Loss("protect", "keeper", "OfferCopy.asked"),
    Loss("protect", "keeper", "OfferCopy.asked", "its partner's"),
    Loss("protect", "keeper", "PutRange.asked", "its partner's"),
    Loss("protect", "keeper", "Finish.asked"),
    Loss("protect", "keeper", "Finish.asked", "its partner's"),
    Loss("protect", "keeper", "copy WRITING.asked"),
    Loss("protect", "keeper", "copy WRITING", "its partner's"),
    Loss("protect", "keeper", "copy HELD.asked"),
    Loss("protect", "keeper", "copy HELD.asked", "its partner's"),
    Loss("persist", "keeper", "data.half", is_durable=True),
    Loss("persist", "keeper", "data.linked", is_durable=True),
    Loss("persist", "keeper", "data.half", "its partner's", is_durable=True),
    Loss("commit", "keeper", "COMMITTED.asked", is_durable=True),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.few(1)
def test_what_was_protected_survives_the_loss_of_a_node_in_any_phase_of_the_next_save(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, loss: Loss
) -> None:
    nodes = network.start(4)
    number = 2 if loss.role == "trainer" else nodes[2].number
    deed = Deed(loss.role, loss.point, number, stalls=True)
    spec = spec_of(run, tmp_path / "log", durable_every=STEP if loss.is_durable else 100, deeds=(deed,))
    with protected_job(spec, nodes, launcher) as job:
        lost = nodes[2] if loss.lost == "its own" else job.partner(nodes[2])
        job.log.let(f"armed-{loss.role}")
        job.log.let(f"pass-{STEP}")
        job.until_told("stalled", who=[f"{'rank-2' if loss.role == 'trainer' else f'keeper-{number}'}"])
        lost.lose()
        job.log.let(f"go-on-{loss.point}")
    nodes.remove(lost)
    restored = goes_on(spec, nodes, launcher, truth)
    if loss.may_be_protected:
        assert restored.step in (STEP - 1, STEP)
        assert restored.step >= job.newest("protected")
    else:
        assert restored == Restored(STEP - 1, "peer memory")


# --- several nodes


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["in one group", "in different groups"])
def test_two_nodes_lost_at_once_cost_memory_only_if_they_held_each_others_copies(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, *, together: bool
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher) as job:
        partner = job.partner(nodes[0])
        second = partner if together else next(node for node in nodes[1:] if node is not partner)
        for node in (nodes[0], second):
            node.lose()
    nodes = [node for node in nodes if node in network.nodes]
    wanted = Restored(0, "storage") if together else Restored(STEP - 1, "peer memory")
    assert goes_on(spec, nodes, launcher, truth) == wanted


@pytest.mark.slow
def test_a_replacement_with_another_address_gets_its_part_from_a_peer_and_is_protected(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher):
        nodes[0] = network.replace(nodes[0])
    assert goes_on(spec, nodes, launcher, truth) == Restored(STEP - 1, "peer memory")


@pytest.mark.slow
def test_a_node_that_boots_gets_its_part_from_a_peer(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher):
        nodes[3].reboot()
    assert goes_on(spec, nodes, launcher, truth) == Restored(STEP - 1, "peer memory")


# --- keepers


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 2], ids=["the first node's", "another's"])
def test_a_keeper_that_is_started_again_goes_on_to_protect(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, number: int
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log", durable_every=STEP, last="protected")  # one that waits for a slot
    with protected_job(spec, nodes, launcher) as job:
        job.keepers[nodes[number]].kill()
        job.log.let(f"pass-{STEP}")
        until_last_is_protected(job)
        nodes.pop(number).lose()
    assert goes_on(spec, nodes, launcher, truth).step == STEP


# --- nodes that are there, and not well


@pytest.mark.slow
def test_a_node_that_stands_still_delays_protection_until_it_goes_on(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(
        run,
        tmp_path / "log",
        last="protected",
        deeds=(Deed("keeper", "OfferCopy.asked", nodes[2].number, stalls=True),),
    )
    with protected_job(spec, nodes, launcher) as job:
        partner = job.partner(nodes[2])
        job.log.let("armed-keeper")
        job.log.let(f"pass-{STEP}")
        job.until_told("stalled", who=[f"keeper-{nodes[2].number}"])
        partner.stop()
        job.log.let("go-on-OfferCopy.asked")
        time.sleep(1)
        assert job.newest("protected") == STEP - 1
        partner.go_on()
        until_last_is_protected(job)
        nodes.remove(partner)
        partner.lose()
    assert goes_on(spec, nodes, launcher, truth) == Restored(STEP, "peer memory")


@pytest.mark.slow
def test_a_node_that_never_goes_on_leaves_what_was_protected(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher) as job:
        nodes[1].stop()
        job.log.let(f"pass-{STEP}")
        job.until_told("saved", step=STEP - 1)
    stopped = nodes.pop(1)
    restored = goes_on(spec, nodes, launcher, truth)
    stopped.go_on()
    assert restored == Restored(STEP - 1, "peer memory")
    assert truth.loaded(run) == STEP + 3


@pytest.mark.slow
def test_a_slow_link_delays_protection_and_not_training(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log", last="protected")
    with protected_job(spec, nodes, launcher) as job:
        nodes[1].slow(1)  # its part of a snapshot takes 3 s each way
        begun_s = time.monotonic()
        job.log.let(f"pass-{STEP}")
        job.until_told("saved", step=STEP)
        saved_s = time.monotonic() - begun_s
        until_last_is_protected(job)
        assert time.monotonic() - begun_s > max(3.0, saved_s)
        nodes.pop(1).lose()
    assert goes_on(spec, nodes, launcher, truth) == Restored(STEP, "peer memory")


@pytest.mark.slow
def test_wrong_clocks_change_nothing(network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path) -> None:
    nodes = network.start(4)
    clocks = dict(zip(nodes, (-3600.0, 0.0, 86400.0, 40.0), strict=True))
    spec = spec_of(run, tmp_path / "log", last="protected")
    with protected_job(spec, nodes, launcher, clocks=clocks) as job:
        job.log.let(f"pass-{STEP}")
        until_last_is_protected(job)
        nodes.pop(2).lose()
    assert goes_on(spec, nodes, launcher, truth, clocks=clocks) == Restored(STEP, "peer memory")


@pytest.mark.slow
def test_a_copy_whose_bits_flip_is_not_restored(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher) as job:
        partner = job.partner(nodes[1])
        assert flip(spec, partner, copy_names, step=STEP - 1) == 1
        nodes.pop(1).lose()
    restored = goes_on(spec, nodes, launcher, truth)
    assert restored.step < STEP - 1


# --- two jobs at once


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, True], ids=["in turn", "at once"])
def test_two_sides_of_a_partition_never_both_commit(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, *, at_once: bool
) -> None:
    nodes = network.start(4)
    spec = spec_of(run, tmp_path / "log")
    with protected_job(spec, nodes, launcher) as job:
        near = [nodes[0], next(node for node in nodes[1:] if node is not job.partner(nodes[0]))]
        far = [node for node in nodes if node not in near]
        assert {job.partner(node) for node in near} == set(far)  # so each side has all files
        network.partition(*far)
    after = replace(spec, durable_every=1, pauses={STEP: "staged"}, stop=STEP + 2)
    with (
        node_job(replace(after, log=tmp_path / "near"), near, near[0]) as one,
        node_job(replace(after, log=tmp_path / "far"), far, far[0]) as other,
    ):
        for side in (one, other):
            assert side.restored(truth) == Restored(STEP - 1, "peer memory")
            side.until_told("paused", step=STEP)
        if not at_once:
            one.log.let(f"pass-{STEP}")
            one.ended_well()
        for side in (one, other):
            side.log.let(f"pass-{STEP}")
        statuses = [[rank.wait(100) for rank in side.ranks] for side in (one, other)]
        committed = [side for side in (one, other) if side.newest("durable") >= STEP]
        assert len(committed) == 1, (statuses, [side.newest("durable") for side in (one, other)])
        assert committed == [one] or at_once
        (winner,) = committed
        failed = other if winner is one else one
        winner.ended_well()
        codes = {each["code"] for rank in (0, 1) for each in failed.log.told(f"rank-{rank}", "failed")}
        assert codes
        assert all(code.startswith("fenced") for code in codes)
    network.heal()
    assert truth.loaded(run) == STEP + 1
    assert goes_on(spec, nodes, launcher, truth).step == STEP + 1


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["inventory", "match", "finish"])
def test_a_job_goes_on_whose_predecessors_last_save_is_committed_in_the_middle_of_its_restore(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, phase: str
) -> None:
    nodes = network.start(4)
    lost = nodes[2]
    late = (Deed("keeper", "seal.asked", node.number, stalls=True) for node in nodes)
    deeds = (Deed("keeper", "OfferCopy.asked", lost.number, stalls=True), *late)
    spec = replace(spec_of(run, tmp_path / "log", deeds=deeds), stop=STEP + 1)
    with protected_job(spec, nodes, launcher) as job:
        job.log.let("armed-keeper")
        job.log.let(f"pass-{STEP}")
        job.until_told("ended")  # then keepers make the last save durable
        job.until_told("passed", point="seal.asked", who=[f"keeper-{node.number}" for node in nodes])
        nodes.remove(lost)
        lost.lose()
    deeds = (Deed("trainer", f"after {phase}", 0, stalls=True),)
    after = replace(spec, log=tmp_path / "next", deeds=deeds, stop=STEP + 3, durable_every=1, pauses={})
    with node_job(after, nodes, launcher, armed=["trainer"]) as following:
        following.until_told("stalled", who=["rank-0"])
        job.log.let("go-on-seal.asked")
        until(lambda: truth.loaded(run) == STEP, timeout_s=100)
        following.log.let(f"go-on-after {phase}")
        following.ended_well()
    assert truth.loaded(run) == STEP + 2
