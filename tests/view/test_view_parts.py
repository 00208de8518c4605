"""Sub-trees of a view, its pieces in file order, and many threads on one view."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast import Box, CorruptError, FlatRange, NotFoundError, View
from holdfast.format.container import Files
from holdfast.format.values import Undecoded
from holdfast.plan.layout import Pieces, TensorLayout
from holdfast.state.registered_types import register_value
from holdfast.view import Piece, order
from tests.support.models import build, filled, full, tensors
from tests.support.published import put
from tests.support.worlds import World, worlds
from tests.view.stored_views import Remembering, published, view_of

MIB = 1 << 20


# --- sub-trees -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> View:
    run = tmp_path_factory.mktemp("job") / "run"
    holdfast.save(run, filled("plain", 2).state, 20)
    return holdfast.open(run)


def test_tensors_whose_names_match_come_together_in_numpy_and_in_torch(job: View) -> None:
    expected = {name: full(2, name, tensor) for name, tensor, _ in tensors(build("plain")) if name.startswith("model/")}
    arrays, found = job.numpy("model/*"), job.torch("model/*")
    assert list(arrays) == list(found) == sorted(expected)
    for name, truth in expected.items():
        assert arrays[name].tobytes() == found[name].numpy().tobytes() == truth.tobytes()
    assert list(job.numpy()) == job.names()
    assert list(job.numpy("model")) == list(arrays)
    assert list(job.numpy(["model/head.*", "!**.bias"])) == ["model/head.weight"]
    assert list(job.torch("model/blocks.*.up.bias")) == ["model/blocks.0.up.bias", "model/blocks.1.up.bias"]


def test_a_pattern_that_nothing_matches_is_an_error(job: View) -> None:
    for ask in (job.numpy, job.torch, job.in_file_order):
        with pytest.raises(NotFoundError, match=r"matches 'model/head\.wieght'.*Did you mean .*model/head\.weight"):
            ask("model/head.wieght")


def test_a_tied_tensor_is_one_under_all_of_its_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    holdfast.save(tmp_path / "run", {"a": weight, "b": {"tied": weight}, "c": torch.ones(1)}, 1)
    for verify in (True, False):
        view = holdfast.open(tmp_path / "run", verify=verify)
        assert list(view.numpy("b/*")) == ["b/tied"]
        arrays, found, tree = view.numpy(), view.torch(), view.tree()
        assert isinstance(tree, dict)
        assert list(arrays) == ["a", "c", "b/tied"]
        assert arrays["a"] is arrays["b/tied"]
        assert found["a"] is found["b/tied"]
        assert tree["a"] is tree["b"]["tied"]


def test_each_file_is_read_once_for_all_tensors_that_match() -> None:
    world = two_files()
    storage = Remembering(published(world))
    view = view_of(storage)
    for name, array in view.numpy().items():
        assert array.tobytes() == world.full[name].tobytes()
    reads = sorted(storage.data_reads(view))
    assert len({read.key for read in reads}) == 2
    assert all(a.stop <= b.start for a, b in pairwise(reads) if a.key == b.key)


def test_a_tree_of_values_and_tensors_has_the_containers_that_were_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "progress": {"epoch": 3, 7: (1, [None, torch.arange(3)]), "order": OrderedDict(z=1, a=torch.ones(2))},
        "other": torch.zeros(2),
        "empty": {"dict": {}, "list": []},
    }
    holdfast.save(tmp_path / "run", state, 1)
    view = holdfast.open(tmp_path / "run")
    tree: Any = view.tree()
    assert tree.keys() == state.keys()
    assert tree["empty"] == state["empty"]
    assert tree["progress"]["epoch"] == 3
    assert list(tree["progress"]) == list(state["progress"])
    assert type(tree["progress"][7]) is tuple
    assert tree["progress"][7][1][0] is None
    assert torch.equal(tree["progress"][7][1][1], torch.arange(3))
    assert type(tree["progress"]["order"]) is OrderedDict
    assert list(tree["progress"]["order"]) == ["z", "a"]
    assert view.tree("progress/epoch") == 3
    arrays: Any = view.tree("progress", numpy=True)
    assert isinstance(arrays[7][1][1], np.ndarray)
    assert arrays["order"]["a"].tolist() == [1.0, 1.0]
    found = view.tree("other", numpy=True)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0.0, 0.0]


def test_values_of_torch_are_values_of_torch_again(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    values = {"dtype": torch.bfloat16, "device": torch.device("cuda", 1), "size": torch.Size([2, 3])}
    holdfast.save(tmp_path / "run", {"values": values | {"generator": generator}}, 1)
    view = holdfast.open(tmp_path / "run")
    for found in (view.tree("values"), view.value("values")):
        assert isinstance(found, dict)
        assert {name: found[name] for name in values} == values
        assert found["generator"].text == "cpu"
        assert found["generator"].data == generator.get_state().numpy().tobytes()
    plain = view.tree("values", numpy=True)
    assert isinstance(plain, dict)
    assert plain["dtype"].text == "bfloat16"


def test_modules_and_optimizers_are_trees_of_the_parts_of_their_names(job: View) -> None:
    live = filled("plain", 2)
    model: Any = job.tree("model")
    assert model.keys() == live.model.state_dict().keys()
    assert all(torch.equal(bits(model[name]), bits(tensor)) for name, tensor in live.model.state_dict().items())
    again = build("plain").model
    again.load_state_dict(model)
    optimizer: Any = job.tree("optimizer", numpy=True)
    assert optimizer.keys() == {"class", "state", "param_groups", "group_of"}
    assert optimizer["class"] == "AdamW"
    assert optimizer["state"]["model"]["head.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    slot = job["optimizer/state/model/head.bias/exp_avg"].numpy()
    assert optimizer["state"]["model"]["head.bias"]["exp_avg"].tobytes() == slot.tobytes()
    assert optimizer["param_groups"]["0"] == job.value("optimizer/param_groups/0")
    slots: Any = job.tree("optimizer/state/model/head.bias", numpy=True)
    assert slots["exp_avg"].tobytes() == slot.tobytes()
    everything: Any = job.tree(numpy=True)
    assert everything.keys() == {"model", "optimizer", "progress", "scheduler"}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_a_module_in_a_list_is_a_tree_in_a_list(tmp_path: Path) -> None:
    layers = [nn.Linear(2, 3), nn.Linear(3, 1)]
    holdfast.save(tmp_path / "run", {"stages": list(layers)}, 1)
    tree: Any = holdfast.open(tmp_path / "run").tree("stages")
    assert isinstance(tree, list)
    assert torch.equal(tree[1]["weight"], layers[1].weight)


class Stage:
    """A type of the user's own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


