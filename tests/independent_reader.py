"""A reader of holdfast checkpoints, written from docs/SPEC.md alone: it shares no code with the library.

``python -I tests/independent_reader.py RUN_OR_FOLDER`` verifies everything, from the commit down to the last block and
the header of every data file, puts every tensor together, and prints a digest per tensor, its dtype and shape, and the
nodes of all values as JSON. Damage: exit status 1 and a message.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
Place = tuple[int, int]

BLOCK = 1 << 20
COUNTDOWN = 9_999_999_999
TABLE_START = 35
#: Bytes per element and safetensors code of each logical dtype; no code where it is stored as bytes.
DTYPES = {
    name: (int(itemsize), code)
    for name, itemsize, code in re.findall(
        r"(\w+) (\d+) (\w*)",
        """bool 1 BOOL, uint8 1 U8, int8 1 I8, uint16 2 U16, int16 2 I16, uint32 4 U32, int32 4 I32, uint64 8 U64,
        int64 8 I64, float16 2 F16, bfloat16 2 BF16, float32 4 F32, float64 8 F64, float8_e4m3fn 1 F8_E4M3,
        float8_e5m2 1 F8_E5M2, float8_e4m3fnuz 1 , float8_e5m2fnuz 1 , float8_e8m0fnu 1 , float4_e2m1fn_x2 1 ,
        complex32 4 , complex64 8 , complex128 16 """,
    )
}


class DamagedError(Exception):
    """What is stored is not a sound checkpoint."""


class Tensor(NamedTuple):
    """A full tensor: its logical dtype, global shape, and bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


class Loaded(NamedTuple):
    """A whole checkpoint. `values` is the flat table of nodes, as MessagePack gives them."""

    place: Place
    step: int
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    values: dict[str, list[Any]]


class Cell(NamedTuple):
    """One cell: the file that owns it, and per axis (or once, `flat`) where it starts and stops."""

    file: int
    flat: bool
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))


def check(condition: object, problem: str) -> None:
    if not condition:
        raise DamagedError(problem)


