"""Checkpoints read by a program that knows docs/SPEC.md and not the library; the dumps in that document are true.

``python -m tests.test_independent_reader`` writes the dumps of docs/SPEC.md anew.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import Commit, Epoch, FileSeal, Marker, Place, Seal, SealDigest
from holdfast.format.values import Node, Open, Plain
from holdfast.geometry import FlatRange
from holdfast.plan import replicas
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Mesh, Pieces, Placed, Shard, TensorLayout, Whole
from holdfast.plan.save import Identity, RankMessage, plan_save
from holdfast.run.checkpoint import Checkpoint, pack_values
from holdfast.run.history import resolve
from holdfast.run.paths import parse
from holdfast.storage.base import Bytes
from holdfast.transfer.buffers import BufferPool
from holdfast.transfer.digest import BLOCK_NBYTES
from holdfast.transfer.writer import write_file
from tests import independent_reader
from tests.memory_storage import MemoryStorage
from tests.worlds import IDENTITY, World, data_sections, worlds

SPEC = Path(__file__).parent.parent / "docs" / "SPEC.md"
READER = Path(__file__).parent / "independent_reader.py"

# Runs a program in an interpreter that cannot import holdfast or torch, however they are installed.
ALONE = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("holdfast", "torch"):
            raise AssertionError(name + " is imported")
sys.meta_path.insert(0, Refuse())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", ALONE, str(READER), str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=60, check=False)


# Writing as ranks do, step by step.


class BytesSource:
    """Bytes to be written."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.nbytes = len(data)

    def read_into(self, start: int, out: Bytes) -> None:
        out[:] = self._data[start : start + len(out)]


def plan(layouts: Sequence[Sequence[TensorLayout]], nodes: Mapping[str, Node], identity: Identity) -> bytes:
    """The manifest of simulated ranks."""
    sent = [RankLayout.of(tensors, {}) for tensors in layouts]
    return plan_save(
        [RankMessage(layout.digest, layout.columns) for layout in sent],
        {layout.digest: layout.body for layout in sent},
        identity=identity,
        values_nbytes=len(pack_values(dict(nodes))),
        value_paths=tuple(sorted(nodes)),
    )


def publish(storage: MemoryStorage, planned: bytes, full: Mapping[str, np.ndarray], nodes: Mapping[str, Node]) -> None:
    """Write the checkpoint of a manifest: every data file, the seal and the commit."""
    manifest = fmt.decode(planned, path="manifest")
    body, files = manifest.body, Files(manifest)
    folder = records.folder_name(body.step, body.checkpoint_id)
    storage.create(records.checkpoint_key(folder, fmt.NAME), planned)
    sealed = []
    for index, section in enumerate(data_sections(World([], dict(full)), files)):
        layout = files.layout(index)
        if layout.values is not None:
            section[layout.values_offset :] = pack_values(dict(nodes), capacity=layout.values.capacity)
        nbytes = layout.data_start + layout.data_nbytes
        writer = storage.writer(records.checkpoint_key(folder, fmt.file_name(index)), nbytes=nbytes)
        with BufferPool(2 * BLOCK_NBYTES, buffer_nbytes=BLOCK_NBYTES) as pool:
            table = write_file(
                writer,
                [BytesSource(section)],
                data_start=layout.data_start,
                header=lambda table, layout=layout: container.header(manifest, layout, table),  # type: ignore[misc]
                pool=pool,
            )
        sealed.append(FileSeal(fmt.file_name(index), nbytes, xxhash.xxh3_128_hexdigest(table)))
    seal = Seal(
        checkpoint_id=body.checkpoint_id,
        place=manifest.place,
        step=body.step,
        manifest=FileSeal(fmt.NAME, len(planned), xxhash.xxh3_128_hexdigest(planned)),
        files=tuple(sealed),
    )
    encoded = records.encode(seal)
    storage.create(records.checkpoint_key(folder, records.SEAL_NAME), encoded)
    commit = Commit(
        place=manifest.place,
        step=body.step,
        checkpoint=folder,
        checkpoint_id=body.checkpoint_id,
        seal=SealDigest(len(encoded), records.digest(encoded)),
        nbytes=sum(file.nbytes for file in sealed),
        created=body.created,
        metrics={name: records.to_metric(value) for name, value in body.metrics.items()},
    )
    storage.create(records.commit_key(commit.place), records.encode(commit))


