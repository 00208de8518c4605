"""A reader of holdfast checkpoints, written from docs/SPEC.md alone: it shares no code with the library.

``python -I tests/support/independent_reader.py RUN_OR_FOLDER`` verifies everything, from the commit down to the last
block and the header of every data file, puts every tensor together, and prints a digest per tensor, its dtype and
shape, and the nodes of all values as JSON. Damage: exit status 1 and a message.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise, product
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest as digest

Members = dict[str, Any]
BLOCK = 1 << 20
COUNTDOWN = 9_999_999_999
DTYPES = """bool 1 BOOL, uint8 1 U8, int8 1 I8, uint16 2 U16, int16 2 I16, uint32 4 U32, int32 4 I32, uint64 8 U64,
int64 8 I64, float16 2 F16, bfloat16 2 BF16, float32 4 F32, float64 8 F64, float8_e4m3fn 1 F8_E4M3,
float8_e5m2 1 F8_E5M2, float8_e4m3fnuz 1 -, float8_e5m2fnuz 1 -, float8_e8m0fnu 1 -, float4_e2m1fn_x2 1 -,
complex32 4 -, complex64 8 -, complex128 16 -"""
ITEMSIZES = {name: int(itemsize) for name, itemsize, _ in map(str.split, DTYPES.split(","))}
CODES = {name: code for name, _, code in map(str.split, DTYPES.split(",")) if code != "-"}  # others: stored as bytes
WRAPPABLE = ["plain", "int", "complex", "str", "bytes", "numpy", "torch", "tensor", "planes", "dict", "list", "record"]


class DamagedError(ValueError):
    """The stored checkpoint is not sound."""


def check(condition: object, problem: str) -> None:
    if not condition:
        raise DamagedError(problem)


def pick(table: list[Any], index: int) -> Any:
    check(0 <= index < len(table), f"there is no index {index} in a table of {len(table)}")
    return table[index]


# Records and history (sections 4 and 5).


def record(path: Path, kind: str) -> Members:
    check(46 <= path.stat().st_size <= 1 << 26, f"{path} has an impossible size")
    data = path.read_bytes()
    check(data[-46:] == f',"digest":"{digest(data[:-46])}"}}\n'.encode(), f"{path} does not match its digest")
    members: Members = msgspec.json.decode(data[:-46] + b"}")
    check(members["holdfast"] == kind, f"{path} is a record of another kind")
    unknown = set(members["reader_features"]) - ({"references"} if kind == "seal" else set())
    check(not unknown, f"{path} needs unknown features: {unknown}")
    return members


def head(run: Path) -> Members:
    """The commit of the first place of the lineage, and the run's id."""
    marker = record(run / "holdfast.json", "marker")
    check(marker["format"] == "1", "the run has an unknown format")
    number = "[0-9]" * 10
    newest = min((path.stem for path in run.glob(f"epochs/{number}.json")), default="9" * 10)
    check(newest < "9" * 10, f"{run} has no epoch, so no committed checkpoint")
    epoch = record(run / "epochs" / f"{newest}.json", "epoch")
    check(epoch["epoch"] == COUNTDOWN - int(newest), "an epoch record was renamed")
    origin = epoch["opened_from"]
    check(origin is None or (0 < origin["epoch"] < epoch["epoch"] and origin["seq"] > 0), "an epoch of no earlier one")
    seq = max((COUNTDOWN - int(path.stem[11:]) for path in run.glob(f"history/{newest}-{number}.json")), default=0)
    place = {"epoch": epoch["epoch"], "seq": seq} if seq else origin
    check(place, f"{run} has no committed checkpoint")
    commit = record(run / f"history/{COUNTDOWN - place['epoch']:010d}-{COUNTDOWN - place['seq']:010d}.json", "commit")
    check(commit["place"] == place, "a commit was renamed")
    check(re.fullmatch("step-[0-9]{10,18}-[0-9a-f]{16}", commit["checkpoint"]), "the commit names no checkpoint")
    return commit | {"run_id": marker["run_id"]}


