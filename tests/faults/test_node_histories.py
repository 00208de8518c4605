"""The campaign: random histories of jobs on nodes whose memory is protected, against a model of what must be left.

Ranks and keepers are killed, nodes are lost, boot, stand still, are cut off and replaced; each job has other nodes and
another number of ranks. After each of these, the newest state that is recoverable is restored, bit for bit, from memory
wherever memory has it, and storage has one history. See `tests.faults.node_histories`.

HOLDFAST_CAMPAIGN_HISTORIES says how many histories there are. HOLDFAST_CAMPAIGN_SEED is the seed of the first one, and
repeats a history that failed.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.format.records import Place
from tests.faults.history_play import campaign
from tests.faults.node_histories import (
    Holding,
    InMemory,
    ParityRow,
    Promise,
    Reports,
    SavedState,
    draw_history,
    newest_whole,
)
from tests.support.nodes import missing

NUM_HISTORIES = 30
#: A history that begins with copies, and loses nodes.
QUICK_SEED = 5


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        yield Path(name)


def num_played(first: int, count: int, folder: Path, sockets: Path) -> int:
    """Play so many histories from the seed `first` on. Returns how many were played to their end; each restore in them
    is compared with the model."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    counts = campaign(folder, range(first, first + count), sockets=sockets)
    sys.stderr.write(f"campaign: {dict(counts)}\n")
    return counts["histories"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_random_history_of_nodes_finds_the_newest_recoverable_state(tmp_path: Path, sockets: Path) -> None:
    assert num_played(QUICK_SEED, 1, tmp_path, sockets) == 1


@pytest.mark.slow
@pytest.mark.timeout(12 * 3600)
def test_random_histories_of_nodes_find_the_newest_recoverable_state(tmp_path: Path, sockets: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_CAMPAIGN_SEED", secrets.randbelow(2**31)))
    sys.stderr.write(f"HOLDFAST_CAMPAIGN_SEED={seed}\n")
    count = int(os.environ.get("HOLDFAST_CAMPAIGN_HISTORIES", NUM_HISTORIES))
    assert num_played(seed, count, tmp_path, sockets) == count


# --- the model


def test_a_seed_gives_one_history() -> None:
    assert draw_history(7) == draw_history(7)
    assert len({str(draw_history(seed)) for seed in range(100)}) == 100


def test_a_promise_of_copies_needs_the_owner_or_a_holder_of_each() -> None:
    promise = Promise(copies={0: (1,), 1: (0,), 2: (3,), 3: (2,)})
    assert promise.holds({0, 2})
    assert promise.holds({1, 3})
    assert not promise.holds({0, 1})


def test_a_promise_of_parity_allows_so_many_losses_of_each_group() -> None:
    promise = Promise(groups=((0, 1, 2), (3, 4, 5)), losses=1)
    assert promise.holds({0, 1, 4, 5})
    assert not promise.holds({0, 3, 4, 5})


def saved(job: int, step: int, place: str, *owners: int) -> SavedState:
    return SavedState(job, step, frozenset(owners), Place.parse(place))


def test_only_the_last_job_that_saved_has_anything_in_memory() -> None:
    reports = Reports()
    first, second = saved(0, 0, "1.1", 0, 1), saved(1, 1, "2.1", 0, 1)
    reports.begin(first)
    first.is_staged = True
    assert reports.must_find({0, 1, 2}) == first.place
    assert reports.must_find({0, 2}) is None
    reports.begin(second)
    assert reports.must_find({0, 1, 2}) is None
    reports.go_on_from(Place(1, 1))
    assert reports.must_find({2}) == first.place


def test_a_disturbance_ends_the_promises_for_earlier_steps() -> None:
    reports = Reports()
    first = saved(0, 0, "1.1", 0, 1)
    reports.begin(first)
    first.promise = Promise(copies={0: (1,), 1: (0,)})
    assert reports.must_find({1}) == first.place
    reports.disturb(0)
    assert reports.must_find({1}) is None


def lying(place: str, **nodes: Holding) -> InMemory:
    return InMemory(Place.parse(place), 0, 3, nodes)


def test_a_checkpoint_is_whole_with_copies_or_enough_rows_of_parity() -> None:
    group = tuple((name, frozenset({file})) for file, name in enumerate("abc"))
    row = ParityRow(group, 1, 2)
    a, b, c = (Holding(frozenset({file}), rows=(row,)) for file in range(3))
    assert lying("1.1", a=a, b=b, c=c).is_whole
    assert lying("1.1", a=a, c=c).is_whole
    assert not lying("1.1", a=a).is_whole
    assert not lying("1.1", a=a, c=Holding(frozenset({2}))).is_whole
    assert lying("1.1", a=Holding(frozenset({0}), frozenset({1, 2}))).is_whole


def test_the_newest_whole_checkpoint_of_the_newest_epoch_after_the_head_counts() -> None:
    whole = Holding(frozenset(range(3)))
    found = [lying("1.3", a=whole), lying("2.1", a=whole), lying("2.2", a=whole), lying("2.3", a=Holding())]
    assert newest_whole(found, epoch=2, head=Place(2, 1)) == found[2]
    assert newest_whole(found, epoch=3, head=Place(1, 3)) == found[0]
    assert newest_whole(found, epoch=3, head=Place(2, 4)) is None
    assert newest_whole(found, epoch=2, head=None) == found[2]