def begin(run_id: str, *epochs: Epoch) -> MemoryStorage:
    """A run without checkpoints."""
    storage = MemoryStorage()
    marker = Marker(run_id=run_id, format=records.FORMAT, writer="holdfast 0.1.0", created=1700000000.0)
    storage.create(records.MARKER_KEY, records.encode(marker))
    for epoch in epochs:
        storage.create(records.epoch_key(epoch.epoch), records.encode(epoch))
    return storage


def put(files: Mapping[str, bytes], root: Path) -> Path:
    """The objects of a store as files."""
    for key, data in files.items():
        (root / key).parent.mkdir(parents=True, exist_ok=True)
        (root / key).write_bytes(data)
    return root


# The examples of the specification.

RUN_ID = "00112233445566778899aabbccddeeff"
EPOCHS = (
    Epoch(epoch=1, opened_from=None, why="start", created=1700000000.5, world_size=1, incarnation="11" * 16),
    Epoch(epoch=2, opened_from=Place(1, 1), why="resume", created=1700003600.0, world_size=2, incarnation="22" * 16),
)


def example_files(stored: Mapping[str, bytes]) -> dict[str, bytes]:
    """All files of the run in the appendices; made from the manifests in `stored`, where they are the planned ones.

    The bytes of a zlib stream may differ between versions of zlib, and all else is a function of them.
    """
    storage = begin(RUN_ID, *EPOCHS)
    halves = Placed(Mesh((2,), (0, 1)), (Shard(0),))
    numbers = np.arange(10, dtype=np.float32)
    first = TensorLayout("model/weight", "float32", (2, 3), Whole("compare"))
    second = TensorLayout("model/weight", "bfloat16", (5, 2), halves)
    cases = [
        (
            Identity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1700000001.5, {"loss": 0.25}),
            [[first]],
            numbers[:6].view(np.uint8).reshape(2, 3, 4),
            3,
        ),
        (
            Identity("fedcba9876543210", RUN_ID, Place(2, 1), 8, 1700003601.0, {}),
            [[second], [second]],
            numbers.view(np.uint8).reshape(5, 2, 4)[:, :, 2:],
            4,
        ),
    ]
    for identity, layouts, full, progress in cases:
        nodes: dict[str, Node] = {"": Open("dict"), "model": Open("module"), "progress": Plain(progress)}
        planned = plan(layouts, nodes, identity)
        folder = records.folder_name(identity.step, identity.checkpoint_id)
        known = stored.get(records.checkpoint_key(folder, fmt.NAME), planned)
        publish(storage, known if alike(known, planned) else planned, {"model/weight": full}, nodes)
    return storage.objects


def alike(a: bytes, b: bytes) -> bool:
    """Whether two manifests differ at most in how their bodies are compressed."""
    first, second = fmt.decode(a, path="a"), fmt.decode(b, path="b")
    sequences = range(len(second.body.sequences))
    return first.body == second.body and all(
        np.array_equal(first.sequence(index), second.sequence(index)) for index in sequences
    )


MARK = re.compile(r"<!-- (example|body) (\S+) -->\n(?:```text\n(.*?)\n```\n)?", re.DOTALL)


def render(spec: str, files: Mapping[str, bytes]) -> str:
    """The specification with all dumps made from `files`."""

    def block(match: re.Match[str]) -> str:
        kind, key = match[1], match[2]
        text = show_body(files[key]) if kind == "body" else show(key, files[key])
        return f"<!-- {kind} {key} -->\n```text\n{text}\n```\n"

    return MARK.sub(block, spec)


