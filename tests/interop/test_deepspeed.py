"""Folders that DeepSpeed wrote are read without it, on any layout, to the bits that its live engine held.

The fixtures were written by the real package (`write_deepspeed`), each with the values of the engine beside it.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from holdfast.interop.deepspeed_states import optim_states
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.torch_globals import PickledTensor, StorageRef
from holdfast.mapping import Drop, Rename, Rule
from tests.interop.changed_bytes import SOUND, changed_bytes, outcome
from tests.interop.deepspeed_model import GROUPS, TiedNet, grouped
from tests.support.ranks import run_ranks

FIXTURES = Path(__file__).parent / "fixtures"
CASES = sorted(path.name.removesuffix(".tar.xz") for path in FIXTURES.glob("*.tar.xz"))
TRAINED = [name for group in GROUPS for name in group]
SLOTS = ("exp_avg", "exp_avg_sq")


def unpacked(case: str, target: Path) -> Path:
    """The folder of a fixture: what ``save_checkpoint`` was given, with ``latest`` and the folder of the tag."""
    with tarfile.open(FIXTURES / f"{case}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / case


def expected(folder: Path) -> dict[str, torch.Tensor]:
    """The values of the live engine, by the names that holdfast gives them."""
    places = {"master": "model/{}", "kept": "model/{}", "module": "module/{}"}
    engine: dict[str, torch.Tensor] = torch.load(folder / "expected.pt", weights_only=True)
    found = {}
    for key, tensor in engine.items():
        name, kind = key.rsplit("/", 1)
        found[places.get(kind, f"optimizer/state/model/{{}}/{kind}").format(name)] = tensor
    return found


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor's dtype, shape and bytes."""
    flat = tensor.detach().contiguous().reshape(-1)
    return str(tensor.dtype), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def scheduled(model: nn.Module) -> tuple[torch.optim.AdamW, LambdaLR]:
    """A fresh optimizer, with the scheduler that the engine had: it adds a hyper-parameter to the groups."""
    optimizer = torch.optim.AdamW(grouped(model), lr=1.0)
    return optimizer, LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(GROUPS))


