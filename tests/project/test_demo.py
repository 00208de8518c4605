"""The demo's own parts do what its story relies on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from demo.processes import (
    DemoError,
    Look,
    Training,
    keepers,
    look,
    node_memory,
    stopped,
)
from demo.promises import (
    LOSS_TOLERANCE,
    close_losses,
    each_sample_once,
    kept_the_newest,
    newest_from_memory,
    read_once,
    same_losses,
    same_state,
    saved_together,
)
from demo.runs import FileToCome, data_nbytes, file_to_come, store_of
from demo.show import draw
from demo.train import GPT, batch, learning_rate_factor, loss_of, standard_library
from demo.witness import Witness, notes, tensor_digests, value_digests
from holdfast.format.records import Place
from holdfast.keeper.client import ensure_keeper
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
TINY = {"context": 8, "num_layers": 1, "num_heads": 2, "width": 8}
DIGESTS = {"model/a": "1", "optimizer/a/step": "2", "values of schedule": "3"}
PROMISE = "what is promised"


@pytest.fixture(scope="module")
def text() -> Tensor:
    return standard_library()


def test_the_text_is_python_and_the_same_each_time(text: Tensor) -> None:
    assert text.numel() > 1_000_000
    assert bytes(text.tolist()).count(b"def ") > 1000
    assert torch.equal(text, standard_library())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_ranks_of_any_world_together_have_the_same_batch(text: Tensor, world_size: int) -> None:
    parts = [batch(text, 3, rank=rank, world_size=world_size, size=8) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), batch(text, 3, rank=0, world_size=1, size=8))


def test_every_step_has_a_batch_of_its_own(text: Tensor) -> None:
    assert not torch.equal(batch(text, 1, rank=0, world_size=1), batch(text, 2, rank=0, world_size=1))


def test_a_batch_that_cannot_be_divided_evenly_is_refused(text: Tensor) -> None:
    with pytest.raises(ValueError, match=r"8 samples .* 3 ranks"):
        batch(text, 1, rank=0, world_size=3, size=8)


def test_embedding_and_head_are_one_parameter_with_two_names() -> None:
    model = GPT(**TINY)
    assert model.head.weight is model.token_embedding.weight
    assert {"head.weight", "token_embedding.weight"} <= model.state_dict().keys()


def test_the_model_of_the_demo_has_between_one_and_three_million_parameters() -> None:
    assert 1_000_000 < sum(parameter.numel() for parameter in GPT().parameters()) < 3_000_000


def test_a_byte_is_predicted_from_those_before_it_only() -> None:
    model = GPT(**TINY)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 99
    assert torch.equal(model(tokens)[0, :5], model(changed)[0, :5])
    assert not torch.equal(model(tokens)[0, 5:], model(changed)[0, 5:])


def test_the_learning_rate_warms_up_and_then_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, 60) for step in range(61)]
    assert factors[:6] == sorted(factors[:6])
    assert max(factors) == 1.0
    assert factors[6:] == sorted(factors[6:], reverse=True)
    assert factors[60] == pytest.approx(0.1)


def trained(num_steps: int, text: Tensor) -> tuple[GPT, torch.optim.AdamW, LRScheduler, list[float]]:
    torch.manual_seed(5)
    model = GPT(**TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, 20))
    losses = []
    for step in range(1, num_steps + 1):
        loss = loss_of(model, batch(text, step, rank=0, world_size=1, size=8, context=TINY["context"]))
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not say
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return model, optimizer, schedule, losses


def test_training_repeats_itself_bit_by_bit_and_learns(text: Tensor) -> None:
    *_, first = trained(20, text)
    *_, second = trained(20, text)
    assert first == second
    assert first[-1] < first[0]


def test_digests_tell_one_bit_of_any_tensor_or_value(text: Tensor) -> None:
    model, optimizer, schedule, _ = trained(2, text)
    before = tensor_digests(model, optimizer) | value_digests(optimizer, schedule)
    last = model.norm.weight
    with torch.no_grad():
        optimizer.state[last]["exp_avg"].view(torch.int32)[0] ^= 1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    after = tensor_digests(model, optimizer) | value_digests(optimizer, schedule)
    assert {name for name, _ in before.items() ^ after.items()} == {
        "optimizer/norm.weight/exp_avg",
        "values of optimizer group 0",
    }


def digests_of_a_model(*, sharded: bool) -> dict[str, str]:
    torch.manual_seed(5)
    model = GPT(**TINY)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return tensor_digests(model, torch.optim.AdamW(model.parameters()))


def sharded_digests() -> dict[str, str]:
    return digests_of_a_model(sharded=True)


def test_digests_of_sharded_tensors_are_those_of_the_whole() -> None:
    assert run_ranks(2, sharded_digests) == [digests_of_a_model(sharded=False)] * 2


def test_a_witness_notes_losses_and_states_that_read_back_with_every_bit(tmp_path: Path, text: Tensor) -> None:
    model, optimizer, schedule, losses = trained(2, text)
    for rank in (1, 0):
        witness = Witness(tmp_path, rank=rank)
        for step, loss in enumerate(losses, start=1):
            witness.note("loss", step=step, value=loss)
        witness.state("saved", 2, model, optimizer, schedule)
    training = Training(tmp_path, 2, 6)
    assert [loss.hex() for loss in training.losses().values()] == [loss.hex() for loss in losses]
    first, second = training.each("saved", step=2)
    assert first == second
    assert first["digests"] == tensor_digests(model, optimizer) | value_digests(optimizer, schedule)
    assert [note["pid"] for note in training.each("started")] == [os.getpid()] * 2


def test_what_a_rank_has_not_noted_is_an_error_that_names_the_logs(tmp_path: Path) -> None:
    Witness(tmp_path, rank=0)
    with pytest.raises(DemoError, match="noted nothing about 'started', see the logs"):
        Training(tmp_path, 2, 6).each("started")


def test_a_note_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    assert notes(tmp_path, "loss") == []
    (tmp_path / "rank-0.jsonl").write_text('{"kind":"loss","step":1,"value":2.5}\n{"kind":"loss","step":2,"val')
    assert [note["value"] for note in notes(tmp_path, "loss")] == [2.5]
    assert notes(tmp_path, "loss", step=2) == notes(tmp_path, "saved") == []


def test_the_same_state_on_every_rank_keeps_the_promise() -> None:
    assert same_state(PROMISE, noted(DIGESTS, DIGESTS), noted(*[DIGESTS] * 4)).kept


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ([DIGESTS], []),
        ([DIGESTS], [DIGESTS, DIGESTS | {"optimizer/a/step": "9"}]),
        ([DIGESTS], [DIGESTS | {"values of schedule": "9"}]),
        ([DIGESTS], [{name: digest for name, digest in DIGESTS.items() if name != "optimizer/a/step"}]),
        ([DIGESTS, {}], [DIGESTS]),
    ],
    ids=["nothing loaded", "one tensor on one rank", "a value", "a missing tensor", "ranks that saved differ"],
)
def test_any_difference_of_states_breaks_the_promise(saved: list[dict[str, str]], loaded: list[dict[str, str]]) -> None:
    assert not same_state(PROMISE, noted(*saved), noted(*loaded)).kept


def noted(*digests: dict[str, str]) -> list[dict[str, object]]:
    return [{"digests": each} for each in digests]


def test_losses_are_the_same_only_when_all_their_bits_are() -> None:
    reference = {1: 0.1, 2: 0.2}
    assert same_losses(PROMISE, reference, {2: 0.2}, range(2, 3)).kept
    assert not same_losses(PROMISE, reference, {2: 0.2 + 2**-55}, range(2, 3)).kept
    assert not same_losses(PROMISE, reference, {2: 0.2}, range(1, 3)).kept
    assert not same_losses(PROMISE, reference, reference, range(3, 3)).kept


def test_losses_are_close_only_within_the_tolerance_and_when_all_are_there() -> None:
    reference = {1: 3.0, 2: 3.0}
    assert close_losses(PROMISE, reference, {1: 3.0, 2: 3.0 + LOSS_TOLERANCE / 2}, range(1, 3)).kept
    assert not close_losses(PROMISE, reference, {1: 3.0, 2: 3.0 + LOSS_TOLERANCE * 2}, range(1, 3)).kept
    assert not close_losses(PROMISE, reference, {1: 3.0, 2: float("nan")}, range(1, 3)).kept
    assert not close_losses(PROMISE, reference, {1: 3.0}, range(1, 3)).kept
    assert not close_losses(PROMISE, reference, {}, range(1, 1)).kept


def test_bytes_read_twice_break_the_promise_that_they_are_read_once() -> None:
    def read(*nbytes: int) -> list[dict[str, object]]:
        return [{"nbytes": each} for each in nbytes]

    assert read_once(PROMISE, read(600, 400, 0), 1000).kept
    assert not read_once(PROMISE, read(600, 401), 1000).kept
    assert not read_once(PROMISE, read(0, 0), 1000).kept


def test_only_the_newest_step_in_memory_ahead_of_storage_on_all_ranks_keeps_the_promise() -> None:
    restored: dict[str, object] = {"step": 10, "tier": "node memory"}
    assert newest_from_memory(PROMISE, [restored] * 2, whole=10, head=8).kept
    assert not newest_from_memory(PROMISE, [restored] * 2, whole=12, head=8).kept
    assert not newest_from_memory(PROMISE, [restored] * 2, whole=10, head=10).kept
    elsewhere = restored | {"tier": "storage"}
    assert not newest_from_memory(PROMISE, [restored, elsewhere], whole=10, head=8).kept


def saved(*of_ranks: list[int], exit_codes: tuple[int, ...] = (75, 75)) -> bool:
    return saved_together(PROMISE, of_ranks, exit_codes, signalled=8, every=6).kept


def test_only_one_step_of_all_ranks_after_the_signal_and_exits_with_75_keep_the_promise() -> None:
    assert saved([6, 11], [6, 11])
    assert saved([6, 9], [6, 9])
    assert not saved([6, 11], [6, 12])
    assert not saved([6], [6])
    assert not saved([11], [11])
    assert not saved([], [])
    assert not saved([6, 11], [6, 11], exit_codes=(75, 0))


@pytest.mark.parametrize(
    ("jobs", "kept"),
    [
        ([{0: [2, 0], 1: [1, 3]}, {2: [3, 2]}], True),
        ([{0: [2, 0], 1: [1, 3]}, {2: [3, 3]}], False),
        ([{0: [2, 0], 1: [1, 2]}, {2: [3, 3]}], False),
        ([{0: [2, 0], 1: [1, 3]}, {1: [3, 2]}], False),
        ([{0: [2, 0], 1: [1, 3]}, {}], False),
        ([{0: [2, 0], 1: [1, 3]}, {2: [3]}], False),
    ],
    ids=[
        "each once",
        "twice in one step",
        "twice in an epoch",
        "a step twice",
        "a step is missing",
        "a sample is missing",
    ],
)
def test_a_sample_that_is_lost_or_doubled_breaks_the_promise(jobs: list[dict[int, list[int]]], kept: bool) -> None:
    assert each_sample_once(PROMISE, jobs, num_samples=4, num_steps=3, batch_size=2).kept == kept


def test_other_checkpoints_than_the_newest_break_the_promise() -> None:
    assert kept_the_newest(PROMISE, [9, 6], [3, 6, 9], number=2).kept
    assert not kept_the_newest(PROMISE, [9, 6, 3], [3, 6, 9], number=2).kept
    assert not kept_the_newest(PROMISE, [9, 3], [3, 6, 9], number=2).kept
    assert not kept_the_newest(PROMISE, [9, 6], [6, 9], number=2).kept


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process that keeps writing, and its file."""
    file = tmp_path / "ticks"
    script = "import sys,time\nf=open(sys.argv[1],'w')\nwhile True: f.write('.'); f.flush(); time.sleep(0.001)"
    with subprocess.Popen([sys.executable, "-c", script, str(file)]) as process:
        try:
            wait_for(lambda: file.exists() and file.stat().st_size > 0)
            yield process, file
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_stopped_process_does_nothing_and_goes_on_afterwards(ticking: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, file = ticking
    with stopped(process.pid):
        size = file.stat().st_size
        time.sleep(0.05)
        assert file.stat().st_size == size
    wait_for(lambda: file.stat().st_size > size)


def test_processes_that_were_stopped_go_on_where_one_of_them_is_no_more(
    ticking: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, file = ticking
    with subprocess.Popen(["true"]) as other:
        other.wait()
    with pytest.raises(ProcessLookupError), stopped(process.pid, other.pid):
        raise AssertionError
    size = file.stat().st_size
    wait_for(lambda: file.stat().st_size > size)


def test_a_process_killed_while_it_was_stopped_is_gone(ticking: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, _ = ticking
    with stopped(process.pid):
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_file_is_to_come_from_the_manifest_of_the_newest_checkpoint_on_until_readers_can_see_it(
    tmp_path: Path,
) -> None:
    storage = store_of(str(tmp_path))
    older, newest = (f"checkpoints/step-{step:010d}-{'a' * 16}" for step in (4, 8))
    assert file_to_come(storage, rank=1) is None
    storage.create(f"{older}/manifest.hfm", b"")
    storage.create(f"{newest}/data-00000.safetensors", b"12")
    assert file_to_come(storage, rank=1) is None
    storage.create(f"{newest}/manifest.hfm", b"")
    assert file_to_come(storage, rank=0) is None
    assert file_to_come(storage, rank=1) == FileToCome(8, newest, "data-00001.safetensors")
    storage.create(f"{newest}/data-00001.safetensors", b"345")
    assert file_to_come(storage, rank=1) is None
    assert data_nbytes(str(tmp_path), 8) == 5


def filled(slot: Slot, step: int, rank: int, state: SlotState) -> None:
    """Have a slot hold that step, in that state."""
    contents = Contents("run", f"checkpoint-{step}", Place(1, step), step, rank, 0, 1)
    assert slot.take()
    for each in (SlotState.WRITING, SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED):
        if each <= state:
            slot.advance(SlotRecord(each, contents))


def test_a_look_at_memory_tells_what_is_copied_sealed_and_in_storage_on_all_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with node_memory() as node_dir, NodeFolder(str(run), node_dir=node_dir) as folder:
        job = Training(tmp_path, 2, 6, save_to=str(run), node_dir=node_dir)
        assert look(job) == Look(is_copying=False, copied=-1, sealed=-1, committed=-1)
        slots = [[Slot.create(folder, rank=rank, nbytes=1) for _ in range(4)] for rank in range(2)]
        for rank, (first, second, third, fourth) in enumerate(slots):
            filled(first, 2, rank, SlotState.COMMITTED)
            filled(second, 4, rank, SlotState.SEALED)
            filled(third, 6, rank, SlotState.STAGED)
            filled(fourth, 8, rank, (SlotState.STAGED, SlotState.WRITING)[rank])
        assert look(job) == Look(is_copying=True, copied=6, sealed=4, committed=2)
        for slot in (slot for of_rank in slots for slot in of_rank):
            slot.close()


def fail_while_memory_is_kept(run: str, seen: list[Path]) -> None:
    with node_memory() as node_dir:
        with NodeFolder(run, node_dir=node_dir) as folder:
            ensure_keeper(folder, run)
        assert len(keepers(node_dir)) == 1
        seen.append(node_dir)
        raise DemoError("stop here")


def test_keepers_end_and_memory_is_given_back_also_after_an_error(tmp_path: Path) -> None:
    seen: list[Path] = []
    with pytest.raises(DemoError, match="stop here"):
        fail_while_memory_is_kept(str(tmp_path / "run"), seen)
    (node_dir,) = seen
    assert keepers(node_dir) == []
    assert not node_dir.exists()


def test_the_error_and_exit_status_of_a_rank_are_found_in_what_torchrun_printed(tmp_path: Path) -> None:
    training = Training(tmp_path, world_size=2, steps=6, nodes=2)
    training.log(0).write_text("noise\nrank 0: DeadlineError: rank 1 is missing.\n")
    training.log(1).write_text("  rank      : 1 (local_rank: 0)\n  exitcode  : -9 (pid: 77)  (SIGKILL)\n")
    assert training.error_of_rank(0) == "DeadlineError: rank 1 is missing."
    assert training.error_of_rank(1) == ""
    assert training.exit_status_of_rank(1, 77) == -9
    with pytest.raises(DemoError, match="rank 1"):
        training.exit_status_of_rank(1, 78)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    losses = {step: 6.0 / step for step in range(1, 13)}
    rest = {step: loss for step, loss in losses.items() if step > 6}
    resumed = {2: rest, 4: {step: loss + 1e-7 for step, loss in rest.items()}}
    draw(losses, losses, resumed, killed=8, head=6, path=tmp_path / "losses.png")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_that_fails_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    training = Training(tmp_path / "broken", world_size=3, steps=6)
    with pytest.raises(DemoError, match="cannot be divided evenly among 3 ranks"):
        training.finish("A training that fails")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [(), ("--s3",)], ids=["on a disk", "on an S3 server"])
def test_the_whole_demo_keeps_its_promises(tmp_path: Path, options: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "demo", "--steps", "12", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 21 promises were kept" in done.stdout
    assert "BROKEN" not in done.stdout
    assert (tmp_path / "demo-out" / "losses.png").exists()
    assert (tmp_path / "demo-out" / "report.html").exists()