register_value(
    Stage, lambda stage: {"weight": stage.weight}, lambda stored: Stage(stored["weight"]), name="tests.stage"
)


def test_registered_types_are_decoded_in_torch_and_left_alone_in_numpy(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"phase": Stage(torch.ones(3))}, 1)
    view = holdfast.open(tmp_path / "run")
    phase = view.tree("phase")
    assert isinstance(phase, Stage)
    assert torch.equal(phase.weight, torch.ones(3))
    left = view.tree("phase", numpy=True)
    assert isinstance(left, Undecoded)
    assert left.name == "tests.stage"
    assert isinstance(left.value, dict)
    assert isinstance(left.value["weight"], np.ndarray)


@pytest.mark.parametrize("name", ["modell", "model/head", "model/head.weight/x", "/"])
def test_a_tree_that_is_not_there_is_said(job: View, name: str) -> None:
    with pytest.raises(NotFoundError, match="at or below"):
        job.tree(name)


def test_a_tree_of_ten_thousand_tensors_has_all_of_them(tmp_path: Path) -> None:
    state = {"model": {str(layer): {f"w{i}": torch.zeros(1) for i in range(10)} for layer in range(1000)}}
    holdfast.save(tmp_path / "run", state, 1)
    tree: Any = holdfast.open(tmp_path / "run").tree(numpy=True)
    assert tree.keys() == state.keys()
    assert tree["model"].keys() == state["model"].keys()


