"""``bench peers``: copies for another node, their bar and their table. No test depends on a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import measure
from bench.benchmark import Options
from bench.peer_streams import ranges, receiving
from bench.peers import PEERS, PLAIN, compared
from bench.schema import OURS, RAW, WARM_UP, BenchError, read_result
from tests.project.bench_results import peers_result


def test_the_smallest_copies_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    measure(PEERS, Options(scale=0, rounds=1, memory=memory), None, tmp_path)
    (part,) = read_result("peers", tmp_path).parts
    assert {sample.contender for sample in part.samples} == {OURS, *PLAIN}
    assert [sample.round for sample in part.taken(OURS)] == [WARM_UP, 1]
    assert not part.scenario.is_full
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("nbytes", [1, 4 << 20, (9 << 20) + 5])
def test_streams_take_whole_blocks_and_together_everything(nbytes: int) -> None:
    parts = ranges(nbytes)
    assert [number for part in parts for number in (part.start, part.stop)][1:-1:2] == [
        part.stop for part in parts[:-1]
    ]
    assert (parts[0].start, parts[-1].stop) == (0, nbytes)
    assert all(part.start % (1 << 20) == 0 for part in parts if part)


def test_every_way_brings_the_bytes_and_others_are_found(tmp_path: Path) -> None:
    with receiving(tmp_path, (9 << 20) + 5) as (receiver, target, source):
        for name, turn in (
            (OURS, receiver.ours),
            *((name, lambda n=n: receiver.plain(n)) for name, n in PLAIN.items()),
        ):
            target[:] = 0
            found = compared(name, turn, target, source)
            assert found["seconds"] > 0
            assert np.array_equal(target, source)
        with pytest.raises(BenchError, match=f"{OURS} brought other bytes"):
            compared(OURS, dict, target, source)


def test_the_bar_is_the_share_of_the_faster_plain_copy() -> None:
    (bar,) = PEERS.judged(peers_result()).values()
    assert bar.text() == "0.91 (at least 0.8): met"
    (missed,) = PEERS.judged(peers_result(seconds=1.3)).values()
    assert not missed.met
    rendered = PEERS.render(peers_result())
    assert "| plain copy over TCP | 1.00 (1.00 to 1.00) | 1 | 0.40 (0.40 to 0.40) |" in rendered
    assert "4 streams. The faster plain copy: 16 MiB a call." in rendered
    assert peers_result().parts[0].raw_way() == f"{RAW} 16 MiB a call"
