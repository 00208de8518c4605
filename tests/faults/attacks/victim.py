"""A small sound run, and the means to change it so that all of its digests are right again.

Digests detect accidents. A person who can write to a run can make them fit, so a reader must survive that too.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.records import Place
from holdfast.format.values import Node, Open, Plain, RecordNode, Text
from holdfast.plan.layout import Mesh, Placed, Shard, TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put

ID = "0123456789abcdef"
FOLDER = records.folder_name(7, ID)
NODES: dict[str, Node] = {
    "": Open("dict"),
    "model": Open("module"),
    "note": Text(b"hello"),
    "point": RecordNode("Point", ("x", "y")),
    "point/x": Plain(1),
    "point/y": Plain(2.5),
    "progress": Plain(7),
}


class Victim:
    """The run at `path`: two files, three tensors, a few values, committed at place 1.1."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def build(path: Path) -> Victim:
        """A sound run at `path`."""
        rows = Placed(Mesh((2,), (0, 1)), (Shard(0),))
        layouts = [
            TensorLayout("model/bias", "int64", (3,), Whole("split")),
            TensorLayout("model/scale", "bfloat16", (4, 2), rows),
            TensorLayout("model/weight", "float32", (4, 3), rows),
        ]
        full = {
            layout.name: np.arange(np.prod(layout.shape) * nbytes, dtype=np.uint8).reshape(*layout.shape, nbytes)
            for layout, nbytes in zip(layouts, (8, 2, 4), strict=True)
        }
        storage = begin(RUN_ID, EPOCHS[0])
        publish(
            storage,
            plan([layouts, layouts], NODES, CheckpointIdentity(ID, RUN_ID, Place(1, 1), 7, 1.5, {})),
            full,
            NODES,
        )
        return Victim(put(storage.objects, path))

    def copied(self, path: Path) -> Victim:
        """The same run somewhere else."""
        return Victim(Path(shutil.copytree(self.path, path)))

    @property
    def folder(self) -> Path:
        """The checkpoint's folder."""
        return self.path / records.CHECKPOINTS / FOLDER

    @property
    def manifest(self) -> Path:
        return self.folder / fmt.NAME

    @property
    def seal(self) -> Path:
        return self.folder / records.SEAL_NAME

    @property
    def commit(self) -> Path:
        return self.path / records.commit_key(Place(1, 1))

    @property
    def epoch(self) -> Path:
        return self.path / records.epoch_key(1)

    def data(self, index: int) -> Path:
        return self.folder / fmt.file_name(index)

    def set_manifest(self, **changes: object) -> None:
        """Members of the manifest replaced, whatever their types."""
        self.set_body(lambda body: body.update(changes))

    def set_body(self, change: Callable[[dict[str, Any]], None], *, blob: bytes = b"") -> None:
        """The manifest's body changed as a tree of builtins."""
        decoded = fmt.decode(self.manifest.read_bytes(), path="manifest")
        body = msgspec.msgpack.decode(msgspec.msgpack.encode(decoded.body))
        change(body)
        self.set_packed(msgspec.msgpack.encode(body), blob=bytes(decoded._blob) + blob)

    def set_packed(self, packed: bytes, *, blob: bytes = b"", claimed: int | None = None) -> None:
        """Any bytes as the manifest's body."""
        compressed = zlib.compress(packed, 9)
        digest = xxhash.xxh3_128_digest(compressed + blob)
        sizes = len(compressed), len(packed) if claimed is None else claimed, len(blob)
        self.manifest.write_bytes(fmt._HEAD.pack(fmt.MAGIC, *sizes, digest) + compressed + blob)
        self.reseal()

    def set_values(self, table: bytes) -> None:
        """Any bytes as the values of file 0, which gets larger where it must."""
        capacity = -(-(len(table) + 8) // 4096) * 4096
        self.set_entry((len(table).to_bytes(8, "little") + table).ljust(capacity, b"\0"))

    def set_entry(self, entry: bytes) -> None:
        """Any bytes as the ``@values`` entry of file 0."""
        old = Files(fmt.decode(self.manifest.read_bytes(), path="manifest")).layout(0)
        tensors = self.data(0).read_bytes()[old.data_start :][: old.values_offset]
        self.set_manifest(values=[[0, len(entry), list(NODES)]])
        manifest = fmt.decode(self.manifest.read_bytes(), path="manifest")
        section = tensors + entry
        blocks = range(0, len(section), container.BLOCK_NBYTES)
        table = b"".join(xxhash.xxh3_128_digest(section[at : at + container.BLOCK_NBYTES]) for at in blocks)
        self.data(0).write_bytes(container.header(manifest, Files(manifest).layout(0), table) + section)
        self.reseal(table.hex())

    def reseal(self, table: str | None = None) -> None:
        """The seal, and then the commit, made to fit the manifest and the files as they are."""

        def fit(seal: dict[str, Any]) -> None:
            data = self.manifest.read_bytes()
            seal["manifest"].update(nbytes=len(data), digest=xxhash.xxh3_128_hexdigest(data))
            for file in seal["files"]:
                file["nbytes"] = (self.folder / file["name"]).stat().st_size
            if table is not None:
                seal["files"][0]["digest"] = xxhash.xxh3_128_hexdigest(bytes.fromhex(table))

        self.set_seal(fit)

    def set_seal(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The seal changed as a tree of builtins, and the commit made to fit."""
        change_record(self.seal, change)
        self.recommit()

    def recommit(self) -> None:
        """The commit made to fit the seal as it is."""
        data = self.seal.read_bytes()
        self.set_commit(lambda commit: commit["seal"].update(nbytes=len(data), digest=records.digest(data)))

    def set_commit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """The commit changed as a tree of builtins."""
        change_record(self.commit, change)

    def replace_text(self, path: Path, old: str, new: str) -> None:
        """A record's text changed in one place."""
        text = body_of(path)
        assert old.encode() in text
        sign(path, text.replace(old.encode(), new.encode(), 1))
        if path == self.seal:
            self.recommit()


def body_of(path: Path) -> bytes:
    """The text of a record without its digest."""
    return path.read_bytes().rpartition(b',"digest":"')[0]


def sign(path: Path, body: bytes) -> None:
    """Any text as a record with a right digest. A path that does not exist yet is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def change_record(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A record changed as a tree of builtins."""
    tree = msgspec.json.decode(body_of(path) + b"}")
    change(tree)
    sign(path, msgspec.json.encode(tree)[:-1])


def as_boxes(body: dict[str, Any], *, starts: list[list[int]], sizes: list[list[int]], shape: object = None) -> None:
    """The last tensor of a manifest's body divided into free boxes: numbers per axis. All are in file 0."""
    first, num_boxes = len(body["sequences"]), len(starts[0])
    columns = [*starts, *sizes, [0] * num_boxes]
    body["sequences"] += [["a", [[number, [], []] for number in column]] for column in columns]
    at = list(range(first, first + len(columns)))
    body["partition_table"].append(["boxes", at[: len(starts)], at[len(starts) : -1], at[-1]])
    body["partitions"][-1] = len(body["partition_table"]) - 1
    if shape is not None:
        body["shape_table"].append(shape)
        body["shapes"][-1] = len(body["shape_table"]) - 1
