"""Defects by which a checkpoint gave other values than were saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast import CorruptError, FlatRange, HoldfastError, IncompatibleError, Piecewise, StateError
from holdfast.io.buffers import BUFFER_NBYTES
from tests.known_defects.saved import data_file, flip_bit, folder, offset_of
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("whole", [True, False], ids=["loaded", "read-in-part"])
def test_a_flipped_bit_loads_silently(tmp_path: Path, whole: bool) -> None:
    """One bit of a stored tensor changes, and the load succeeds with the wrong value.

    Seen in: PyTorch DCP 2.13, Megatron torch_dist (a CRC is computed at save and not checked on read).
    """
    weight = torch.arange(4000, dtype=torch.int32)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    path = data_file(tmp_path / "run")
    flip_bit(path, offset_of(path, weight) + 8000)
    view = holdfast.open(tmp_path / "run")
    with pytest.raises(CorruptError) as raised:
        _ = holdfast.load(tmp_path / "run", into={"weight": weight}) if whole else view["weight"][1990:2010]
    assert raised.value.path == str(path)
    assert raised.value.tensor == "weight"


def test_a_corrupt_copy_is_restored_again_and_again(tmp_path: Path) -> None:
    """A damaged newest copy is restored, gives NaN three iterations later, and every restart takes it again.

    Seen in: Megatron-LM with NVRx local checkpoints, NVIDIA/Megatron-LM#5281.
    """
    run, weight = tmp_path / "run", torch.full((100,), 1.5)
    for step in (1, 2):
        holdfast.save(run, {"weight": weight * step}, step)
    path = data_file(run)
    flip_bit(path, offset_of(path, weight * 2))
    start_new_job()
    into = torch.zeros(100)
    with pytest.raises(CorruptError, match="fallback=True"):
        holdfast.load(run, into={"weight": into})
    report = holdfast.load(run, into={"weight": into}, fallback=True, continues=True)
    assert report.step == 1
    assert [place for place, _ in report.skipped] == ["1.2"]
    assert torch.equal(into, weight)
    holdfast.save(run, {"weight": weight * 3}, 2)
    assert torch.equal(holdfast.open(run)["weight"][:], weight * 3)


def test_files_of_two_saves_load_as_one_checkpoint(tmp_path: Path) -> None:
    """A file of another save stands among the files of a checkpoint, and the mixture loads without an error.

    Seen in: PyTorch DCP 2.13, after a crash in a save that overwrote an older one.
    """
    run = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(run, {"weight": torch.full((100,), float(step))}, step)
    older = Path(holdfast.open(f"{run}@step=1").path)
    shutil.copy(next(older.glob("*.safetensors")), data_file(run))
    with pytest.raises(CorruptError, match="the seal describes"):
        holdfast.load(run, into={"weight": torch.zeros(100)})


def test_a_missing_shard_is_filled_with_zeros(tmp_path: Path) -> None:
    """A shard file is missing, and the tensor comes out with rows of zeros.

    Seen in: PyTorch DCP 2.13 (consolidation to Hugging Face files).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(8)}, 1)
    path = data_file(tmp_path / "run")
    path.unlink()
    into = torch.full((8,), 7.0)
    with pytest.raises(HoldfastError) as raised:
        holdfast.load(tmp_path / "run", into={"weight": into})
    assert raised.value.path == str(path)
    assert into.tolist() == [7.0] * 8


