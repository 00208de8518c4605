"""`holdfast.open`: names, values and any slice of any tensor, without a process group and without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast import CorruptError, NotFoundError, View
from holdfast.format.records import Place
from holdfast.format.values import Node, Open, PerRankNode, Plain, PlanesNode, Stateful, TensorRef
from holdfast.plan.layout import TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity
from tests.support.command_line import holdfast_command
from tests.support.models import build, filled, full, tensors
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put
from tests.support.ranks import run_ranks

SHAPE = (7, 4, 5)


def grid(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(7 * 4 * 5).reshape(SHAPE).to(dtype)


def save_sharded(run: str) -> None:
    """Three ranks save a tensor that is cut along its last axis, one that is cut along its first, and a plain one."""
    mesh = init_device_mesh("cpu", (3,))
    state = {
        "last": distribute_tensor(grid(), mesh, [Shard(2)], src_data_rank=None),
        "first": distribute_tensor(grid(torch.int16), mesh, [Shard(0)], src_data_rank=None),
        "plain": grid(torch.bfloat16),
        "note": "sharded",
    }
    holdfast.save(run, state, 5, timeout_s=30)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> View:
    run = tmp_path_factory.mktemp("sharded") / "run"
    run_ranks(3, save_sharded, str(run))
    return holdfast.open(run)


@pytest.fixture(scope="module")
def job_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("job") / "run"
    for seed in (1, 2):
        holdfast.save(run, filled("plain", seed).state, 10 * seed)
    return run


def test_a_loop_over_it_is_one_over_its_names_and_a_number_is_no_name(sharded: View) -> None:
    assert list(sharded) == sharded.names()
    with pytest.raises(TypeError, match="index a view by the name of a tensor, not by 0"):
        sharded[0]  # type: ignore[index]


def test_it_needs_no_process_group(sharded: View) -> None:
    assert not dist.is_initialized()
    assert sharded.step == 5
    assert sharded.names() == ["first", "last", "plain"]


def test_names_are_those_of_the_tensors_sorted(job_run: Path) -> None:
    view = holdfast.open(job_run)
    expected = sorted(name for name, _, _ in tensors(build("plain")))
    assert view.names() == expected
    assert all(name in view for name in expected)
    assert "model/nothing" not in view
    assert 3 not in view


def test_tensors_know_their_shape_dtype_and_size_before_anything_is_read(job_run: Path) -> None:
    view = holdfast.open(job_run)
    for name, tensor, _ in tensors(build("plain")):
        lazy = view[name]
        assert (lazy.name, lazy.shape, lazy.nbytes) == (name, tuple(tensor.shape), tensor.nbytes)
        assert getattr(torch, lazy.dtype) is tensor.dtype
    assert repr(view["model/scale"]) == "LazyTensor('model/scale', dtype=float32, shape=[2])"


def test_whole_tensors_come_back_bit_for_bit(job_run: Path) -> None:
    view = holdfast.open(job_run)
    for name, tensor, _ in tensors(build("plain")):
        expected = full(2, name, tensor)
        found = view[name][...]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.reshape(-1).view(torch.uint8).numpy().tobytes() == expected.tobytes()
        array = view[name].numpy()
        assert (array.shape, array.tobytes()) == (tuple(tensor.shape), expected.tobytes())


starts = st.one_of(st.none(), st.integers(-9, 9))
steps = st.one_of(st.none(), st.integers(-3, 3).filter(bool))


@st.composite
def indexes(draw: st.DrawFn) -> tuple[Any, ...]:
    """The indexes that numpy accepts for a tensor of shape `SHAPE`: integers, slices and one ellipsis."""
    count = draw(st.integers(0, 3))
    items: list[Any] = []
    for extent in SHAPE[:count]:
        whole = st.integers(-extent, extent - 1)
        items.append(draw(st.one_of(whole, st.builds(slice, starts, starts, steps))))
    if draw(st.booleans()):
        at = draw(st.integers(0, count))
        tail: list[Any] = (
            [
                draw(st.one_of(st.integers(-extent, extent - 1), st.builds(slice, starts, starts, steps)))
                for extent in SHAPE[len(SHAPE) - (count - at) :]
            ]
            if count > at
            else []
        )
        items[at:] = [Ellipsis, *tail]
    return tuple(items)


@given(index=indexes(), name=st.sampled_from(["first", "last"]))
def test_any_slice_is_what_numpy_gives(sharded: View, index: tuple[Any, ...], name: str) -> None:
    expected = grid().numpy()[index]
    found = sharded[name][index]
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("index", [2, -1, slice(1, 3), Ellipsis, (..., 0), (slice(None, None, -2), 1), (), np.int64(3)])
def test_an_index_needs_no_tuple(sharded: View, index: Any) -> None:
    expected = grid().numpy()[index]
    found = sharded["last"][index]
    assert tuple(found.shape) == expected.shape
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("index", [7, -8, (0, 4), (0, 0, 0, 0), (..., ...)])
def test_an_index_that_fits_no_axis_is_refused(sharded: View, index: Any) -> None:
    with pytest.raises(IndexError):
        sharded["last"][index]


@pytest.mark.parametrize("index", ["name", 1.5, None, [0, 1], True, torch.tensor([True, False])])
def test_an_index_of_another_kind_is_refused(sharded: View, index: Any) -> None:
    with pytest.raises(TypeError, match=r"index a stored tensor by integers, slices and \.\.\., not by an? "):
        sharded["last"][index]


NUMPY_DTYPES: list[tuple[str, npt.DTypeLike]] = [
    ("bool", np.bool_),
    ("uint16", np.uint16),
    ("int64", np.int64),
    ("float16", np.float16),
    ("float64", np.float64),
    ("complex64", np.complex64),
    ("complex128", np.complex128),
    ("bfloat16", ml_dtypes.bfloat16),
    ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    ("float8_e5m2", ml_dtypes.float8_e5m2),
]


@pytest.mark.parametrize(("name", "kind"), NUMPY_DTYPES, ids=[name for name, _ in NUMPY_DTYPES])
def test_numpy_arrays_have_the_dtype_and_the_values(tmp_path: Path, name: str, kind: npt.DTypeLike) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.0], [0.5, 1.0, 96.0]]).abs().to(getattr(torch, name))
    holdfast.save(tmp_path / "run", {"matrix": tensor, "scalar": tensor[1, 2].clone()}, 1)
    view = holdfast.open(tmp_path / "run")
    matrix, scalar = view["matrix"].numpy(), view["scalar"].numpy()
    assert matrix.dtype == scalar.dtype == np.dtype(kind)
    assert matrix.astype(np.complex128).tolist() == tensor.to(torch.complex128).tolist()
    assert scalar.shape == ()
    assert complex(scalar) == tensor[1, 2].item()
    assert view["matrix"][:, 1:].tolist() == tensor[:, 1:].tolist()


def test_values_come_back_alone_and_in_their_containers(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "progress": {"epoch": 3, "losses": [0.5, 0.25], "best": (1, "a"), 7: {"x": None}},
        "note": "hello",
        "mixed": {"tensor": torch.arange(3), "number": 2},
    }
    holdfast.save(tmp_path / "run", state, 1)
    view = holdfast.open(tmp_path / "run")
    assert view.value("note") == "hello"
    assert view.value("progress/epoch") == 3
    assert view.value("progress") == state["progress"]
    mixed = view.value("mixed")
    assert isinstance(mixed, dict)
    assert mixed["number"] == 2
    assert mixed["tensor"][1:].tolist() == [1, 2]


def test_value_names_are_those_of_all_values(job_run: Path) -> None:
    names = holdfast.open(job_run).value_names()
    assert names == sorted(names)
    assert {"progress/epoch", "progress/seen/1/2", "scheduler/last_epoch", "optimizer/param_groups/0/lr"} <= set(names)
    assert not set(names) & set(holdfast.open(job_run).names())


class Counting:
    """Its whole state is one number."""

    def state_dict(self) -> int:
        return 5

    def load_state_dict(self, state: int) -> None:
        raise AssertionError("nothing is loaded here")


def test_an_object_whose_state_is_one_value_is_a_value(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"sampler": Counting()}, 1)
    view = holdfast.open(tmp_path / "run")
    assert view.value_names() == ["sampler"]
    assert view.value("sampler") == 5


def test_a_value_that_is_not_there_is_said(job_run: Path) -> None:
    with pytest.raises(NotFoundError, match="progress/epok") as raised:
        holdfast.open(job_run).value("progress/epok")
    assert raised.value.code == "not_found.value"


def test_a_tensor_that_is_asked_for_as_a_value_is_called_one(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": torch.nn.Linear(2, 1)}, 1)
    with pytest.raises(NotFoundError, match=r"is a tensor.*view\['model/weight'\]") as raised:
        holdfast.open(tmp_path / "run").value("model/weight")
    assert raised.value.code == "not_found.value"


def test_aliases_read_the_tensor_they_stand_for(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    holdfast.save(tmp_path / "run", {"a": weight, "b": [weight]}, 1)
    view = holdfast.open(tmp_path / "run")
    assert view.names() == ["a"]
    assert dict(view.aliases) == {"b/0": "a"}
    assert "b/0" in view
    assert torch.equal(view["b/0"][1], weight[1])


def test_a_misspelt_name_is_told_its_neighbours(job_run: Path) -> None:
    with pytest.raises(NotFoundError, match=r"Did you mean .*model/head\.weight") as raised:
        holdfast.open(job_run)["model/head.wieght"]
    assert raised.value.tensor == "model/head.wieght"
    with pytest.raises(NotFoundError, match=r"view\.names\(\)"):
        holdfast.open(job_run)["qqqqqqqq"]


@pytest.mark.parametrize(("selector", "seed"), [("", 2), ("@step=10", 1), ("@1.1", 1), ("@1.2", 2)])
def test_a_run_opens_at_its_head_a_step_or_a_place(job_run: Path, selector: str, seed: int) -> None:
    view = holdfast.open(f"{job_run}{selector}")
    assert (view.step, view.place, view.in_history) == (10 * seed, f"1.{seed}", True)
    assert view.value("progress/epoch") == seed
    assert Path(view.path).parent == job_run / "checkpoints"


def test_a_folder_opens_outside_any_history(job_run: Path) -> None:
    inside = holdfast.open(f"{job_run}@step=10")
    outside = holdfast.open(inside.path)
    assert (outside.step, outside.place, outside.path) == (10, "1.1", inside.path)
    assert not outside.in_history
    assert outside["model/scale"].numpy().tobytes() == inside["model/scale"].numpy().tobytes()


@pytest.mark.parametrize("selector", ["@step=11", "@9.1", "@1.3"])
def test_what_a_run_does_not_have_is_said_with_what_it_has(job_run: Path, selector: str) -> None:
    with pytest.raises(NotFoundError, match="Choose one of its") as raised:
        holdfast.open(f"{job_run}{selector}")
    assert raised.value.code == "not_found.commit"


def test_reading_changes_nothing_in_the_run(job_run: Path) -> None:
    def listing() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in job_run.rglob("*"))

    before = listing()
    view = holdfast.open(job_run)
    view["model/scale"].numpy()
    view.value("progress")
    assert listing() == before


def test_a_view_stays_on_its_checkpoint_while_the_head_moves(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"a": torch.zeros(3)}, 1)
    view = holdfast.open(tmp_path / "run")
    holdfast.save(tmp_path / "run", {"a": torch.ones(3)}, 2)
    assert view["a"][...].tolist() == [0.0, 0.0, 0.0]
    assert holdfast.open(tmp_path / "run")["a"][...].tolist() == [1.0, 1.0, 1.0]


def test_several_threads_read_one_view(job_run: Path) -> None:
    view = holdfast.open(job_run)
    live = [(name, tensor) for name, tensor, _ in tensors(build("plain"))] * 4
    with ThreadPoolExecutor(4) as pool:
        arrays = list(pool.map(lambda item: view[item[0]].numpy(), live))
        values = list(pool.map(lambda _: view.value("progress/epoch"), range(8)))
    assert all(array.tobytes() == full(2, *item).tobytes() for item, array in zip(live, arrays, strict=True))
    assert values == [2] * 8


def test_a_damaged_byte_is_found_when_it_is_read_and_not_before(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"a": torch.zeros(1 << 19), "b": torch.zeros(1 << 19)}, 1)
    view = holdfast.open(tmp_path / "run")
    with (Path(view.path) / "data-00000.safetensors").open("r+b") as file:
        file.seek(4096 + (1 << 21) + 4 * 1000)
        file.write(b"\1")
    assert view["a"][...].count_nonzero() == 0
    assert view["b"][1 << 18 :].count_nonzero() == 0
    with pytest.raises(CorruptError, match=r"it holds b\b"):
        view["b"][:10]
    unverified = holdfast.open(tmp_path / "run", verify=False)
    assert unverified["b"][1000].item() != 0


@pytest.mark.parametrize(
    "node", [TensorRef(), Stateful(TensorRef()), PlanesNode("scaled", ("data", "scale"))], ids=repr
)
def test_values_that_refer_to_a_tensor_that_is_not_there_are_corrupt(tmp_path: Path, node: Node) -> None:
    nodes = {"": Open("dict"), "lost": node, "step": Plain(3)}
    storage = begin(RUN_ID, EPOCHS[0])
    layouts = [TensorLayout(name, "uint8", (1,), Whole("compare")) for name in ("kept", "lost/%plane=data")]
    content = {layout.name: np.zeros((1, 1), np.uint8) for layout in layouts}
    identity = CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {})
    publish(storage, plan([layouts], nodes, identity), content, nodes)
    view = holdfast.open(put(storage.objects, tmp_path))
    assert view["kept"].numpy().tolist() == [0]
    with pytest.raises(CorruptError, match=r"data-00000.*refer to tensor 'lost(/%plane=scale)?'"):
        view.value("step")


def test_a_missing_part_of_a_rank_is_corrupt(tmp_path: Path) -> None:
    nodes: dict[str, Node] = {"": Open("dict"), "seed": PerRankNode(2), "seed/%rank=0": Plain(10)}
    storage = begin(RUN_ID, EPOCHS[0])
    layouts = [TensorLayout("kept", "uint8", (1,), Whole("compare"))]
    identity = CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {})
    publish(storage, plan([layouts], nodes, identity), {"kept": np.zeros((1, 1), np.uint8)}, nodes)
    run = put(storage.objects, tmp_path)
    with pytest.raises(CorruptError, match=r"data-00000.*refer to 'seed/%rank=1', which no data file holds"):
        holdfast.open(run).value("seed")
    verified = holdfast_command("verify", "--deep", run)
    assert verified.status
    assert "seed/%rank=1" in verified.out + verified.err


def test_what_an_open_node_holds_may_lie_in_the_tables_of_several_files(tmp_path: Path) -> None:
    nodes: dict[str, Node] = {"": Open("dict"), "epoch": Plain(3), "step": Plain(7)}
    storage = begin(RUN_ID, EPOCHS[0])
    layouts = [[TensorLayout("kept", "uint8", (1,), Whole("compare"))]] * 2
    identity = CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {})
    planned = plan(layouts, nodes, identity, writers={"step": 1})
    publish(storage, planned, {"kept": np.zeros((1, 1), np.uint8)}, nodes)
    run = put(storage.objects, tmp_path)
    assert holdfast.open(run).value("") == {"epoch": 3, "step": 7}
    into: dict[str, object] = {"kept": torch.ones(1, dtype=torch.uint8), "epoch": 0, "step": 0}
    holdfast.load(run, into)
    assert (into["epoch"], into["step"]) == (3, 7)
    assert holdfast_command("verify", "--deep", run).status == 0


def test_data_files_are_read_by_stock_safetensors(job_run: Path) -> None:
    view = holdfast.open(job_run)
    with safe_open(Path(view.path) / "data-00000.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key != "@values"]  # noqa: SIM118 - it is no mapping
        assert sorted(keys) == view.names()
        for key in keys:
            assert file.get_tensor(key).numpy().tobytes() == view[key].numpy().tobytes()


def torch_modules_after(script: str, *arguments: str) -> list[str]:
    """The modules of torch that a new interpreter has imported after it ran `script`, which imports `sys`."""
    code = textwrap.dedent(script) + "\nprint(*(m for m in sys.modules if m.partition('.')[0] == 'torch'))\n"
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_importing_the_library_does_not_import_torch() -> None:
    assert torch_modules_after("import sys, holdfast; dir(holdfast); holdfast.HoldfastError") == []


def test_reading_to_numpy_does_not_import_torch(job_run: Path) -> None:
    script = """
        import sys, holdfast
        view = holdfast.open(sys.argv[1])
        tensors = [view[name] for name in view.names()]
        assert [tensor.numpy().nbytes for tensor in tensors] == [tensor.nbytes for tensor in tensors]
        assert view.value("progress/epoch") == 2
    """
    assert torch_modules_after(script, str(job_run)) == []


def test_the_command_line_does_not_import_torch() -> None:
    assert torch_modules_after("import sys, holdfast.cli; assert callable(holdfast.cli.main)") == []


def test_the_use_of_torch_would_be_seen() -> None:
    assert "torch" in torch_modules_after("import sys, holdfast; holdfast.save")


def test_an_unknown_name_of_the_library_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'sav'"):
        _ = holdfast.sav


def test_numpy_gets_the_elements_of_a_stored_tensor_and_no_object_array(sharded: View) -> None:
    lazy = sharded["last"]
    for array in (np.asarray(lazy), np.array(lazy, copy=True), np.zeros(SHAPE) + lazy):
        assert np.array_equal(array, grid().numpy())
    assert np.asarray(lazy, dtype=np.int64).dtype == np.int64
    assert np.asarray(sharded["plain"]).dtype == ml_dtypes.bfloat16
    mapped = holdfast.open(sharded.path, verify=False)["first"]
    copy = np.array(mapped)
    copy += 1  # not the mapped file
    assert np.array_equal(np.asarray(mapped), grid(torch.int16).numpy())


def test_what_a_stored_tensor_cannot_do_says_how_to_read_it(sharded: View) -> None:
    lazy: Any = sharded["last"]
    hint = r"view\[name\]\[\.\.\.\]"
    with pytest.raises(AttributeError, match=f"'mean'.*{hint}"):
        lazy.mean()
    for compute in (
        lambda: lazy + 1,
        lambda: 2 * lazy,
        lambda: -lazy,
        lambda: len(lazy),
        lambda: torch.as_tensor(lazy),
    ):
        with pytest.raises(TypeError, match=hint):
            compute()
    assert lazy
    assert not hasattr(lazy, "grad")


def test_a_module_that_is_asked_for_as_a_tensor_or_value_is_read_with_tree(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    holdfast.save(tmp_path / "run", {"a": {"model": model, "optimizer": optimizer}, "b": {"n": [1, 2]}}, 0)
    view = holdfast.open(tmp_path / "run")
    for name in ("a", "a/model", "a/optimizer"):
        with pytest.raises(NotFoundError, match=rf"view\.tree\('{name}'\)") as caught:
            view[name]
        assert "view.value" not in str(caught.value)
        assert view.tree(name)
    with pytest.raises(NotFoundError, match=r"view\.tree\('a/model'\)"):
        view.value("a/model")
    for name in ("b", "b/n"):
        with pytest.raises(NotFoundError, match=rf"view\.value\('{name}'\)"):
            view[name]
        assert view.value(name)
