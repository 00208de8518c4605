"""Nodes of a job whose memory is protected by parity: they are lost in each phase of a save, two at once, or more than
parity covers; survivors stand still in the middle of a rebuild, or have wrong bits. The tests compare the restored
state bit for bit, on fewer nodes than before."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from holdfast import Parity
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import parity_names, slot_names
from tests.faults.engine_job import Restored, Spec, Truth
from tests.faults.engine_points import Deed, Log, Role
from tests.faults.node_job import NodeJob
from tests.faults.protected_job import STEP, flip, goes_on, protected_job, spec_of
from tests.support.nodes import Network, Node
from tests.support.nursery import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: Two, three, four and six ranks divide it evenly. Each one's part fills several blocks, so all rows have some.
NUMEL: Final = 12 * 2**18
FROM_PEERS: Final = Restored(STEP - 1, "peer memory")


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(NUMEL)


def parity_spec(
    run: str, log: Path, protect: Parity, *, durable_every: int = 100, deeds: tuple[Deed, ...] = ()
) -> Spec:
    """As `spec_of`."""
    return spec_of(run, log, durable_every=durable_every, deeds=deeds, protect=protect, numel=NUMEL)


@dataclass(frozen=True)
class LossInPhase:
    """A node is lost when one of its processes gets to a point of the save of `STEP`, or, if another one `reads` from
    it, when that gets to the point. The save may be protected or durable nevertheless, unless `is_early`."""

    phase: str
    role: Role
    point: str
    reads: bool = False
    is_early: bool = False
    is_durable: bool = False

    def __str__(self) -> str:
        return f"{self.phase}-{self.point.replace(' ', '.')}{'-read' if self.reads else ''}"


LOSSES: Final = [
    LossInPhase("recycle", "trainer", "WRITING.asked", is_early=True),
    LossInPhase("stage", "trainer", "copy", is_early=True),
    LossInPhase("seal", "keeper", "hash", is_early=True),
    LossInPhase("encode", "keeper", "OfferParity.asked"),
    LossInPhase("encode", "keeper", "parity WRITING"),
    LossInPhase("encode", "keeper", "GetRange.asked", reads=True),
    LossInPhase("encode", "keeper", "parity HELD.asked"),
    LossInPhase("persist", "keeper", "data.half", is_durable=True),
    LossInPhase("commit", "keeper", "COMMITTED.asked", is_durable=True),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_parity_gives_back_what_a_node_had_that_is_lost_in_any_phase_of_the_next_save(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, loss: LossInPhase
) -> None:
    nodes = network.start(4)
    number = 2 if loss.role == "trainer" else nodes[2].number
    deeds = (Deed(loss.role, loss.point, number, stalls=True),)
    durable_every = STEP if loss.is_durable else 100
    spec = parity_spec(run, tmp_path / "log", Parity(1), durable_every=durable_every, deeds=deeds)
    with protected_job(spec, nodes, launcher) as job:
        lost = nodes[1 if loss.reads else 2]
        job.log.let(f"armed-{loss.role}")
        job.log.let(f"pass-{STEP}")
        job.until_told("stalled", who=["rank-2" if loss.role == "trainer" else f"keeper-{number}"])
        lost.lose()
        job.log.let(f"go-on-{loss.point}")
    nodes.remove(lost)
    restored = goes_on(spec, nodes, launcher, truth)
    if loss.is_early:
        assert restored == FROM_PEERS
    else:
        assert restored.step in (STEP - 1, STEP)
        assert restored.step >= job.newest("protected")
        assert restored.tier == "peer memory" or loss.is_durable


@pytest.mark.parametrize("group", [6, 3], ids=["in one group", "in different groups"])
def test_two_nodes_lost_at_once_come_back_from_p_and_q_on_four_nodes(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, group: int
) -> None:
    nodes = network.start(6)
    spec = parity_spec(run, tmp_path / "log", Parity(2, group=group))
    with protected_job(spec, nodes, launcher) as job:
        groups = [job.group(node) for node in nodes]
        first, second = nodes[1], next(node for node in nodes[2:] if (node in groups[1]) == (group == 6))
        assert len(groups[1]) == group
        for node in (first, second):
            nodes.remove(node)
            node.lose()
    after = replace(spec, protect=Parity(2))
    assert goes_on(after, nodes, launcher, truth) == FROM_PEERS


def test_more_losses_than_parity_covers_cost_the_memory_and_the_report_says_so(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    spec = parity_spec(run, tmp_path / "log", Parity(1))
    with protected_job(spec, nodes, launcher):
        for node in nodes[2:]:
            node.lose()
    assert goes_on(spec, nodes[:2], launcher, truth) == Restored(0, "storage")
    assert any("no node of this job has 2 of its 4 files" in reason for reason in rejected(tmp_path)), rejected(
        tmp_path
    )


@dataclass(frozen=True)
class KeeperTrouble:
    """A signal for the keeper of a survivor in the middle of a rebuild, which parity for so many `losses` covers or
    not. A keeper that is killed is started again."""

    number: signal.Signals
    losses: int
    is_covered: bool = True

    def __str__(self) -> str:
        return f"{self.number.name}-{self.losses}"


@pytest.mark.parametrize(
    "trouble",
    [
        KeeperTrouble(signal.SIGSTOP, 2),
        KeeperTrouble(signal.SIGSTOP, 1, is_covered=False),
        KeeperTrouble(signal.SIGKILL, 1),
    ],
    ids=str,
)
def test_a_keeper_that_stops_in_the_middle_of_a_rebuild_counts_as_lost(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, trouble: KeeperTrouble
) -> None:
    nodes = network.start(4)
    spec = replace(parity_spec(run, tmp_path / "log", Parity(trouble.losses)), timeout_s=100.0)
    with protected_job(spec, nodes, launcher) as job:
        keeper = job.keepers[nodes[3]]
        nodes.pop(1).lose()
    restoring = Deed("trainer", "after keepers", 0, stalls=True)  # the ranks know all keepers, and rank 0 has work

    def hit_keeper(following: NodeJob) -> None:
        following.until_told("stalled", who=["rank-0"])
        keeper.send(trouble.number)
        following.log.let("go-on-after keepers")
        until(lambda: following.has_told("rank-0", "restored"), timeout_s=200)  # it looks for each keeper again
        keeper.send(signal.SIGCONT)

    restored = goes_on(spec, nodes, launcher, truth, deeds=(restoring,), meanwhile=hit_keeper)
    assert restored == FROM_PEERS if trouble.is_covered else restored.step < STEP - 1


@dataclass(frozen=True)
class Flip:
    """Bits flip in what a survivor has: in its slots, or in its rows of parity."""

    what: str
    names: Callable[[NodeFolder], Sequence[str]]
    losses: int

    def __str__(self) -> str:
        return f"{self.what}-{self.losses}"


FLIPS: Final = [
    Flip(what, names, p) for what, names in (("data", slot_names), ("parity", parity_names)) for p in (1, 2)
]


@pytest.mark.parametrize("flipped", FLIPS, ids=str)
def test_flipped_bits_on_a_survivor_are_found_and_another_way_used(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, flipped: Flip
) -> None:
    nodes = network.start(4)
    spec = parity_spec(run, tmp_path / "log", Parity(flipped.losses))
    with protected_job(spec, nodes, launcher):
        nodes.pop(1).lose()
        num_slots = flipped.losses if flipped.what == "parity" else 1
        assert flip(spec, nodes[1], flipped.names, step=STEP - 1) == num_slots
    restored = goes_on(spec, nodes, launcher, truth)
    if flipped.losses > 1:
        assert restored == FROM_PEERS
    else:
        assert restored.step < STEP - 1
        # The keeper finds it by itself, if it is not the restore that comes first.
        logs = [path.read_text() for path in (tmp_path / "log").glob("keeper-*.err")]
        assert rejected(tmp_path) or any("has changed in the memory of this node" in log for log in logs)


def rejected(tmp_path: Path) -> list[str]:
    """The reasons why the second job did not take what it found nearer or newer."""
    (told,) = Log(tmp_path / "next").told("rank-0", "restored")
    return list(told["rejected"])