def test_a_truncated_shard_is_served(tmp_path: Path) -> None:
    """The last shard is cut short, and what is left of it is served.

    Seen in: vLLM, vllm-project/vllm#53537; NVIDIA-NeMo/RL#3624 (a consolidation that timed out was published).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.ones(5000)}, 1)
    path = data_file(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(CorruptError, match="bytes instead of"):
        holdfast.load(tmp_path / "run", into={"weight": torch.zeros(5000)})


def test_a_dtype_changes_on_the_way(tmp_path: Path) -> None:
    """A target of another dtype is filled by a cast that nobody asked for: 70000.0 becomes inf in fp16.

    Seen in: PyTorch DCP 2.13.
    """
    holdfast.save(tmp_path / "run", {"weight": torch.tensor([70000.0])}, 1)
    into = torch.zeros(1, dtype=torch.float16)
    with pytest.raises(IncompatibleError, match="float16"):
        holdfast.load(tmp_path / "run", into={"weight": into})
    assert into.item() == 0


def test_moments_are_rounded_to_the_dtype_of_the_weight(tmp_path: Path) -> None:
    """The fp32 moments of a bf16 parameter lose 16 bits each when they are loaded into an optimizer.

    Seen in: PyTorch, `Optimizer.load_state_dict`.
    """
    saved, fresh = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    optimizers = [AdamW([weight], foreach=False) for weight in (saved, fresh)]
    moment = torch.tensor([1 / 3, 1e-3, 7.1])
    optimizers[0].state[saved] = {
        "step": torch.tensor(5.0),
        "exp_avg": moment.clone(),
        "exp_avg_sq": moment.square(),
    }
    holdfast.save(tmp_path / "run", {"weight": saved, "optimizer": optimizers[0]}, 1)
    holdfast.load(tmp_path / "run", into={"weight": fresh, "optimizer": optimizers[1]})
    loaded = optimizers[1].state[fresh]["exp_avg"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, moment)


def test_a_tensor_is_captured_after_it_changed(tmp_path: Path) -> None:
    """The checkpoint has values that the training loop wrote after `save` returned.

    Seen in: PyTorch DCP, pytorch/pytorch#144657; nvidia-resiliency-ext#376; Megatron-LM#2288.
    """
    weight, progress = torch.full((100,), 1.0), {"seen": [1]}
    holdfast.save(tmp_path / "run", {"weight": weight, "progress": progress}, 1)
    weight.fill_(2.0)
    progress["seen"].append(2)
    view = holdfast.open(tmp_path / "run")
    assert torch.equal(view["weight"][:], torch.full((100,), 1.0))
    assert view.value("progress") == {"seen": [1]}


def test_saving_and_loading_take_an_optimizer_step(tmp_path: Path) -> None:
    """To make optimizer state, save or load takes a step with zero gradients: weight decay changes live weights.

    Seen in: ByteCheckpoint 0.0.3 (1.0 -> 0.99), PyTorch DCP 2.13 (`_init_optim_state`).
    """
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], lr=0.1, weight_decay=0.1)
    state = {"weight": weight, "optimizer": optimizer}
    holdfast.save(tmp_path / "run", state, 0)
    assert weight.tolist() == [1.0] * 3
    assert not optimizer.state
    holdfast.load(tmp_path / "run", into=state)
    assert weight.tolist() == [1.0] * 3
    assert not optimizer.state
    assert weight.grad is None


def save_own_copy(run: str) -> str:
    """Save a tensor and a value of one name whose content differs by rank; the codes of the refusals."""
    start_new_job()
    rank = torch.distributed.get_rank()
    codes = []
    states: list[dict[str, object]] = [{"weight": torch.full((4,), float(rank))}, {"cursor": [rank] * (rank + 1)}]
    for state in states:
        with pytest.raises(StateError) as raised:
            holdfast.save(run, state, 1, timeout_s=30)
        codes.append(raised.value.code)
    return " ".join(codes)


def test_of_two_ranks_different_state_under_one_name_an_arbitrary_one_survives(tmp_path: Path) -> None:
    """Ranks hold different tensors or lists under one name; one copy is stored and the others are lost, unsaid.

    Seen in: PyTorch DCP 2.13; radixark/Megatron-LM#66 (a list per rank stored as rank 0's common state).
    """
    assert run_ranks(2, save_own_copy, str(tmp_path / "run")) == ["state.diverged state.diverged"] * 2


CHUNK = BUFFER_NBYTES


@pytest.mark.parametrize("nbytes", [1, 2**20, 2**20 + 1, 3 * 2**19, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 3 * 2**19])
def test_a_block_is_lost_where_a_tensor_ends_within_the_staging_buffer(tmp_path: Path, nbytes: int) -> None:
    """A tensor of an odd number of blocks loses one of them on its way through two half buffers.

    Seen in: TRANSOM Checkpoint Engine, SenseCore/transom-checkpoint-engine (by reading).
    """
    generator = torch.Generator().manual_seed(nbytes)
    weight = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    into = torch.zeros_like(weight)
    holdfast.load(tmp_path / "run", into={"weight": into})
    assert torch.equal(into, weight)


def test_a_tensor_larger_than_all_buffers_is_fatal(tmp_path: Path) -> None:
    """A tensor that does not fit into the staging buffer ends the process.

    Seen in: DataStates-LLM (`sys.exit(-1)` where a tensor is larger than the pool).
    """
    weight = torch.arange(5 * CHUNK // 8 + 3, dtype=torch.int64)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    into = torch.zeros_like(weight)
    holdfast.load(tmp_path / "run", into={"weight": into})
    assert torch.equal(into, weight)


def test_two_parts_of_one_tensor_in_one_file_overwrite_each_other(tmp_path: Path) -> None:
    """A rank holds two parts of a tensor; both are stored under the tensor's name, so that one replaces the other.

    Seen in: PyTorch DCP 2.13 (`SerializationFormat.SAFETENSORS`).
    """
    held = [(FlatRange(0, 5), torch.arange(0.0, 5.0)), (FlatRange(5, 12), torch.arange(5.0, 12.0))]
    holdfast.save(tmp_path / "run", {"weight": Piecewise((3, 4), held)}, 1)
    assert torch.equal(holdfast.open(tmp_path / "run")["weight"][:], torch.arange(12.0).reshape(3, 4))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int64, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_only_the_usual_dtypes_survive(tmp_path: Path, dtype: torch.dtype) -> None:
    """Integers and bools end in a TypeError, fp8 is not restored.

    Seen in: PyTorch DCP 2.13 (consolidation calls `finfo` on them), ByteCheckpoint 0.0.3 (fp8).
    """
    weight = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    into = torch.zeros(3).to(dtype)
    holdfast.load(tmp_path / "run", into={"weight": into})
    assert torch.equal(into.view(torch.uint8), weight.view(torch.uint8))


def test_a_file_that_another_job_left_in_the_folder_is_merged_in(tmp_path: Path) -> None:
    """Fragments that an earlier attempt left behind become part of the result.

    Seen in: DeepSpeed 0.19.6, `ds_to_universal` (stale files below `tmp/`).
    """
    run, weight = tmp_path / "run", torch.ones(8)
    holdfast.save(run, {"weight": weight}, 1)
    stale = data_file(run)
    shutil.copy(stale, stale.with_name("data-00007.safetensors"))
    (folder(run) / ".tmp-0123456789abcdef").write_bytes(stale.read_bytes())
    into = torch.zeros(8)
    assert holdfast.load(run, into={"weight": into}).loaded == ("weight",)
    assert torch.equal(into, weight)