def show(key: str, data: bytes) -> str:
    head = f"# {key}, {len(data)} bytes\n"
    if key.endswith(".json"):
        return head + data.decode("ascii").removesuffix("\n")
    return head + dump(data, manifest_parts(data) if key.endswith(fmt.NAME) else data_parts(data))


def manifest_parts(data: bytes) -> dict[int, str]:
    compressed, packed, blob = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16, 24))
    names = {0: "magic", 8: f"compressed_nbytes = {compressed}", 16: f"packed_nbytes = {packed}"}
    names |= {24: f"blob_nbytes = {blob}", 32: "xxh3-128 of all that follows", 48: "body: a zlib stream"}
    return names | ({48 + compressed: "blob"} if blob else {})


def data_parts(data: bytes) -> dict[int, str]:
    room = int.from_bytes(data[:8], "little")
    described = json.loads(data[8 : 8 + room])
    table = described.pop("__metadata__")["blocks"]
    parts = {0: f"header length = {room}", 8: "header", 35: "digest table", 35 + len(table): "header, continued"}
    for name, entry in described.items():
        start, stop = entry["data_offsets"]
        parts[8 + room + start] = f"{name}: bytes {start} to {stop} of the data section, {entry['dtype']}"
    at = 8 + room + described.get("@values", entry)["data_offsets"][0]
    if "@values" in described:
        length = int.from_bytes(data[at : at + 8], "little")
        parts |= {at + 8: f"length = {length}: the table of values", at + 8 + length: "room for values to grow"}
    return parts


def dump(data: bytes, parts: Mapping[int, str]) -> str:
    lines = []
    for start, stop in pairwise([*sorted(parts), len(data)]):
        lines.append(f"# {parts[start]}")
        previous = b""
        for at in range(start, stop, 16):
            row = data[at : min(at + 16, stop)]
            if row != previous:
                text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
                lines.append(f"{at:08x}  {row.hex(' '):<47}  |{text}|")
            elif lines[-1] != "*":
                lines.append("*")
            previous = row
    return "\n".join([*lines, f"{len(data):08x}"])


def undump(text: str) -> bytes:
    """The file that `show` showed, from its text alone."""
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    if lines[0].startswith("{"):
        return lines[0].encode("ascii") + b"\n"
    data, row = b"", b""
    for line in lines:
        if line != "*":
            offset = int(line[:8], 16)
            data += row * ((offset - len(data)) // len(row)) if row else b""
            row = bytes.fromhex(line[10:57])
            assert len(data) == offset
            data += row
    return data


def show_body(data: bytes) -> str:
    members = json.loads(msgspec.json.encode(fmt.decode(data, path="manifest").body))
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in members.items()) + "\n}"


def dumped_files() -> dict[str, bytes]:
    """The files in the specification."""
    return {key: undump(text) for kind, key, text in MARK.findall(SPEC.read_text()) if kind == "example"}


def test_the_dumps_in_the_specification_are_those_of_fresh_checkpoints() -> None:
    files = example_files(dumped_files())
    assert files == dumped_files()
    assert render(SPEC.read_text(), files) == SPEC.read_text()


def test_the_run_in_the_specification_can_be_typed_in_and_read(tmp_path: Path) -> None:
    run = put(dumped_files(), tmp_path / "run")
    done = run_alone(run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["place"] == [2, 1]
    view = holdfast.open(run)
    assert torch.equal(view["model/weight"][...], torch.arange(10, dtype=torch.bfloat16).view(5, 2))
    assert view.value("progress") == 4
    first = independent_reader.read(run / "checkpoints" / "step-0000000007-0123456789abcdef")
    assert first.tensors["model/weight"].data.tobytes() == np.arange(6, dtype="<f4").tobytes()
    assert first.values["progress"] == ["plain", 3]


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
    nodes = Checkpoint(resolve(parse(run))).nodes
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
    for name, tensor in found.tensors.items():
        assert alone.tensors[name].data.tobytes() == tensor.data.tobytes()


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
    assert read["__metadata__"].data.tobytes() == np.arange(3, dtype="<i8").tobytes()
    (path,) = tmp_path.glob("run/checkpoints/*/*.safetensors")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"__metadata__@0:3", "model/__metadata__", "@values"}


