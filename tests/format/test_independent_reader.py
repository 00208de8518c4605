"""Checkpoints of every kind, read bit for bit by a program that knows docs/SPEC.md and not the library."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import holdfast
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format import manifest as fmt
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import Place
from holdfast.format.values import Node, Open, PerRankNode, Plain
from holdfast.geometry import FlatRange
from holdfast.plan import replicas
from holdfast.plan.layout import Mesh, Pieces, Placed, Shard, TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from tests.state.test_registered_types import Phase, quantised
from tests.support import independent_reader
from tests.support.bound import Loader
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put, run_alone
from tests.support.ranks import run_ranks
from tests.support.worlds import IDENTITY, World, worlds

# Real checkpoints.


def real_state() -> dict[str, object]:
    """Every kind of thing that one process saves."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "tensors": {name: random_tensor(name, (2, 3)) for name in DTYPES if hasattr(torch, name)},
        "none": {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4), "large": torch.arange(700_000.0)},
        "a/b@c%": random_tensor("int64", (1,)),
        "values": [None, True, -(2**80), 1.5, float("nan"), 1j, "text \u00e9", b"\0", (1, {2: 3}), np.float32(2)],
    }


def random_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    high = 2 if dtype == "bool" else 256
    data = torch.randint(0, high, (*shape[:-1], shape[-1] * DTYPES[dtype].itemsize), dtype=torch.uint8)
    return data.view(getattr(torch, dtype))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    run = tmp_path_factory.mktemp("saved") / "run"
    state = real_state()
    holdfast.save(run, state, 12, metrics={"loss": 0.1, "bad": float("nan"), "worse": float("-inf")})
    return run, state