def check_commit(commit: Members, seal: Members, sealed: bytes, body: Members) -> None:
    """A commit is a function of seal and manifest (section 11), and they are of its run."""
    expected = {"place": seal["place"], **{key: body[key] for key in ("step", "checkpoint_id", "created", "run_id")}}
    expected |= {
        "checkpoint": f"step-{seal['step']:010d}-{seal['checkpoint_id']}",
        "seal": {"nbytes": len(sealed), "digest": digest(sealed)},
        "nbytes": sum(file["nbytes"] for file in seal["files"]),
    }
    referenced = sum(file["nbytes"] for file in seal["files"] if "checkpoint" in file)
    check(commit.get("referenced_nbytes", 0) == referenced, "the commit has another sum of what is referenced")
    check(bool(referenced) == ("references" in seal["reader_features"]), "references without the feature")
    check(commit | expected == commit, "the commit is not that of the seal and the manifest")
    metrics = {name: value if isfinite(value) else repr(value) for name, value in body["metrics"].items()}
    check(repr(commit["metrics"]) == repr(metrics), "the commit has other metrics than the manifest")
    mark = {"num_tensors": len(body["diverged"]), "names": body["diverged"][:16]}
    check(commit["diverged"] == mark, "the commit has another mark of divergence than the manifest")


# The manifest (section 6).


def parse_manifest(data: bytes) -> tuple[Members, list[list[int]]]:
    """The body and its sequences."""
    check(data[:8] == b"HFMANI01" and len(data) >= 48, "the manifest does not begin as one")
    compressed, packed, blob = (int.from_bytes(data[at : at + 8], "little") for at in (8, 16, 24))
    check(1 <= packed <= 1 << 30 and max(compressed, blob) <= 1 << 30, "the manifest claims too much")
    check(len(data) == 48 + compressed + blob, "the manifest has another length")
    check(digest(data[48:]) == data[32:48].hex(), "the manifest does not match its digest")
    inflate = zlib.decompressobj()
    unpacked = inflate.decompress(data[48 : 48 + compressed], packed)
    check(len(unpacked) == packed and inflate.eof and not inflate.unused_data, "the body has another length")
    body: Members = msgspec.msgpack.decode(unpacked)
    unknown = set(body["reader_features"]) - {"small-last", "still-files", "references"}
    check(not unknown, f"the manifest needs unknown features: {unknown}")
    planes = BytesIO(data[48 + compressed :])
    sequences = [sequence(planes, *encoded) for encoded in body["sequences"]]
    check(not planes.read(), "the sequences do not fill the blob")
    check(body["names"] == sorted(set(body["names"])), "the names are not sorted")
    check(all(name in body["names"] for name in body["aliases"].values()), "an alias of nothing")
    check(body["diverged"] == sorted(set(body["diverged"]) & set(body["names"])), "a mark of divergence on nothing")
    writers = pick(sequences, body["writers"])
    check(len(writers) == body["num_files"] and [-1, *writers] == sorted({-1, *writers}), "impossible writers")
    candidates = [file for file, _, _ in body.get("references", [])]
    check(candidates == sorted(set(candidates)), "impossible references")
    check(bool(candidates) == ("references" in body["reader_features"]), "references without the feature")
    check(all(file in still(body, sequences) for file in candidates), "a reference to a file that is not still")
    return body, sequences


def still(body: Members, sequences: list[list[int]]) -> set[int]:
    """The numbers of the still files."""
    writers = pick(sequences, body["writers"])
    return {file for file, key in enumerate(writers) if key % 2 and "still-files" in body["reader_features"]}