# --- file order ------------------------------------------------------------------------------------------------------


def two_files() -> World:
    """Two ranks that hold halves of a float32 table of 24 MiB, and flat ranges of a bfloat16 one of 6 MiB."""
    rng = np.random.default_rng(0)
    halves = [Box((0, 0), (1000, 1536)), Box((1000, 0), (3096, 1536))]
    cuts = [FlatRange(0, 1_000_001), FlatRange(1_000_001, 3 * MIB)]
    layouts = [
        [
            TensorLayout("flat", "bfloat16", (3, MIB), Pieces.ranges(cut)),
            TensorLayout("table", "float32", (4096, 1536), Pieces.boxes(half)),
        ]
        for half, cut in zip(halves, cuts, strict=True)
    ]
    return World(
        layouts,
        {
            "flat": rng.integers(0, 256, (3, MIB, 2), np.uint8),
            "table": rng.integers(0, 256, (4096, 1536, 4), np.uint8),
        },
    )


def assembled(world: World, pieces: Iterator[Piece]) -> dict[str, bytes]:
    """All tensors put together from pieces, of which each element must come once."""
    found = {name: np.zeros_like(content) for name, content in world.full.items()}
    times = {name: np.zeros(content.shape[:-1], np.int64) for name, content in world.full.items()}
    for name, part, array in pieces:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if isinstance(part, FlatRange):
            found[name].reshape(-1, found[name].shape[-1])[part.start : part.stop].reshape(-1)[:] = raw
            times[name].reshape(-1)[part.start : part.stop] += 1
        else:
            assert array.shape == part.size
            found[name][part.slices()] = raw.reshape(*part.size, -1)
            times[name][part.slices()] += 1
    assert all((counts == 1).all() for counts in times.values())
    return {name: content.tobytes() for name, content in found.items()}


@given(world=worlds(), verify=st.booleans(), largest=st.sampled_from([16, 48, 64 * MIB]))
def test_pieces_in_file_order_make_up_every_tensor_of_any_layout(world: World, verify: bool, largest: int) -> None:
    assume(world.full)
    view = view_of(published(world), verify=verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "MAX_PIECE_NBYTES", largest)
        found = assembled(world, view.in_file_order())
    assert found == {name: content.tobytes() for name, content in world.full.items()}


@pytest.mark.parametrize("verify", [True, False])
def test_files_are_read_one_by_one_from_front_to_back_each_byte_once(verify: bool) -> None:
    world = two_files()
    storage = Remembering(published(world))
    view = view_of(storage, verify=verify)
    assert assembled(world, view.in_file_order()) == {name: data.tobytes() for name, data in world.full.items()}
    reads = storage.data_reads(view)
    assert reads == sorted(reads)
    assert all(a.stop == b.start for a, b in pairwise(reads) if a.key == b.key)
    columns = Files(view._checkpoint.manifest).columns(np.arange(2))
    values = sum(block.capacity for block in view._checkpoint.manifest.body.values)
    assert int(columns.data_nbytes.sum()) - values <= sum(read.stop - read.start for read in reads)
    assert sum(read.stop - read.start for read in reads) <= int(columns.data_nbytes.sum())
    assert storage.num_open == 0


def test_pieces_are_those_that_were_stored_with_their_dtypes() -> None:
    pieces = list(view_of(published(two_files())).in_file_order())
    assert [(name, part) for name, part, _ in pieces] == [
        ("table", Box((0, 0), (1000, 1536))),
        ("flat", FlatRange(0, 1_000_001)),
        ("table", Box((1000, 0), (3096, 1536))),
        ("flat", FlatRange(1_000_001, 3 * MIB)),
    ]
    assert [piece.array.dtype for piece in pieces] == [np.float32, np.dtype(ml_dtypes.bfloat16)] * 2
    assert all(piece.array.flags.writeable for piece in pieces)