def live_tensors(state: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as section 8 gives them, put together by hand."""
    model, optimizer = state["model"], state["optimizer"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for name, tensor in model.state_dict().items():
        yield f"model/{name}", tensor
    for name, parameter in model.named_parameters():
        for slot, tensor in optimizer.state[parameter].items():
            yield f"optimizer/state/model/{name}/{slot}", tensor
    for group in ("tensors", "none"):
        tensors = state[group]
        assert isinstance(tensors, dict)
        yield from ((f"{group}/{name}", tensor) for name, tensor in tensors.items())
    last = state["a/b@c%"]
    assert isinstance(last, torch.Tensor)
    yield "a%2Fb%40c%25", last


def test_a_program_without_the_library_reads_every_bit(saved: tuple[Path, dict[str, object]]) -> None:
    run, state = saved
    done = run_alone(run)
    assert done.returncode == 0, done.stderr
    expected = {
        name: [
            xxhash.xxh3_128_hexdigest(tensor_bytes(tensor)),
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
        ]
        for name, tensor in live_tensors(state)
    }
    report = json.loads(done.stdout)
    assert report["tensors"] == expected
    assert report["step"] == 12
    assert report["values"]["values/7"] == "['bytes', b'\\x00']"


def test_values_are_the_nodes_that_the_library_reads(saved: tuple[Path, dict[str, object]]) -> None:
    run, _ = saved
    values = independent_reader.read(run).values
    nodes = Checkpoint(resolve(parse(run)).sealed).nodes
    assert {path: msgspec.msgpack.encode(node) for path, node in values.items()} == {
        path: msgspec.msgpack.encode(node) for path, node in nodes.items()
    }
    assert values["values"] == ["list", "list", 10]
    assert values["values/0"] == ["plain", None]
    assert values["values/2"] == ["int", (-(2**80)).to_bytes(11, "little", signed=True)]
    assert values["values/8/1"] == ["dict", "dict", ["%int=2"]]
    assert values["values/8/1/%int=2"] == ["plain", 3]
    assert values["optimizer/group_of/model%2F0.bias"] == ["plain", 0]
    assert values["scheduler"][0] == "stateful"


def test_a_checkpoint_folder_alone_is_read_too(saved: tuple[Path, dict[str, object]]) -> None:
    run, _ = saved
    (folder,) = (run / "checkpoints").iterdir()
    alone, found = independent_reader.read(folder), independent_reader.read(run)
    assert alone.tensors.keys() == found.tensors.keys()
    for name, (dtype, data) in found.tensors.items():
        assert alone.tensors[name][0] == dtype
        assert alone.tensors[name][1].tobytes() == data.tobytes()


def test_still_files_of_earlier_checkpoints_are_read_and_verified(tmp_path: Path) -> None:
    run, table = tmp_path / "run", torch.arange(200_000)
    state = {"table": holdfast.Still(table), "w": torch.zeros(3)}
    for step in (1, 2):
        state["w"] = torch.full((3,), float(step))
        holdfast.save(run, state, step)
    for path in (run, *run.glob("checkpoints/*2-*")):
        found = independent_reader.read(path)
        assert found.tensors["table"][1].tobytes() == table.numpy().tobytes()
    holdfast.compact(run)
    assert independent_reader.read(run).tensors["table"][1].tobytes() == table.numpy().tobytes()


def test_the_stock_safetensors_reader_opens_data_files(saved: tuple[Path, dict[str, object]]) -> None:
    run, state = saved
    (path,) = run.glob("checkpoints/*/*.safetensors")
    seen = set()
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        for name, tensor in live_tensors(state):
            dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")]
            if name in names:
                seen.add(name)
                stored = file.get_tensor(name)
                assert tensor_bytes(stored) == tensor_bytes(tensor)
                assert (stored.dtype, stored.shape) == (tensor.dtype, tensor.shape) or not dtype.native
            else:
                assert not tensor.numel()
    assert names == {"@values", *seen}


def test_a_tensor_may_have_the_name_that_safetensors_reserves(tmp_path: Path) -> None:
    state = {"__metadata__": torch.arange(3), "model": {"__metadata__": torch.ones(())}}
    holdfast.save(tmp_path / "run", state, 0)
    read = independent_reader.read(tmp_path / "run").tensors
    assert read["__metadata__"][1].tobytes() == np.arange(3, dtype="<i8").tobytes()
    (path,) = tmp_path.glob("run/checkpoints/*/*.safetensors")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"__metadata__@0:3", "model/__metadata__", "@values"}


def save_every_kind_of_node(run: Path) -> dict[str, bytes]:
    """Save on this rank; return the library's nodes, read back."""
    rank = torch.distributed.get_rank()
    own = {"seen": (rank, Phase.DECAY), "noise": torch.full((2,), float(rank)), "quantised": quantised(rank)}
    state: dict[str, object] = {
        "own": holdfast.PerRank(own),
        "loader": holdfast.PerRank(Loader({"cursor": 10 * rank})),
        "phase": Phase.WARMUP,
        "quantised": quantised(7),
        "stateful": [Loader(Phase.WARMUP), Loader(quantised(8))],
        "keys": {"both": torch.ones(1), f"only on {rank}": rank},
    }
    holdfast.save(run, state, 3)
    nodes = Checkpoint(resolve(parse(run)).sealed).nodes
    return {path: msgspec.msgpack.encode(node) for path, node in nodes.items()}


def test_what_belongs_to_single_ranks_or_to_registered_types_is_read_from_all_files(tmp_path: Path) -> None:
    nodes, same = run_ranks(2, save_every_kind_of_node, tmp_path / "run")
    assert nodes == same
    _, _, tensors, values = independent_reader.read(tmp_path / "run")
    assert {path: msgspec.msgpack.encode(node) for path, node in values.items()} == nodes
    assert values["own"] == values["loader"] == ["per_rank", 2]
    assert values["keys"] == ["dict", "dict", ["both", "only on 0", "only on 1"]]
    assert values["phase"] == ["encoded", "tests.phase", ["str", b"warmup"]]
    assert values["stateful/0"] == ["stateful", values["phase"]]
    assert values["stateful/1"] == ["stateful", values["quantised"]]
    assert values["quantised"] == ["planes", "tests.int8", ["data", "scale"]]
    assert tensors["quantised/%plane=data"][1].tobytes() == tensor_bytes(quantised(7).data8)
    for rank in range(2):
        part = f"own/%rank={rank}"
        assert values[f"loader/%rank={rank}"] == ["stateful", ["dict", "dict", ["cursor"]]]
        assert values[f"{part}/seen/0"] == ["plain", rank]
        assert values[f"{part}/seen/1"] == ["encoded", "tests.phase", ["str", b"decay"]]
        assert tensors[f"{part}/noise"][1].tobytes() == tensor_bytes(torch.full((2,), float(rank)))
        assert tensors[f"{part}/quantised/%plane=scale"][1].tobytes() == tensor_bytes(quantised(rank).scale)
    assert json.loads(run_alone(tmp_path / "run").stdout)["values"]["own"] == "['per_rank', 2]"


@pytest.mark.parametrize(
    "node",
    [
        ["unknown", 1],
        ["tensor"],
        ["planes", "x", ["data", "b/c"]],
        ["per_rank", 0],
        ["per_rank", 1 << 21],
        ["stateful", ["per_rank", 1]],
        ["encoded", "x", ["open", "dict"]],
        ["encoded", "x", ["encoded", "y", ["plain", 1]]],
        ["stateful", ["encoded", "x", ["list", "list", 1]]],
    ],
    ids=repr,
)
def test_impossible_nodes_are_refused(node: list[object]) -> None:
    table = msgspec.msgpack.encode([("a", node)])
    with pytest.raises(independent_reader.DamagedError, match="'a'"):
        independent_reader.parse_values(len(table).to_bytes(8, "little") + table, ["a"], {"a/%plane=data"})


def small_run() -> dict[str, bytes]:
    """A run of two ranks with little in it, so that every part of every file is likely to be hit."""
    halves = Placed(Mesh((2,), (1, 0)), (Shard(1),))
    layouts = [TensorLayout("w", "float32", (30, 40), halves), TensorLayout("z", "complex64", (), Whole("split"))]
    rng = np.random.default_rng(5)
    full = {"w": rng.integers(0, 256, (30, 40, 4), np.uint8), "z": rng.integers(0, 256, (8,), np.uint8)}
    nodes: dict[str, Node] = {"": Open("dict"), "n": PerRankNode(2), "n/%rank=0": Plain(2**40), "n/%rank=1": Plain(1)}
    storage = begin(RUN_ID, *EPOCHS[:1])
    identity = CheckpointIdentity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {"loss": 0.25})
    publish(storage, plan([layouts, layouts], nodes, identity, ["z"]), full, nodes)
    return storage.objects


