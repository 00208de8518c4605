"""``bench engine``: its measuring parts, its figures, and the files that it leaves. No test depends on a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import holdfast
from bench.__main__ import main, measure
from bench.benchmark import Options, require_raw_limit
from bench.contenders import BACKGROUND, OURS_SYNC, THREAD
from bench.costs import Watch, cpu_s, held_nbytes, keepers, node_memory, tree
from bench.engine import ENGINE, PARTS, first_blocked_s
from bench.engine_turns import ALONE, BESIDE_WORK
from bench.schema import OURS, RAW, BenchError, Result, read_result, write_result
from bench.state import STEPPED, Live, LlamaLike, State, Work, local
from bench.ways import Site
from tests.project.bench_results import engine_result, loop_part, saves_part
from tests.support.ranks import run_ranks

#: Holds so much memory, and says when.
HOLD = "import sys, time; own = bytearray(b'x') * (64 << 20); print(len(own), flush=True); time.sleep(60)"


# The saved state


def live_state() -> dict[str, object]:
    """The content of a live state on a rank, before and after a step."""
    state = LlamaLike(1, num_layers=1).build(dist.get_world_size())
    live = Live(state)
    before = state.digests()
    live.step()
    after = state.digests()
    tensors = state.tensors()
    module = dict(live.module.named_parameters())
    return {
        "changed": {path for path in before if before[path] != after[path]},
        "same memory": all(
            local(parameter.detach()).data_ptr() == tensors[f"model/{name}"].data_ptr()
            for name, parameter in module.items()
        ),
        "sharded": all(isinstance(parameter, DTensor) for parameter in module.values()),
        "names": {path.removeprefix("model/") for path in tensors if path.startswith("model/")} == set(module),
        "slots": sum(len(slots) for slots in live.optimizer.state.values()) == 3 * len(module),
    }


def test_a_live_state_is_on_the_memory_of_its_tree_and_a_step_changes_a_little_of_both() -> None:
    parts = ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step")
    changed = {f"{part}/{name}" for part in parts for name in STEPPED}
    for found in run_ranks(2, live_state):
        assert found == {"changed": changed, "same memory": True, "sharded": True, "names": True, "slots": True}


def test_work_takes_its_time() -> None:
    work, start_s = Work(), time.perf_counter()
    work.for_seconds(0.05)
    assert time.perf_counter() - start_s >= 0.05


# Its costs


def test_the_processes_of_a_rank_are_it_and_all_that_descend_from_it() -> None:
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found, every = tree(child.pid), tree(os.getpid())
        assert (found[0].pid, len(found)) == (child.pid, 2)
        assert set(found) < set(every)
        for process in found:
            process.kill()


def test_cpu_time_is_counted_of_processes_and_of_their_children_that_have_ended() -> None:
    own = tree(os.getpid())[:1]
    before_s = cpu_s(own)
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert cpu_s(own) - before_s > 0.25  # the kernel counts in ticks of 10 ms
    with subprocess.Popen(["sleep", "60"]) as child:
        ended = tree(child.pid)
        child.kill()
    assert cpu_s(ended) == 0.0


def test_memory_is_watched_from_outside_with_that_of_children() -> None:
    watch = Watch()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert held_nbytes(tree(child.pid)) > 64 << 20
        peak = watch.stop()
        child.kill()
    assert peak > 64 << 20


def test_files_in_memory_are_not_counted_where_they_are_the_slots(tmp_path: Path) -> None:
    with node_memory(Path("/dev/shm")) as node:
        counted, slots = Watch(), Watch(node_dir=node)
        shared = torch.from_file(str(node / "slot"), shared=True, size=64 << 20, dtype=torch.uint8).fill_(1)
        peaks = (counted.stop(), slots.stop())
        del shared
    assert peaks[0] > 60 << 20 > peaks[1]


def test_keepers_are_found_by_their_lock_and_end_with_the_memory_of_their_node(tmp_path: Path) -> None:
    with node_memory(tmp_path) as node:
        assert keepers(node) == []
        state = {"a": torch.zeros(4)}
        with holdfast.Checkpointer(tmp_path / "run", state, memory=holdfast.Memory(node_dir=node)) as checkpointer:
            checkpointer.save(1)
        (keeper,) = keepers(node)
        (lock,) = node.glob("holdfast-*/*/keeper.lock")
        lock.write_text(f"{os.getpid()}\n")
        assert keepers(node) == []  # somebody else has the number now
        lock.write_text(f"{keeper.pid}\n")
    assert not keeper.is_running()
    assert not node.exists()


# The contenders


def test_of_a_run_the_head_is_kept_and_of_others_nothing(tmp_path: Path) -> None:
    site = Site(LlamaLike(1), tmp_path, tmp_path)
    site.state = State({})
    ours, thread = (BACKGROUND[name](site, name) for name in (OURS_SYNC, THREAD))
    run = ours.place("1")
    assert run == ours.place("2")
    state = {"a": torch.zeros(4)}
    for step in (1, 2, 3):
        holdfast.save(str(run), state, step)
    ours.discard(run)
    assert holdfast.load(str(run), into=state).step == 3
    assert len(list((run / "checkpoints").glob("*/manifest*"))) == 1

    folder = thread.place("1")
    assert folder != thread.place("2")
    folder.mkdir(parents=True)
    thread.discard(folder)
    assert not folder.exists()


# Figures


def test_the_first_save_counts_for_its_pause_and_its_memory_alone() -> None:
    part = saves_part()
    assert first_blocked_s(part, OURS) == pytest.approx(0.1)
    assert part.peak_nbytes(OURS) == 40_000_000
    assert max(part.series(OURS, measure=ALONE)) == pytest.approx(1.5)
    assert part.shares(OURS, measure=ALONE) == pytest.approx([1 / 1.5] * 7)
    assert part.shares(OURS, "persist_s", measure=ALONE) == pytest.approx([1.0] * 7)
    assert 1e9 * part.per_byte(OURS, "cpu_s", measure=ALONE) == pytest.approx(0.1)
    assert part.series(OURS, measure=BESIDE_WORK) == pytest.approx([3.0] * 7)
    assert (part.raw_way(ALONE), part.shares(RAW, measure=ALONE)) == (f"{RAW} slow", [1.0] * 7)
    assert part.series(RAW, "blocked_s", measure=BESIDE_WORK) == []


def test_a_bar_is_met_or_missed_by_the_median_and_says_so() -> None:
    found = ENGINE.judged(engine_result(blocked_s=0.025, loop_s=8.4))
    missed = {what for what, bar in found.items() if not bar.met}
    assert missed == {"blocked", "holdfast.save, of raw", "loop slowed down by"}
    assert len(found) == 9
    assert found["blocked"].text() == "25 ms (at most 20 ms): missed"
    assert found["restore, of memcpy"].text() == "0.8 (at least 0.6): met"
    assert found["Python-bound rank slowed down by"].figure == pytest.approx(2.0)


def test_the_bars_hold_only_for_runs_of_full_size() -> None:
    assert not ENGINE.judged(engine_result(is_full=False))
    assert "| bar |" not in ENGINE.render(engine_result(is_full=False))


def test_a_durable_save_that_beats_the_raw_limit_is_an_error_of_the_harness() -> None:
    require_raw_limit(engine_result())
    fast = saves_part(thread_s=0.9)
    with pytest.raises(BenchError, match=r"dcp-async-thread reached 1\.11 of the raw limit"):
        require_raw_limit(Result("engine", (fast,)))
    synced_nothing = tuple(msgspec.structs.replace(contender, durable="no") for contender in fast.contenders)
    require_raw_limit(Result("engine", (msgspec.structs.replace(fast, contenders=synced_nothing),)))


def test_the_tables_have_medians_extremes_bars_and_who_could_not_take_part() -> None:
    text = ENGINE.render(engine_result())
    blocked, waits = "10.0 (10.0 to 10.0)", "4.0 (4.0 to 4.0)"
    for line in (
        "| raw limit | - | - | 1.00 (1.00 to 1.00) | 1 | 0.10 | - | - |",
        f"| holdfast | {blocked} | {waits} | 1.50 (1.50 to 1.50) | 0.67 (0.67 to 0.67) | 0.10 | 40 | 0.10 |",
        "| restore from node memory | 0.25 (0.25 to 0.25) | 0.80 (0.80 to 0.80) |",
        "| copy of each tensor, with its digests, and no more | 0.20 (0.20 to 0.20) | 1.00 (1.00 to 1.00) |",
        "| dcp-async-thread | 50.0 (50.0 to 50.0) | 50.0 (50.0 to 50.0) | 25.0 (25.0 to 25.0) | 0.50 (0.50 to 0.50) |",
    ):
        assert line in text.splitlines()
    for fact in (
        "4,000 tensors",
        "0.20 s of CPU per GB",
        "torchsnapshot-async: it is from 2023",
        "of raw | 0.8 (at least 0.9): missed",
    ):
        assert fact in text


# The command


def test_a_wrong_part_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"no part save.*saves, restore, python, loop"):
        measure(ENGINE, Options(), ["save"], tmp_path)


@pytest.mark.parametrize("wrong", ["--rounds=0", "--scale=-1"])
def test_a_run_that_cannot_be_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "step", wrong])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2


def test_an_unknown_contender_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "io", "--contender=zip"])
    with pytest.raises(SystemExit, match=r"no contender zip.*raw, torch.save, dcp, .*holdfast"):
        main()


def test_a_part_that_is_measured_again_leaves_the_others(tmp_path: Path) -> None:
    write_result(engine_result(), tmp_path)
    before = read_result("engine", tmp_path)
    assert before == engine_result()
    slow = loop_part(loop_s=9.0)
    again = ENGINE._replace(parts={**ENGINE.parts, "loop": lambda _: slow})
    found = measure(again, Options(), ["loop"], tmp_path)
    assert found == read_result("engine", tmp_path)
    assert found.parts == (*before.parts[:3], slow)


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts ranks five times
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    tiny = Options(scale=0, rounds=1, contenders=(THREAD, OURS_SYNC, OURS), folder=tmp_path, memory=tmp_path / "node")
    found = measure(ENGINE, tiny, None, tmp_path)
    assert found == read_result("engine", tmp_path)
    saves, restore, python, _ = (found.part(name) for name in PARTS)
    assert [each.name for each in saves.able] == [RAW, THREAD, OURS_SYNC, OURS]
    assert len(restore.samples) == 1
    assert {each.contender for each in python.samples} == {OURS, THREAD}
    assert not ENGINE.judged(found)
    assert ENGINE.render(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json", "node"]
    assert not list((tmp_path / "node").iterdir())
