"""Checkpoints published step by step as ranks do, and the independent reader as a program of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash

from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import BLOCK_NBYTES, Files
from holdfast.format.names import own_part
from holdfast.format.records import Commit, Diverged, Epoch, FileSeal, Marker, Place, Seal, SealDigest
from holdfast.format.values import Node
from holdfast.io.buffers import BufferPool
from holdfast.io.writer import write_file
from holdfast.plan.layout import TensorLayout
from holdfast.plan.save import CheckpointIdentity, RankValues, encode_plan, plan_save
from holdfast.store.base import Bytes
from holdfast.testing.memory_store import MemoryStore
from tests.support.worlds import World, data_sections

READER = Path(__file__).parent / "independent_reader.py"

RUN_ID = "00112233445566778899aabbccddeeff"
EPOCHS = (
    Epoch(epoch=1, opened_from=None, why="start", created=1700000000.5, world_size=1, incarnation="11" * 16),
    Epoch(epoch=2, opened_from=Place(1, 1), why="resume", created=1700003600.0, world_size=2, incarnation="22" * 16),
)

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


class BytesSource:
    """Bytes to be written."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self.nbytes = len(data)

    def read_into(self, start: int, out: Bytes) -> None:
        out[:] = self._data[start : start + len(out)]


def plan(
    layouts: Sequence[Sequence[TensorLayout]],
    nodes: Mapping[str, Node],
    identity: CheckpointIdentity,
    diverged: Sequence[str] = (),
    writers: Mapping[str, int] | None = None,
) -> bytes:
    """The manifest of simulated ranks. Each writes the nodes of its own part, and rank 0 all that are of no part, but
    for those that `writers` gives to another rank."""
    messages, bodies = World([list(tensors) for tensors in layouts], {}).sent()
    tables: dict[int, dict[str, Node]] = {}
    for path, node in sorted(nodes.items()):
        own = int((own_part(path) or "=0").rpartition("=")[2])
        tables.setdefault((writers or {}).get(path, own), {})[path] = node
    values = [RankValues(rank, len(pack_values(table)), tuple(table)) for rank, table in sorted(tables.items())]
    return encode_plan(plan_save(messages, bodies), identity=identity, values=values, diverged=diverged)


def publish(storage: MemoryStore, planned: bytes, full: Mapping[str, np.ndarray], nodes: Mapping[str, Node]) -> None:
    """Write the checkpoint of a manifest: every data file, the seal and the commit."""
    manifest = fmt.decode(planned, path="manifest")
    body, files = manifest.body, Files(manifest)
    folder = records.folder_name(body.step, body.checkpoint_id)
    storage.create(records.checkpoint_key(folder, fmt.NAME), planned)
    sealed = []
    for index, section in enumerate(data_sections(World([], dict(full)), files)):
        layout = files.layout(index)
        if layout.values is not None:
            table = {path: nodes[path] for path in layout.values.paths}
            section[layout.values_offset :] = pack_values(table, capacity=layout.values.capacity)
        nbytes = layout.data_start + layout.data_nbytes
        writer = storage.writer(records.checkpoint_key(folder, fmt.file_name(index)), nbytes=nbytes)
        with BufferPool(2 * BLOCK_NBYTES, buffer_nbytes=BLOCK_NBYTES) as pool:
            digests = write_file(
                writer,
                [BytesSource(section)],
                data_start=layout.data_start,
                header=lambda table, layout=layout: container.header(manifest, layout, table),  # type: ignore[misc]
                pool=pool,
            )
        sealed.append(FileSeal(fmt.file_name(index), nbytes, xxhash.xxh3_128_hexdigest(digests)))
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
        diverged=Diverged.of(body.diverged),
    )
    storage.create(records.commit_key(commit.place), records.encode(commit))


def begin(run_id: str, *epochs: Epoch) -> MemoryStore:
    """A run without checkpoints."""
    storage = MemoryStore()
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