def sequence(planes: BytesIO, form: str, *rest: Any) -> list[int]:
    """The elements of a sequence. Arrays of int64 wrap around, as they must; what is no int64 raises."""
    if form == "p":
        length, first, base, width = rest
        check(1 <= length <= 1 << 27 and 1 <= width <= 8, "an impossible sequence")
        rows = np.frombuffer(planes.read((length - 1) * width), np.uint8).reshape(width, length - 1)
        steps = np.pad(rows, ((0, 8 - width), (0, 0))).T.copy().view("<i8")[:, 0] + np.int64(base)
        return [int(element) for element in np.concatenate([np.full(1, first, np.int64), steps]).cumsum()]
    check(form == "a", f"unknown form of a sequence: {form}")
    elements: list[int] = []
    for start, counts, steps in rest[0]:
        check(counts == [0] or min(counts, default=1) > 0, "an impossible sequence")
        check(len(elements) + prod(counts) <= 1 << 27, "a sequence is too long")
        block = np.full(1, start, np.int64)
        for count, step in zip(counts, steps, strict=True):
            block = np.add.outer(block, np.arange(count) * np.int64(step)).reshape(-1)
        elements += block.tolist()
    return elements


# Data files, tensors and values (sections 6.4, 7 and 9).


@dataclass
class File:
    """The required form of a data file: the members of its header, the size of its data, and a bound of the header."""

    index: int
    members: Members = field(default_factory=dict)
    nbytes: int = 0
    bound: int = 0
    is_still: bool = False

    def add(self, name: str, code: str, shape: list[int], nbytes: int, bound: int) -> slice:
        """Add an entry; where in the data section it is."""
        check(name not in self.members, f"two entries of a file are called {name}")
        start, stop = self.nbytes, self.nbytes + nbytes
        self.members[name] = {"dtype": code, "shape": shape, "data_offsets": [start, stop]}
        self.nbytes, self.bound = stop, self.bound + bound
        return slice(start, stop)

    def verified(self, folder: Path, checkpoint_id: str, sealed: Members) -> bytes:
        """The data section, after every byte of the file was checked."""
        path = folder / f"{'still' if self.is_still else 'data'}-{self.index:05d}.safetensors"
        if "checkpoint" in sealed and not path.exists():
            path = folder.parent / sealed["checkpoint"] / path.name
            checkpoint_id = sealed["checkpoint"][-16:]
        num_blocks = -(-self.nbytes // BLOCK)
        data_start = -(-(9 + 86 + len(str(self.index)) + 32 * num_blocks + self.bound) // 4096) * 4096
        data = path.read_bytes()
        check(len(data) == data_start + self.nbytes, f"{path} has another size")
        header, section = data[:data_start], data[data_start:]
        table = header[35 : 35 + 32 * num_blocks].decode("ascii")
        found = {"name": path.name, "nbytes": len(data), "digest": digest(bytes.fromhex(table))}
        check(sealed | found == sealed, f"{path}: size or digest table are not the sealed ones")
        for block in range(num_blocks):
            actual = digest(section[block * BLOCK : (block + 1) * BLOCK])
            check(actual == table[32 * block : 32 * block + 32], f"{path}: the block at {block * BLOCK} is damaged")
        metadata = {"blocks": table, "checkpoint": checkpoint_id, "file": str(self.index), "holdfast": "1"}
        text = json.dumps({"__metadata__": metadata} | self.members, separators=(",", ":"))
        written = (data_start - 8).to_bytes(8, "little") + text.encode("ascii").ljust(data_start - 8)
        check(header == written, f"{path}: the header is not the one that belongs there")
        anybody = header.replace(f'"checkpoint":"{checkpoint_id}"'.encode(), b'"checkpoint":"%s"' % (b"0" * 16), 1)
        check(sealed.get("content", "") == (digest(anybody) if self.is_still else ""), f"{path}: another content")
        return section


@dataclass
class Tensor:
    """The location of a tensor. Cells (file, bytes, box) divide `axes`: its shape, or (flat) its number of elements."""

    dtype: str
    shape: list[int]
    axes: list[int]
    cells: list[tuple[int, slice, tuple[slice, ...]]]

    def assembled(self, sections: list[bytes]) -> npt.NDArray[np.void]:
        """All elements. With nothing stored twice and as much stored as there is, each is stored once."""
        nbytes, itemsize = sum(where.stop - where.start for _, where, _ in self.cells), ITEMSIZES[self.dtype]
        check(nbytes == prod(self.axes) * itemsize, "not every element is stored once")
        data, found = np.zeros(self.axes, f"V{itemsize}"), np.zeros(self.axes, np.bool_)
        for file, where, box in self.cells:
            check(not found[box].any(), "an element is stored twice")
            data[box] = np.frombuffer(sections[file][where], data.dtype).reshape(data[box].shape)
            found[box] = True
        return data.reshape(self.shape)


def boxes_of(form: str, rest: list[Any], axes: list[int], sequences: list[list[int]]) -> list[tuple[slice, ...]]:
    """The cells of a partition in canonical order. `Tensor.assembled` checks that they cover everything once."""
    if form == "boxes":
        pairs = [(pick(sequences, low), pick(sequences, size)) for low, size in zip(*rest, strict=True)]
        check(len(pairs) == len(axes) > 0, "boxes of another number of axes")
        return list(zip(*([slice(a, a + n) for a, n in zip(*pair, strict=True)] for pair in pairs), strict=True))
    check(form in ("grid", "flat"), f"unknown form of a partition: {form}")
    cuts = [pick(sequences, index) for index in (rest if form == "flat" else rest[0])]
    for numbers, extent in zip(cuts, axes, strict=True):
        check(numbers[0] == 0 and numbers[-1] == extent and numbers == sorted(set(numbers)), "impossible cuts")
    return list(product(*([slice(a, b) for a, b in pairwise(numbers)] for numbers in cuts)))


def locate(body: Members, sequences: list[list[int]]) -> tuple[dict[str, Tensor], list[File]]:
    """All tensors, and all files with what their tensors and values take there."""
    files = [File(index, is_still=index in still(body, sequences)) for index in range(body["num_files"])]
    tensors: dict[str, Tensor] = {}
    tables = (body["dtype_table"], body["shape_table"], body["partition_table"])
    rows = zip(body["names"], body["dtypes"], body["shapes"], body["partitions"], strict=True)

    def place(row: tuple[str, int, int, int]) -> tuple[int, bool]:
        size = ITEMSIZES[pick(body["dtype_table"], row[1])]
        is_small = size * prod(pick(body["shape_table"], row[2])) <= 65536
        return -size, is_small and "small-last" in body["reader_features"]

    for name, *indexes in sorted(rows, key=place):
        dtype, shape, (form, *rest, owners) = map(pick, tables, indexes)
        tensor = tensors[name] = Tensor(dtype, shape, [prod(shape)] if form == "flat" else shape, [])
        code, digits = CODES.get(dtype, "U8"), len(str(prod(shape)))
        bound = len(json.dumps(name)) + len(code) + max(len(shape), 1) * (3 * digits + 3) + 96
        for file, box in zip(pick(sequences, owners), boxes_of(form, rest, tensor.axes, sequences), strict=True):
            check(all(0 <= x.start < x.stop <= n for x, n in zip(box, tensor.axes, strict=True)), f"{name}: a bad cell")
            sizes = [x.stop - x.start for x in box]
            nbytes = prod(sizes) * ITEMSIZES[dtype]
            is_whole = sizes == shape and name != "__metadata__"  # a flat range can be it only where there is one axis
            part = "" if is_whole else "@" + ",".join(f"{x.start}:{x.stop}" for x in box)
            listed = sizes if dtype in CODES else [nbytes]
            tensor.cells.append((file, pick(files, file).add(name + part, code, listed, nbytes, bound), box))
    for file, capacity, _ in body["values"]:
        check(8 <= capacity <= 1 << 31, "a value block has an impossible capacity")
        pick(files, file).add("@values", "U8", [capacity], capacity, 107 + len(str(capacity)))
    return tensors, files


def parse_values(data: bytes, paths: list[str], tensors: set[str]) -> list[tuple[str, list[Any]]]:
    """The paths and nodes of one value block. `tensors` are the names of all tensors."""
    length = int.from_bytes(data[:8], "little")
    check(length <= min(len(data) - 8, 1 << 30) and not any(data[8 + length :]), "the values have another length")
    rows = msgspec.msgpack.decode(data[8 : 8 + length], type=list[tuple[str, list[Any]]])
    check([path for path, _ in rows] == paths == sorted(known := set(paths)), "the values have other paths")
    for path, node in rows:
        state = node[1] if node[0] == "stateful" else node
        bare = kind, *rest = state[2] if state[0] == "encoded" else state
        check(path.count("/") < 128, "values are nested too deep")
        check(kind in WRAPPABLE or (bare == node and kind in ("open", "per_rank")), f"{path!r} is of an unknown kind")
        names = rest[-1] if kind in ("dict", "record") else map(str, range(rest[1])) if kind == "list" else ()
        check({f"{path}/{name}" if path else name for name in names} <= known, f"{path!r} misses entries")
        check(kind != "per_rank" or 0 < rest[0] <= 1 << 20, f"{path!r} is of an impossible number of ranks")
        for plane in rest[1] if kind == "planes" else ():
            name = plane.replace("%", "%25").replace("/", "%2F").replace("@", "%40") or "%empty"
            check(f"{path}/%plane={name}" in tensors, f"{path!r} misses planes")
        check(kind != "tensor" or path in tensors, f"there is no tensor {path!r}")
    return rows


class Loaded(NamedTuple):
    """A whole checkpoint: per tensor its dtype and elements, and the flat table of nodes, as MessagePack gives them."""

    place: list[int]
    step: int
    tensors: dict[str, tuple[str, npt.NDArray[np.void]]]
    values: dict[str, list[Any]]


def read(path: Path) -> Loaded:
    """Read a run's head, or a checkpoint folder."""
    commit = None if (path / "seal.json").exists() else head(path)
    folder = path / "checkpoints" / commit["checkpoint"] if commit else path
    seal = record(folder / "seal.json", "seal")
    data = (folder / "manifest.hfm").read_bytes()
    found = {"name": "manifest.hfm", "nbytes": len(data), "digest": digest(data)}
    check(seal["manifest"] | found == seal["manifest"], "the manifest is not the sealed one")
    body, sequences = parse_manifest(data)
    place = dict(zip(("epoch", "seq"), body["place"], strict=True))
    check(seal | {key: body[key] for key in ("checkpoint_id", "step")} | {"place": place} == seal, "another's manifest")
    if commit:
        check_commit(commit, seal, (folder / "seal.json").read_bytes(), body)
    located, files = locate(body, sequences)
    # All files are verified before memory is taken for tensors: what the manifest says of sizes is true then.
    pairs = zip(files, seal["files"], strict=True)
    sections = [file.verified(folder, body["checkpoint_id"], sealed) for file, sealed in pairs]
    tensors = {name: (tensor.dtype, tensor.assembled(sections)) for name, tensor in located.items()}
    named, blocks = {*tensors, *body["aliases"]}, body["values"]
    nodes = [row for file, room, paths in blocks for row in parse_values(sections[file][-room:], paths, named)]
    check(len(dict(nodes)) == len(nodes), "a value is stored twice")
    parts = {f"{path}/%rank={rank}" for path, node in nodes if node[0] == "per_rank" for rank in range(node[1])}
    check(parts <= dict(nodes).keys(), "the part of a rank is missing")
    return Loaded(body["place"], body["step"], tensors, dict(nodes))


def main(arguments: list[str]) -> int:
    try:
        loaded = read(Path(arguments[0]))
    except (OSError, zlib.error, msgspec.MsgspecError, ValueError, LookupError, TypeError, OverflowError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    tensors = {name: (digest(data.tobytes()), dtype, data.shape) for name, (dtype, data) in loaded.tensors.items()}
    report = loaded._asdict() | {"tensors": tensors, "values": {path: repr(row) for path, row in loaded.values.items()}}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