def hex_digest(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


# Records and history (sections 4 and 5).


def record(path: Path, kind: str) -> dict[str, Any]:
    check(path.is_file(), f"{path} is missing")
    check(46 <= path.stat().st_size <= 1 << 26, f"{path} has an impossible size")
    data = path.read_bytes()
    check(data[-46:] == f',"digest":"{hex_digest(data[:-46])}"}}\n'.encode(), f"{path} does not match its digest")
    members: dict[str, Any] = json.loads(data[:-46] + b"}")
    check(members["holdfast"] == kind, f"{path} is a record of another kind")
    check_features(members, str(path))
    return members


def check_features(members: dict[str, Any], where: str) -> None:
    unknown = members["reader_features"]
    check(not unknown, f"{where} needs unknown reader features: {', '.join(unknown)}")


def place_of(members: dict[str, Any] | None) -> Place | None:
    return None if members is None else (members["epoch"], members["seq"])


def head(run: Path) -> Place | None:
    epochs = [COUNTDOWN - int(p.name[:10]) for p in run.glob("epochs/*") if re.fullmatch(r"[0-9]{10}\.json", p.name)]
    texts = [p.name for p in run.glob("history/*") if re.fullmatch(r"[0-9]{10}-[0-9]{10}\.json", p.name)]
    committed = [(COUNTDOWN - int(text[:10]), COUNTDOWN - int(text[11:21])) for text in texts]
    epoch = max(epochs, default=0)
    if not epoch:
        return None
    opened = record(run / "epochs" / f"{COUNTDOWN - epoch:010d}.json", "epoch")
    check(opened["epoch"] == epoch, "an epoch record was renamed")
    return max((p for p in committed if p[0] == epoch and p[1]), default=place_of(opened["opened_from"]))


def read(path: Path) -> Loaded:
    """Read a run's head, or a checkpoint folder."""
    if (path / "seal.json").exists():
        return read_checkpoint(path, record(path / "seal.json", "seal"), None)
    marker = record(path / "holdfast.json", "marker")
    check(marker["format"] == "1", "the run has an unknown format")
    place = head(path)
    if place is None:
        raise DamagedError(f"{path} has no committed checkpoint")
    epoch, seq = place
    commit = record(path / "history" / f"{COUNTDOWN - epoch:010d}-{COUNTDOWN - seq:010d}.json", "commit")
    check(place_of(commit["place"]) == place, "a commit was renamed")
    folder_name = f"step-{commit['step']:010d}-{commit['checkpoint_id']}"
    check(commit["checkpoint"] == folder_name and re.fullmatch("step-[0-9]+-[0-9a-f]{16}", folder_name), "bad folder")
    folder = path / "checkpoints" / folder_name
    seal = record(folder / "seal.json", "seal")
    sealed = (folder / "seal.json").read_bytes()
    check({"nbytes": len(sealed), "digest": hex_digest(sealed)} == commit["seal"], "the seal is not the committed one")
    check(all(seal[key] == commit[key] for key in ("place", "step", "checkpoint_id")), "seal and commit disagree")
    check(sum(file["nbytes"] for file in seal["files"]) == commit["nbytes"], "the commit has another size")
    return read_checkpoint(folder, seal, (marker["run_id"], commit))


# The manifest (section 6).


@dataclass
class Manifest:
    body: dict[str, Any]
    blobs: list[memoryview]

    def sequence(self, index: int) -> list[int]:
        check(0 <= index < len(self.blobs), "a sequence does not exist")
        form, *rest = self.body["sequences"][index]
        if form == "p":
            return planes(self.blobs[index], *rest)
        check(form == "a", f"unknown form of a sequence: {form}")
        check(sum(prod(counts) for _, counts, _ in rest[0]) <= 1 << 27, "a sequence is too long")
        return [value for block in rest[0] for value in affine(*block)]

    def shape(self, tensor: int) -> tuple[int, ...]:
        return tuple(self.body["shape_table"][self.body["shapes"][tensor]])

    def dtype(self, tensor: int) -> str:
        return str(self.body["dtype_table"][self.body["dtypes"][tensor]])

    def itemsize(self, tensor: int) -> int:
        return DTYPES[self.dtype(tensor)][0]


def affine(start: int, counts: list[int], steps: list[int]) -> list[int]:
    check(len(counts) == len(steps) and all(count >= 0 for count in counts), "a malformed affine block")
    values = [start] if all(counts) else []
    for count, step in zip(counts, steps, strict=True):
        values = [wrapped(value + index * step) for value in values for index in range(count)]
    return values


def planes(blob: memoryview, length: int, first: int, base: int, width: int) -> list[int]:
    check(1 <= length <= 1 << 27 and 1 <= width <= 8, "an impossible sequence")
    rows = np.frombuffer(blob, np.uint8).reshape(width, length - 1)
    values = [first]
    for column in rows.T:
        values.append(wrapped(values[-1] + base + int.from_bytes(column.tobytes(), "little")))
    return values


def wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def parse_manifest(data: bytes) -> Manifest:
    check(data[:8] == b"HFMANI01" and len(data) >= 48, "the manifest does not begin as one")
    compressed, packed, blob = struct.unpack_from("<QQQ", data, 8)
    check(1 <= packed <= 1 << 30 and max(compressed, blob) <= 1 << 30, "the manifest claims too much")
    check(len(data) == 48 + compressed + blob, "the manifest has another length")
    check(xxhash.xxh3_128_digest(data[48:]) == data[32:48], "the manifest does not match its digest")
    inflate = zlib.decompressobj()
    body = inflate.decompress(data[48 : 48 + compressed], packed)
    check(len(body) == packed and inflate.eof and not inflate.unused_data, "the manifest's body has another length")
    manifest = Manifest(msgspec.msgpack.decode(body), [])
    check_features(manifest.body, "the manifest")
    at = 48 + compressed
    for form, *rest in manifest.body["sequences"]:
        taken = (rest[0] - 1) * rest[3] if form == "p" else 0
        check(taken >= 0, "a negative sequence")
        manifest.blobs.append(memoryview(data)[at : at + taken])
        at += taken
    check(at == len(data), "the sequences do not fill the blob")
    names = manifest.body["names"]
    check(all(a < b for a, b in pairwise(names)), "the names are not sorted")
    columns = [len(manifest.body[column]) for column in ("dtypes", "shapes", "partitions")]
    check(columns == [len(names)] * 3, "the tensor columns have different lengths")
    check(all(index >= 0 for c in ("dtypes", "shapes", "partitions") for index in manifest.body[c]), "a negative index")
    check(all(name in names for name in manifest.body["aliases"].values()), "an alias of nothing")
    return manifest


def cells_of(manifest: Manifest, tensor: int) -> list[Cell]:
    """The cells of a tensor in canonical order. That they cover it exactly once is checked when it is filled."""
    form, *rest, owners_index = manifest.body["partition_table"][manifest.body["partitions"][tensor]]
    owners, shape = manifest.sequence(owners_index), manifest.shape(tensor)
    check(all(0 <= owner < manifest.body["num_files"] for owner in owners), "a cell without a file")
    bounds: list[tuple[tuple[int, ...], tuple[int, ...]]]
    if form == "boxes":
        starts, sizes = ([manifest.sequence(index) for index in columns] for columns in rest)
        check(len(starts) == len(sizes) == len(shape), "boxes of another number of axes")
        boxes = zip(zip(*starts, strict=True), zip(*sizes, strict=True), strict=True)
        bounds = [(low, tuple(a + n for a, n in zip(low, size, strict=True))) for low, size in boxes]
    else:
        check(form in ("grid", "flat"), f"unknown form of a partition: {form}")
        extents, cuts = (shape, rest[0]) if form == "grid" else ((prod(shape),), rest)
        bounds = [((), ())]
        for extent, index in zip(extents, cuts, strict=True):
            numbers = manifest.sequence(index)
            check(numbers[0] == 0 and numbers[-1] == extent and all(a < b for a, b in pairwise(numbers)), "bad cuts")
            bounds = [((*low, a), (*high, b)) for low, high in bounds for a, b in pairwise(numbers)]
    cells = [Cell(owner, form == "flat", *bound) for owner, bound in zip(owners, bounds, strict=True)]
    limits = (prod(shape),) if form == "flat" else shape
    for cell in cells:
        check(all(0 <= a < b <= n for a, b, n in zip(cell.starts, cell.stops, limits, strict=True)), "a bad cell")
    return cells


# Data files (section 7).


class Entry(NamedTuple):
    """One cell in a data file."""

    tensor: int
    cell: Cell
    nbytes: int


@dataclass
class DataFile:
    """What one data file must look like."""

    index: int
    entries: list[Entry]
    capacity: int | None = None

    @property
    def data_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries) + (self.capacity or 0)

    def data_start(self, manifest: Manifest) -> int:
        total = 9 + 86 + len(str(self.index)) + 32 * -(-self.data_nbytes // BLOCK)
        for tensor, _, _ in self.entries:
            shape, name = manifest.shape(tensor), manifest.body["names"][tensor]
            code = DTYPES[manifest.dtype(tensor)][1] or "U8"
            total += len(json.dumps(name)) + len(code) + max(len(shape), 1) * (3 * len(str(prod(shape))) + 3) + 96
        if self.capacity is not None:
            total += 107 + len(str(self.capacity))
        return -(-total // 4096) * 4096

    def header(self, manifest: Manifest, table: str) -> bytes:
        checkpoint_id = manifest.body["checkpoint_id"]
        metadata = {"blocks": table, "checkpoint": checkpoint_id, "file": str(self.index), "holdfast": "1"}
        members: dict[str, Any] = {"__metadata__": metadata}
        at = 0
        for tensor, cell, nbytes in self.entries:
            name = entry_name(manifest.body["names"][tensor], manifest.shape(tensor), cell)
            code = DTYPES[manifest.dtype(tensor)][1]
            shape = list(cell.sizes) if code else [nbytes]
            members[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        if self.capacity is not None:
            members["@values"] = {"dtype": "U8", "shape": [self.capacity], "data_offsets": [at, at + self.capacity]}
        check(len(members) == 1 + len(self.entries) + (self.capacity is not None), "two entries have one name")
        room = self.data_start(manifest) - 8
        return struct.pack("<Q", room) + json.dumps(members, separators=(",", ":")).encode("ascii").ljust(room)


def entry_name(name: str, shape: tuple[int, ...], cell: Cell) -> str:
    is_whole = cell.sizes == shape  # a flat range of a tensor with one axis is also the whole tensor
    if is_whole and name != "__metadata__":
        return name
    return name + "@" + ",".join(f"{a}:{b}" for a, b in zip(cell.starts, cell.stops, strict=True))


def files_of(manifest: Manifest) -> list[DataFile]:
    files = [DataFile(index, []) for index in range(manifest.body["num_files"])]
    order = sorted(range(len(manifest.body["names"])), key=lambda t: (-manifest.itemsize(t), t))
    for tensor in order:
        for cell in cells_of(manifest, tensor):
            files[cell.file].entries.append(Entry(tensor, cell, prod(cell.sizes) * manifest.itemsize(tensor)))
    for file, capacity, _ in manifest.body["values"]:
        check(0 <= file < len(files) and files[file].capacity is None, "values in no file, or twice in one")
        files[file].capacity = capacity
    return files


def read_checkpoint(folder: Path, seal: dict[str, Any], found: tuple[str, dict[str, Any]] | None) -> Loaded:
    check(seal["manifest"]["name"] == "manifest.hfm", "the seal names no manifest")
    data = (folder / "manifest.hfm").read_bytes()
    check(len(data) == seal["manifest"]["nbytes"] and hex_digest(data) == seal["manifest"]["digest"], "bad manifest")
    manifest = parse_manifest(data)
    body = manifest.body
    check((body["checkpoint_id"], body["step"]) == (seal["checkpoint_id"], seal["step"]), "another checkpoint")
    check(tuple(body["place"]) == place_of(seal["place"]), "another place")
    if found is not None:
        run_id, commit = found
        metrics = {name: repr(value).strip("'") for name, value in commit["metrics"].items()}
        check(body["run_id"] == run_id, "the checkpoint belongs to another run")
        check({name: repr(value) for name, value in body["metrics"].items()} == metrics, "the commit's metrics differ")
        check(body["created"] == commit["created"], "the commit's time differs")
    writers = manifest.sequence(body["writers"])
    check(len(writers) == body["num_files"] and all(a < b for a, b in pairwise([-1, *writers])), "impossible writers")
    files = files_of(manifest)
    names = [f"data-{file.index:05d}.safetensors" for file in files]
    check([file["name"] for file in seal["files"]] == names, "the seal lists other data files")
    for file, sealed in zip(files, seal["files"], strict=True):  # before memory is taken for tensors
        nbytes = file.data_start(manifest) + file.data_nbytes
        check((folder / sealed["name"]).is_file(), f"{sealed['name']} is missing")
        actual = (folder / sealed["name"]).stat().st_size
        check(nbytes == sealed["nbytes"] == actual, f"{sealed['name']} has another size")
    shapes = [(*manifest.shape(t), manifest.itemsize(t)) for t in range(len(body["names"]))]
    full, times = [np.zeros(shape, np.uint8) for shape in shapes], [np.zeros(shape[:-1], np.uint8) for shape in shapes]
    values: dict[str, list[Any]] = {}
    paths = {file: paths for file, _, paths in body["values"]}
    for file, sealed in zip(files, seal["files"], strict=True):
        section = verified_section(folder / sealed["name"], file, manifest, sealed["digest"])
        at = 0
        for tensor, cell, nbytes in file.entries:
            fill(full[tensor], times[tensor], cell, np.frombuffer(section[at : at + nbytes], np.uint8))
            at += nbytes
        if file.capacity is not None:
            values |= parse_values(section[at:], paths[file.index], values)
    check(all((count == 1).all() for count in times), "an element is not stored exactly once")
    tensors = {
        name: Tensor(manifest.dtype(t), manifest.shape(t), full[t].reshape(-1)) for t, name in enumerate(body["names"])
    }
    return Loaded(tuple(body["place"]), body["step"], tensors, body["aliases"], values)


def verified_section(path: Path, file: DataFile, manifest: Manifest, digest: str) -> bytes:
    data, data_start = path.read_bytes(), file.data_start(manifest)
    section = data[data_start:]
    starts = range(0, len(section), BLOCK)
    table = data[TABLE_START : TABLE_START + 32 * len(starts)].decode("ascii")
    check(hex_digest(bytes.fromhex(table)) == digest, f"{path}: the digest table is not the sealed one")
    for start in starts:
        expected = table[start // BLOCK * 32 : start // BLOCK * 32 + 32]
        check(hex_digest(section[start : start + BLOCK]) == expected, f"{path}: the block at {start} is damaged")
    check(data[:data_start] == file.header(manifest, table), f"{path}: the header is not the one that belongs there")
    return section


def fill(full: Bytes, times: Bytes, cell: Cell, data: Bytes) -> None:
    itemsize = full.shape[-1]
    if cell.flat:
        full.reshape(-1, itemsize)[cell.starts[0] : cell.stops[0]] = data.reshape(-1, itemsize)
        times.reshape(-1)[cell.starts[0] : cell.stops[0]] += 1
    else:
        index = tuple(slice(a, b) for a, b in zip(cell.starts, cell.stops, strict=True))
        full[index] = data.reshape(*cell.sizes, itemsize)
        times[index] += 1


def parse_values(data: bytes, paths: list[str], others: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The table of one value block (section 9)."""
    (length,) = struct.unpack_from("<Q", data)
    check(length <= min(len(data) - 8, 1 << 30) and not any(data[8 + length :]), "the values have another length")
    rows = msgspec.msgpack.decode(data[8 : 8 + length])
    check([path for path, _ in rows] == list(paths) and all(a < b for a, b in pairwise(paths)), "other values")
    table = dict(rows)
    check(not table.keys() & others.keys(), "a value is stored twice")
    for path, node in rows:
        check(path.count("/") < 128, "values are nested too deep")
        kind, *rest = node[1] if node[0] == "stateful" else node
        below = {"dict": rest[-1:], "record": rest[-1:]}.get(kind, [])
        listed = below[0] if below else map(str, range(rest[1])) if kind == "list" else ()
        check(all((f"{path}/{name}" if path else name) in table for name in listed), f"{path!r} misses entries")
    return table


def main(arguments: list[str]) -> int:
    try:
        loaded = read(Path(arguments[0]))
    except (DamagedError, OSError, zlib.error, msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    tensors = {name: (hex_digest(t.data.data), t.dtype, t.shape) for name, t in loaded.tensors.items()}
    values = {path: repr(node) for path, node in loaded.values.items()}
    report = {"place": loaded.place, "step": loaded.step, "tensors": tensors, "values": values}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