def small_run() -> dict[str, bytes]:
    """A run of two ranks with little in it, so that every part of every file is likely to be hit."""
    halves = Placed(Mesh((2,), (1, 0)), (Shard(1),))
    layouts = [TensorLayout("w", "float32", (30, 40), halves), TensorLayout("z", "complex64", (), Whole("split"))]
    rng = np.random.default_rng(5)
    full = {"w": rng.integers(0, 256, (30, 40, 4), np.uint8), "z": rng.integers(0, 256, (8,), np.uint8)}
    nodes: dict[str, Node] = {"": Open("dict"), "n": Plain(2**40)}
    storage = begin(RUN_ID, *EPOCHS[:1])
    identity = Identity("0123456789abcdef", RUN_ID, Place(1, 1), 7, 1.5, {"loss": 0.25})
    publish(storage, plan([layouts, layouts], nodes, identity), full, nodes)
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
    nodes: dict[str, Node] = {"": Open("dict"), "a": Plain(None)}
    planned = plan(world.layouts, nodes, IDENTITY)
    storage = begin(IDENTITY.run_id, EPOCHS[0])
    publish(storage, planned, world.full, nodes)
    loaded = independent_reader.read(put(storage.objects, root))
    assert {name: tensor.data.tobytes() for name, tensor in loaded.tensors.items()} == {
        name: full.tobytes() for name, full in world.full.items()
    }
    assert loaded.values == {"": ["open", "dict"], "a": ["plain", None]}
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
    assert {type(sequence).__name__ for sequence in manifest.body.sequences} == {"Affine", "Planes"}


def test_files_of_several_blocks_are_verified_block_by_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(12)
    for nbytes in (BLOCK_NBYTES - 4096, BLOCK_NBYTES - 4095, 3 * BLOCK_NBYTES + 1):
        world = World(
            [[TensorLayout("w", "uint8", (nbytes,), Whole("compare"))]],
            {"w": rng.integers(0, 256, (nbytes, 1), np.uint8)},
        )
        check_world(world, tmp_path / str(nbytes))


# Canonical text: the specification's rule for floats is the library's.


def ryu_text(value: float) -> str:
    """Section 4, word for word."""
    sign = "-" if str(value).startswith("-") else ""
    if not value:
        return f"{sign}0.0"
    mantissa = exponent = ""
    for precision in range(17):
        mantissa, _, exponent = f"{abs(value):.{precision}e}".partition("e")
        if float(f"{mantissa}e{exponent}") == abs(value):
            break
    digits, point = mantissa.replace(".", ""), int(exponent) + 1
    if -5 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if 0 < point <= 16:
        return f"{sign}{digits[:point].ljust(point, '0')}.{digits[point:] or '0'}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1}"


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-20, 25).map(lambda power: 1.5 * 10.0**power))
def test_floats_in_records_are_written_as_specified(value: float) -> None:
    commit = Commit(
        place=Place(1, 1),
        step=7,
        checkpoint="step-0000000007-0123456789abcdef",
        checkpoint_id="0123456789abcdef",
        seal=SealDigest(1, "0" * 32),
        nbytes=0,
        created=1.0,
        metrics={"m": value},
    )
    assert f'"metrics":{{"m":{ryu_text(value)}}}'.encode() in records.encode(commit)


if __name__ == "__main__":
    SPEC.write_text(render(SPEC.read_text(), example_files({})))