def blank() -> tuple[TiedNet, torch.optim.AdamW]:
    """A model that has none of the saved values, and its fresh optimizer."""
    model = TiedNet()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().fill_(-1)
    return model, scheduled(model)[0]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of a live model and its optimizer, whole, by their names in a checkpoint."""
    found = {f"model/{name}": tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, parameter in model.named_parameters():
        for slot, tensor in optimizer.state[parameter].items() if parameter.requires_grad else ():
            found[f"optimizer/state/model/{name}/{slot}"] = tensor
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


def compare(found: dict[str, torch.Tensor], folder: Path) -> None:
    """Compare live tensors with those of the engine, and the counts of steps with the four that it did."""
    wanted = {name: tensor for name, tensor in expected(folder).items() if not name.startswith("module/")}
    wanted["model/frozen.weight"] = wanted["model/frozen.weight"].float()  # it has no master weights
    wanted |= {f"optimizer/state/model/{name}/step": torch.tensor(4.0) for name in TRAINED}
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in wanted.items()
    }


def load_into(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> holdfast.LoadReport:
    """Load a model and its optimizer; frozen weights are stored in the precision of the module."""
    live = {"model": model, "optimizer": optimizer}
    return holdfast.load(folder, live, select=["model", "optimizer"], cast="model/frozen.weight", **options)


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_the_live_engine_held(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    folder = unpacked(case, tmp_path)
    view, wanted = holdfast.open(folder), expected(folder)
    assert not caplog.messages
    steps = [f"optimizer/state/model/{name}/step" for name in TRAINED]
    if "own-adam" in case:  # it counts in a number
        assert [view.value(name) for name in steps] == [4] * len(steps)
    else:
        wanted |= dict.fromkeys(steps, torch.tensor(4.0))
    assert sorted(view.names()) == sorted([*wanted, "client_state/rng"])
    for name, tensor in wanted.items():
        assert bits(view[name][...]) == bits(tensor), name
    assert ("module/up.weight" in view.names()) == ("zero3" not in case)
    assert "a DeepSpeed checkpoint" in repr(view)


def test_deepspeeds_own_optimizer_without_a_known_decay_needs_a_load_that_is_not_strict(tmp_path: Path) -> None:
    folder = unpacked("zero2-own-adam-on-2", tmp_path)
    repacked(one(folder, "mp_rank*"), lambda data: data.replace(b"AdamW", b"AdamX"))
    model, optimizer = blank()
    with pytest.raises(holdfast.IncompatibleError, match="decoupled_weight_decay"):
        load_into(folder, model, optimizer)
    assert load_into(folder, model, optimizer, strict=False).missing == tuple(
        f"optimizer/param_groups/{index}/decoupled_weight_decay" for index in range(3)
    )
    compare(held(model, optimizer), folder)


@pytest.mark.parametrize("case", CASES)
def test_a_model_and_its_optimizer_get_the_master_weights_and_go_on(tmp_path: Path, case: str) -> None:
    folder = unpacked(case, tmp_path)
    model, optimizer = blank()
    is_elastic = "elastic" in case  # such a checkpoint has no hyper-parameters
    report = load_into(folder, model, optimizer, strict=not is_elastic)
    compare(held(model, optimizer), folder)
    assert (report.step, report.next_step, report.verified) == (-1, 0, False)
    assert model.head.weight is model.embed.weight
    if not is_elastic:
        assert [group["lr"] for group in optimizer.param_groups] == [0.01 / 5, 0.02 / 5, 0.03 / 5]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.0]
        assert optimizer.param_groups[2]["betas"] == (0.8, 0.9)
    model(torch.arange(3)[None]).square().mean().backward()
    optimizer.step()
    assert optimizer.state[model.gain]["step"] == 5


def load_rows(folder: str) -> int:
    """Load onto rows of FSDP2, and compare what the ranks hold together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, _ = blank()
    fully_shard(model, mesh=mesh)
    optimizer, _ = scheduled(model)
    report = load_into(Path(folder), model, optimizer, timeout_s=40)
    compare(held(model, optimizer), Path(folder))
    return len(report.resharded)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("zero1-on-3", 2),
        ("zero3-on-3", 2),
        ("zero3-on-2", 3),
        ("zero2-round-robin-on-3", 1),
        ("bf16-optimizer-on-2", 3),
    ],
)
def test_flat_parts_become_rows_of_another_number_of_ranks(tmp_path: Path, case: str, ranks: int) -> None:
    folder = unpacked(case, tmp_path)
    assert min(run_ranks(ranks, load_rows, str(folder))) > 0


def load_copies(folder: str) -> bool:
    """Load whole copies on every rank."""
    model, optimizer = blank()
    load_into(Path(folder), model, optimizer, timeout_s=40)
    compare(held(model, optimizer), Path(folder))
    return True


@pytest.mark.parametrize(("case", "ranks"), [("zero2-on-2", 3), ("zero1-aligned-on-3", 2)])
def test_copies_on_every_rank_are_read_by_all_of_them(tmp_path: Path, case: str, ranks: int) -> None:
    assert run_ranks(ranks, load_copies, str(unpacked(case, tmp_path))) == [True] * ranks