def test_only_files_and_windows_with_tensors_that_match_are_read() -> None:
    storage = Remembering(published(two_files()))
    view = view_of(storage)
    assert {piece.name for piece in view.in_file_order("fl*")} == {"flat"}
    columns = Files(view._checkpoint.manifest).columns(np.arange(2))
    first = [int(start) for start in columns.offsets[:, Files(view._checkpoint.manifest).position[0]]]
    reads = storage.data_reads(view)
    assert min(read.start for read in reads if "00001" in read.key) == first[1] // (8 * MIB) * 8 * MIB


def test_file_order_takes_two_windows_and_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "MAX_PIECE_NBYTES", 4 * MIB)
    view = holdfast.open(put(published(two_files()).objects, tmp_path / "run"))
    tracemalloc.start()
    try:
        total = sum(piece.array.nbytes for piece in view.in_file_order())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 30 * MIB
    assert peak < 2 * 4 * MIB + MIB  # this piece and the last; windows are counted nowhere, and 16 MiB


def test_who_stops_early_leaves_no_file_open() -> None:
    storage = Remembering(published(two_files()))
    pieces = view_of(storage).in_file_order()
    next(pieces)
    assert storage.num_open == 1
    pieces.close()  # type: ignore[attr-defined]  # it is a generator
    assert storage.num_open == 0


def test_a_damaged_block_ends_file_order_with_the_names_of_its_tensors() -> None:
    storage = Remembering(published(two_files()))
    key = next(key for key in storage.objects if "data-00001" in key)
    damaged = bytearray(storage.objects[key])
    damaged[-5 * MIB] ^= 1
    storage.objects[key] = bytes(damaged)
    seen: list[Piece] = []
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors is damaged: block .*table"):
        seen.extend(view_of(storage).in_file_order())
    assert [piece.name for piece in seen] == ["table", "flat"]
    assert storage.num_open == 0


def test_pieces_of_mapped_files_are_not_read(tmp_path: Path) -> None:
    world = two_files()
    view = holdfast.open(put(published(world).objects, tmp_path / "run"), verify=False)
    pieces = list(view.in_file_order())
    assert assembled(world, iter(pieces)) == {name: data.tobytes() for name, data in world.full.items()}
    again = view.in_file_order()
    assert all(np.shares_memory(a.array, b.array) for a, b in zip(pieces, again, strict=True))
    assert not any(piece.array.flags.writeable for piece in pieces)


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
def test_sixteen_threads_read_one_view_in_all_ways_at_once(job: View, verify: bool) -> None:
    truth = {name: full(2, name, tensor) for name, tensor, _ in tensors(build("plain"))}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def hammer(seed: int) -> int:
        choose = random.Random(seed)
        for _ in range(12):
            name = choose.choice(sorted(truth))
            way = choose.randrange(5)
            if way == 0:
                assert view[name].numpy().tobytes() == truth[name].tobytes()
            elif way == 1:
                assert view[name][...].numpy().tobytes() == truth[name].tobytes()
            elif way == 2:
                assert all(array.tobytes() == truth[n].tobytes() for n, array in view.numpy("model/*").items())
            elif way == 3:
                assert view.value("progress/epoch") == 2
                assert set(view.names()) == set(truth)
            else:
                assert sum(piece.array.nbytes for piece in view.in_file_order("model/*")) == sum(
                    data.nbytes for n, data in truth.items() if n.startswith("model/")
                )
        return seed

    try:
        for _ in range(2):
            view = holdfast.open(job.path, verify=verify)  # nothing is known yet
            with ThreadPoolExecutor(16) as pool:
                assert list(pool.map(hammer, range(16))) == list(range(16))
    finally:
        sys.setswitchinterval(interval)