def test_every_flipped_bit_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = small_run()
    run = put(files, tmp_path / "run")
    assert independent_reader.main([str(run)]) == 0
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    for key, data in files.items():
        structure = [*range(64), *range(len(data) - 64, len(data))]
        for _ in range(40):
            bit = 8 * rng.choice([rng.choice(structure), rng.randrange(len(data))]) + rng.randrange(8)
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            (run / key).write_bytes(damaged)
            assert independent_reader.main([str(run)]) == 1, f"bit {bit} of {key} (seed {seed})"
        (run / key).write_bytes(data)
    assert independent_reader.main([str(run)]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("change", ["lost", "cut", "longer"])
def test_files_that_are_lost_or_cut_are_noticed(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = small_run()
    run = put(files, tmp_path / "run")
    for key, data in files.items():
        if change == "lost":
            (run / key).unlink()
        else:
            (run / key).write_bytes(data[:-1] if change == "cut" else data + b" ")
        assert independent_reader.main([str(run)]) == 1, key
        assert capsys.readouterr().err, key
        (run / key).write_bytes(data)


def test_damage_ends_the_program_with_status_1_and_a_message(tmp_path: Path) -> None:
    files = small_run()
    key = next(key for key in files if key.endswith("data-00001.safetensors"))
    run = put(files | {key: files[key][:-1] + b"\xff"}, tmp_path / "run")
    done = run_alone(run)
    assert done.returncode == 1
    assert "data-00001.safetensors: the block at 0 is damaged" in done.stderr
    assert not done.stdout


# Simulated worlds.


def check_world(world: World, root: Path) -> DecodedManifest:
    """Write a world's checkpoint, read it with the other reader, and compare every bit."""
    world_size = len(world.layouts)
    nodes: dict[str, Node] = {"": Open("dict"), "a": Plain(None), "own": PerRankNode(world_size)}
    nodes |= {f"own/%rank={rank}": Plain(rank) for rank in range(world_size)}
    planned = plan(world.layouts, nodes, IDENTITY)
    storage = begin(IDENTITY.run_id, EPOCHS[0])
    publish(storage, planned, world.full, nodes)
    loaded = independent_reader.read(put(storage.objects, root))
    assert {name: data.tobytes() for name, (_, data) in loaded.tensors.items()} == {
        name: full.tobytes() for name, full in world.full.items()
    }
    own = {f"own/%rank={rank}": ["plain", rank] for rank in range(world_size)}
    assert loaded.values == {"": ["open", "dict"], "a": ["plain", None], "own": ["per_rank", world_size], **own}
    return fmt.decode(planned, path="manifest")


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(worlds())
def test_any_world_is_read_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, world: World) -> None:
    check_world(world, tmp_path_factory.mktemp("world"))


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(worlds(), st.integers(1, 200))
def test_any_split_of_replicas_is_read_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, world: World, share: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SHARE_NBYTES", share)
        check_world(world, tmp_path_factory.mktemp("world"))


def test_irregular_cuts_go_through_byte_planes(tmp_path: Path) -> None:
    world_size, numel = 300, 1_000_000
    rng = np.random.default_rng(11)
    cuts = [0, *sorted(rng.choice(np.arange(1, numel), world_size - 1, replace=False).tolist()), numel]
    parts = [FlatRange(start, stop) for start, stop in pairwise(cuts)]
    layouts = [[TensorLayout("flat", "uint16", (1000, 1000), Pieces.ranges(part))] for part in parts]
    world = World(layouts, {"flat": rng.integers(0, 256, (1000, 1000, 2), np.uint8)})
    manifest = check_world(world, tmp_path)
    assert {type(sequence).__name__ for sequence in manifest.body.sequences} == {"Affine", "DifferencePlanes"}


def test_files_of_several_blocks_are_verified_block_by_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    for nbytes in (BLOCK_NBYTES - 4096, BLOCK_NBYTES - 4095, 3 * BLOCK_NBYTES + 1):
        world = World(
            [[TensorLayout("w", "uint8", (nbytes,), Whole("compare"))]],
            {"w": rng.integers(0, 256, (nbytes, 1), np.uint8)},
        )
        check_world(world, tmp_path / str(nbytes))