def test_a_model_of_low_precision_gets_the_engines_own_weights_either_way(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    wanted = {name: tensor for name, tensor in expected(folder).items() if name.startswith("module/")}
    cast, exact = TiedNet().bfloat16(), TiedNet().bfloat16()
    holdfast.load(folder, {"model": cast}, select="model", cast=True)
    rules: list[Rule] = [Drop(f"model/{name}") for name in (*TRAINED, "head.weight")]
    rules.append(Rename("module/{x:**}", "model/{x}"))
    holdfast.load(folder, {"model": exact}, select="model", mapping=rules, cast="model/shift")
    for name in TRAINED:
        for model in (cast, exact):
            assert bits(model.get_parameter(name)) == bits(wanted[f"module/{name}"])


def test_values_are_those_of_the_engine_and_of_the_client(tmp_path: Path) -> None:
    folder = unpacked("zero2-round-robin-on-3", tmp_path)
    view = holdfast.open(folder)
    engine: Any = view.value("engine")
    assert (engine["global_steps"], engine["skipped_steps"], engine["ds_version"]) == (4, 0, "0.19.8")
    assert engine["ds_config"]["zero_optimization"]["round_robin_gradients"] is True
    scaler: Any = view.value("scaling/loss_scaler")
    assert (scaler["cur_scale"], scaler["scale_window"], scaler["dtype"]) == (32.0, 3, torch.float16)
    assert view.value("client_state/nested") == {"seen": [1, 2.5, None], "pair": (True, b"x")}
    live: dict[str, Any] = {"client_state": {"epoch": 0, "name": "", "rng": torch.zeros(5, dtype=torch.uint8)}}
    holdfast.load(folder, live, select=["client_state/epoch", "client_state/name", "client_state/rng"])
    assert (live["client_state"]["epoch"], live["client_state"]["name"]) == (3, "a/b")
    assert live["client_state"]["rng"].tolist() == [0, 1, 2, 3, 4]


def test_a_live_scheduler_goes_on_from_the_saved_one(tmp_path: Path) -> None:
    model, _ = blank()
    optimizer, scheduler = scheduled(model)
    live = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    holdfast.load(unpacked("zero1-fp32-on-2", tmp_path), live, select=["model", "optimizer", "lr_scheduler"])
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [rate * (1 / 6) for rate in (0.01, 0.02, 0.03)]


def test_an_object_of_the_client_is_refused_by_name_and_the_rest_is_read(tmp_path: Path) -> None:
    view = holdfast.open(unpacked("zero1-on-3", tmp_path))
    with pytest.raises(holdfast.IncompatibleError, match=r"client_state/args.*argparse\.Namespace"):
        view.value("client_state/args")
    assert view.value("client_state/epoch") == 3


def test_the_folder_of_a_tag_can_be_named_itself(tmp_path: Path) -> None:
    folder = unpacked("zero3-on-2", tmp_path)
    (folder / "latest").unlink()
    view = holdfast.open(folder / "global_step4")
    assert bits(view["model/gain"][...]) == bits(expected(folder)["model/gain"])


def test_file_names_of_older_versions_are_known(tmp_path: Path) -> None:
    folder = unpacked("zero3-on-2", tmp_path)
    for file in (folder / "global_step4").glob("*_optim_states.pt"):
        file.rename(file.with_name(file.name.replace("_optim_states.pt", "optim_states.pt")))
    model, optimizer = blank()
    assert load_into(folder, model, optimizer).missing == ()
    compare(held(model, optimizer), folder)


def test_a_weight_that_was_tied_can_be_loaded_by_its_second_name(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    live = {"model": {"head.weight": torch.zeros(11, 5)}, "module": {"head.weight": torch.zeros(11, 5).bfloat16()}}
    holdfast.load(folder, live, select=["model/head.weight", "module/head.weight"])
    for root, part in live.items():
        assert bits(part["head.weight"]) == bits(expected(folder)[f"{root}/embed.weight"])


def test_a_folder_of_a_trainer_is_read_as_one_of_hugging_face_and_its_tag_as_one_of_deepspeed(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    save_file({"gain": torch.zeros(1)}, folder / "model.safetensors")
    assert holdfast.open(folder).names() == ["gain"]
    assert "model/gain" in holdfast.open(folder / "global_step4").names()


# --- bad input ---


def refused(folder: Path) -> holdfast.HoldfastError:
    """The error of a load, which must leave the live state as it was."""
    model, optimizer = blank()
    with pytest.raises((holdfast.CorruptError, holdfast.IncompatibleError)) as caught:
        load_into(folder, model, optimizer)
    assert caught.value.code in ("corrupt.foreign", "incompatible.foreign")
    assert all((tensor == -1).all() for tensor in (*model.parameters(), *model.buffers()))
    assert not optimizer.state
    return caught.value


def one(folder: Path, pattern: str) -> Path:
    """The only file of a folder's tag that a pattern matches."""
    (found,) = (folder / "global_step4").glob(pattern)
    return found


def test_missing_files_of_ranks_are_named_with_what_is_left(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    one(folder, "*rank_1_*").unlink()
    error = refused(folder)
    assert "lacks 1 file of 4" in str(error)
    assert error.details[0] == "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt is missing"
    assert "mp_rank_00_model_states.pt has all weights, in the precision of the module" in error.details
    for file in (folder / "global_step4").glob("*optim*"):
        file.unlink()
    assert "lacks 3 files of 4" in str(refused(folder))
    folder = unpacked("zero3-on-2", tmp_path)
    one(folder, "zero_pp_rank_0_*model*").unlink()
    error = refused(folder)
    assert error.details[:1] == ("zero_pp_rank_0_mp_rank_00_model_states.pt is missing",)
    assert "no tensor is whole" in error.details[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [("global_step8", "no files of a DeepSpeed"), ("../x", "names no folder"), ("", "names no folder")],
)
def test_a_latest_that_names_nothing_says_so_and_what_there_is(tmp_path: Path, text: str, said: str) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    (folder / "latest").write_text(text)
    error = refused(folder)
    assert said in str(error)
    assert text == "global_step8" or "global_step4" not in str(error)


def test_files_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    folder, other = unpacked("zero1-on-3", tmp_path), unpacked("zero1-fp32-on-2", tmp_path)
    shutil.copy(one(other, "*rank_1_*"), one(folder, "*rank_1_*"))
    assert "mixes files of several saves: rank 1" in str(refused(folder))
    folder = unpacked("zero3-on-3", tmp_path)
    for file in unpacked("zero3-on-2", tmp_path).glob("global_step4/*"):
        shutil.copy(file, folder / "global_step4")
    error = refused(folder)
    assert "is of 2 ranks, but has 2 files of further ranks" in str(error)


@pytest.mark.parametrize(
    ("case", "steps", "weights", "said"),
    [
        ("zero2-on-2", 6, True, "refused"),  # as a kill leaves it: the model file is written first
        ("zero2-on-2", 2, True, "refused"),
        ("zero2-on-2", 4, True, "warned"),  # the client may have changed the module
        ("zero2-on-2", 6, False, ""),  # the optimizer began anew in step 3
        ("zero3-on-2", 6, False, "warned"),
    ],
)
def test_the_model_file_of_a_save_that_was_killed_was_read_beside_an_older_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str, steps: int, weights: bool, said: str
) -> None:
    folder = unpacked(case, tmp_path)
    for file in (folder / "global_step4").glob("*model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["global_steps"] = steps
        if weights:
            content["module"] = {name: (tensor * 1.1).to(tensor.dtype) for name, tensor in content["module"].items()}
        torch.save(content, file)
    if said == "refused":
        error = str(refused(folder))
        assert "mixes files of several saves" in error
        assert "zero_pp_rank_0_mp_rank_00_optim_states.pt has other weights for" in error
        assert f"the engine has done {steps} steps and its optimizer 4" in error
    else:
        model, optimizer = blank()
        load_into(folder, model, optimizer)
        warnings = [text for text in caplog.messages if text.endswith("as in a folder that mixes files of two saves")]
        assert len(warnings) == (said == "warned")


def test_a_group_may_have_any_number_of_parameters_and_thus_of_paddings() -> None:
    outer: dict[str, Any] = {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [PickledTensor(StorageRef("float32", "0"), "float32", 0, (8,), (1,))],
        "base_optimizer_state": {"state": {}, "param_groups": [{"params": [0]}]},
        "partition_count": [4],
        "param_alignment_paddings": [[0] * 1000],
    }
    assert optim_states({"optimizer_state_dict": outer}).paddings == [[0] * 1000]
    for wrong in (-1, "1", None):
        outer["param_alignment_paddings"] = [[0, wrong]]
        with pytest.raises(PickleError, match="a padding is no count"):
            optim_states({"optimizer_state_dict": outer})


def test_files_that_changed_their_names_are_refused(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    first, second = one(folder, "*rank_0_*"), one(folder, "*rank_1_*")
    first.rename(tmp_path / "file")
    second.rename(first)
    (tmp_path / "file").rename(second)
    assert "it was renamed" in str(refused(folder))


@pytest.mark.parametrize("kind", ["optim", "model"])
@pytest.mark.parametrize("way", ["copied", "exchanged"])
def test_the_file_of_one_rank_of_zero_3_was_read_as_that_of_another(tmp_path: Path, kind: str, way: str) -> None:
    """The files of ranks have equal sizes, and no rank in them: weights and moments had the wrong elements."""
    folder = unpacked("zero3-on-3", tmp_path)
    first, second = (one(folder, f"*zero_pp_rank_{rank}_*_{kind}_states.pt") for rank in (0, 2))
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    if way == "exchanged":
        second.write_bytes(data[0])
    error = refused(folder)
    assert f"{first} was saved as {second.name}, which is there, too: it was renamed, or copied over" in str(error)
    assert error.path == str(first)


def test_two_sets_of_files_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    file = one(folder, "*rank_1_*")
    shutil.copy(file, file.with_name(file.name.removeprefix("bf16_")))
    assert "two files of rank 1" in str(refused(folder))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_01_model_states.pt", "2 model-parallel ranks"),
        ("layer_00-model_00-model_states.pt", "by a pipeline or by an old DeepSpeed"),
        ("expert_1_mp_rank_00_model_states.pt", "by a pipeline or by an old DeepSpeed"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "of experts without ZeRO, and others of ZeRO"),
    ],
)
def test_pipelines_experts_and_model_parallel_ranks_are_said_not_to_be_read(
    tmp_path: Path, name: str, said: str
) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    (folder / "global_step4" / name).write_bytes(b"")
    error = refused(folder)
    assert said in str(error)
    assert isinstance(error, holdfast.IncompatibleError)


def repacked(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle in a file, and leave everything else."""
    with zipfile.ZipFile(file) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


class Attack:
    """An object whose pickle would run a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.target),)


def test_a_pickle_that_attacks_is_refused_by_name_and_runs_nothing(tmp_path: Path) -> None:
    folder, ran = unpacked("zero1-on-3", tmp_path), tmp_path / "ran"
    repacked(one(folder, "mp_rank*"), lambda _: pickle.dumps({"module": Attack(ran), "param_shapes": []}, 2))
    assert "'posix.mkdir', which is not data" in str(refused(folder))
    assert not ran.exists()


def test_a_flat_group_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = unpacked("zero3-on-2", tmp_path)
    for file in (folder / "global_step4").glob("*model*"):
        repacked(file, lambda data: data.replace(b"K\x0bK\x05\x86", b"K\x0cK\x05\x86"))
    assert "does not fit the model file" in str(refused(folder))


def test_a_rank_at_another_step_is_refused(tmp_path: Path) -> None:
    folder = unpacked("zero2-round-robin-on-3", tmp_path)
    file = one(folder, "*rank_2_*")
    four, five = (torch.tensor(step).numpy().tobytes() for step in (4.0, 5.0))
    file.write_bytes(file.read_bytes().replace(four, five))
    assert "rank 2 has another step than rank 0" in str(refused(folder))


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    folder = unpacked("zero1-on-3", tmp_path)
    file = one(folder, "*rank_2_*")
    file.write_bytes(file.read_bytes()[:-100])
    assert "is no file of torch.save" in str(refused(folder))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(data=st.data())
def test_changed_bytes_raise_no_error_but_ours(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = unpacked("zero3-on-2", tmp_path_factory.mktemp("changed"))
    with changed_bytes(data.draw(st.sampled_from(sorted((folder / "global_step4").iterdir()))), data):
        assert outcome(folder) in SOUND
    shutil.rmtree(folder)
