"""The manifest: tensors, partitions, owners and files; everything that a reader needs to find any byte of a checkpoint.

Its size is O(tensors) for regular sharding: partitions are rules, stored once for all tensors that are divided alike,
and `holdfast.format.sequences` compresses their integer sequences.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from math import prod
from operator import lt
from typing import Final, Self, TypeVar

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError, HoldfastError, IncompatibleError
from holdfast.format import sequences
from holdfast.format.dtypes import DTYPES
from holdfast.format.records import Count, Hex16, Hex32, Ordinal, Place, Seconds, parse_folder
from holdfast.geometry import Int64s, Shape
from holdfast.wording import count

NAME = "manifest.hfm"
MAGIC = b"HFMANI01"
_HEAD = struct.Struct("<8sQQQ16s")
#: A reader refuses a manifest that claims more before it allocates memory (random cuts of 8,960 ranks need 32 MiB).
MAX_NBYTES = 1 << 30
MAX_FILE_NBYTES = _HEAD.size + 2 * MAX_NBYTES
#: A reader refuses a body that claims to decompress to more than this many times its size, beyond a first MiB.
_MAX_RATIO = 64
_FREE_PACKED_NBYTES = 1 << 20
#: Most elements of one tensor, and most bytes of all data, so that sums stay within 64 bits.
MAX_NUMEL = 1 << 56
_MAX_DATA_NBYTES = 1 << 62
#: Most axes of a tensor: a numpy array cannot have more.
MAX_AXES = 64
MAX_FILES = 1 << 17
_FILE_NAME = re.compile(r"(data|still)-[0-9]{5,}\.safetensors")
_MARK_NAME = re.compile(r"still-[0-9]{5,}\.same\.json")
#: Most numbers that affine sequences may stand for, since these cost no bytes: a free amount, and a further amount per
#: partition and file.
_FREE_NUMBERS = 1 << 18
_NUMBERS_PER_CELL = 64
#: The feature of checkpoints whose small tensors lie together in a data file, behind the others of their element size.
SMALL_LAST: Final = "small-last"
#: The feature of checkpoints in which a rank may have a second file, for tensors that training leaves alone.
STILL_FILES: Final = "still-files"
#: The feature of checkpoints that may refer to still files of earlier ones.
REFERENCES: Final = "references"
KNOWN_FEATURES: Final = frozenset({SMALL_LAST, STILL_FILES, REFERENCES})


class Grid(msgspec.Struct, frozen=True, tag="grid", array_like=True, forbid_unknown_fields=True):
    """Cells between cut points. `cuts` has one sequence index per axis; `owners` is the sequence of the cells' files.

    Cells are in row-major order. Cut points rise strictly from 0 to the axis's extent, so an axis of extent 0 has one
    cut and no cell.
    """

    cuts: tuple[int, ...]
    owners: int


class FlatCuts(msgspec.Struct, frozen=True, tag="flat", array_like=True, forbid_unknown_fields=True):
    """Flat ranges between cut points that rise strictly from 0 to the number of elements; one owner file per range."""

    cuts: int
    owners: int


class Boxes(msgspec.Struct, frozen=True, tag="boxes", array_like=True, forbid_unknown_fields=True):
    """Free boxes in row-major order of their starts: sequences of starts and sizes per axis; one owner file per box."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    owners: int


Partition = Grid | FlatCuts | Boxes


class ValueBlock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values in a data file: the file, the reserved bytes of its ``@values`` entry, and the paths that it holds."""

    file: int
    capacity: int
    paths: tuple[str, ...]


class StateTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state's logical content, and the data file that holds each part of it.

    Tensor ``i`` is ``names[i]`` (sorted), of ``dtype_table[dtypes[i]]`` and ``shape_table[shapes[i]]``, divided by
    ``partition_table[partitions[i]]``. Owners in partitions are data files; `DecodedTable` says which rank wrote each
    and what it is called.
    """

    world_size: Ordinal
    reader_features: tuple[str, ...]
    names: tuple[str, ...]
    dtype_table: tuple[str, ...]
    dtypes: tuple[int, ...]
    shape_table: tuple[Shape, ...]
    shapes: tuple[int, ...]
    partition_table: tuple[Partition, ...]
    partitions: tuple[int, ...]
    aliases: dict[str, str]
    num_files: int
    writers: int
    values: tuple[ValueBlock, ...]
    sequences: tuple[sequences.Sequence, ...]


class Candidate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A still file of an earlier checkpoint that data file `file` may turn out to equal: the folder `checkpoint` holds
    it, and `content` is its content digest."""

    file: int
    checkpoint: str
    content: Hex32


class Manifest(StateTable, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a manifest: the table of a state, and the checkpoint that stores it.

    `diverged` names (sorted) the tensors whose copies on several ranks differed when this checkpoint was saved; one
    holder's copy of each was stored. `references` are the candidates of its still files, by ascending index; the key is
    there only with the feature `REFERENCES`.
    """

    checkpoint_id: Hex16
    run_id: Hex32
    place: tuple[Ordinal, Ordinal]
    step: Count
    created: Seconds
    metrics: dict[str, float]
    diverged: tuple[str, ...]
    references: tuple[Candidate, ...] = ()

    def with_references(self, references: tuple[Candidate, ...]) -> Self:
        """This body with other candidates, and with the feature that says whether there are any."""
        features = tuple(each for each in self.reader_features if each != REFERENCES)
        features += (REFERENCES,) if references else ()
        return msgspec.structs.replace(self, reader_features=features, references=references)


B = TypeVar("B", bound=StateTable)


class SequenceTable:
    """The integer sequences of a manifest under construction; equal sequences are stored once."""

    def __init__(self) -> None:
        self.sequences: list[sequences.Sequence] = []
        self.blobs: list[bytes] = []
        self._index: dict[bytes, int] = {}

    def add(self, values: Int64s) -> int:
        """Store the sequence `values` unless an equal one is stored. Returns its index."""
        key = values.tobytes()
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.sequences)
            sequence, blob = sequences.encode(values)
            self.sequences.append(sequence)
            self.blobs.append(blob)
        return index


class DecodedTable:
    """The table of a state, with access to its integer sequences, which are decoded on first use."""

    def __init__(self, body: StateTable, blob: bytes | memoryview) -> None:
        self.body = body
        self._blob = memoryview(blob)
        self._decoded: dict[int, Int64s] = {}
        self._starts = [0]
        for sequence in body.sequences:
            taken = sequence.nbytes if isinstance(sequence, sequences.DifferencePlanes) else 0
            if taken < 0:
                raise corrupt("a sequence has a negative length")
            self._starts.append(self._starts[-1] + taken)
        if self._starts[-1] != len(self._blob):
            raise corrupt(f"its sequences take {self._starts[-1]} bytes, but {len(self._blob)} are there")
        claimed = sum(sequences.affine_length(sequence) for sequence in body.sequences)
        if claimed > _FREE_NUMBERS + _NUMBERS_PER_CELL * body.num_files * (1 + len(body.partition_table)):
            raise corrupt(f"its sequences claim {count(claimed, 'number')} for {count(body.num_files, 'file')}")

    def sequence(self, index: int) -> Int64s:
        """The integers of sequence `index`. They are shared: callers must not write to them."""
        values = self._decoded.get(index)
        if values is None:
            blob = self._blob[self._starts[index] : self._starts[index + 1]]
            values = self._decoded[index] = sequences.decode(self.body.sequences[index], blob)
        return values

    @cached_property
    def writers(self) -> Int64s:
        """The rank that wrote each data file: ascending, and twice in a row for a rank with a moving and a still
        file."""
        written = self.sequence(self.body.writers)
        return written // 2 if STILL_FILES in self.body.reader_features else written

    @cached_property
    def _still(self) -> frozenset[int]:
        if STILL_FILES not in self.body.reader_features:
            return frozenset()
        return frozenset(np.flatnonzero(self.sequence(self.body.writers) % 2).tolist())

    def is_still(self, file: int) -> bool:
        """Whether data file number `file` holds tensors that training leaves alone."""
        return file in self._still

    def file_name(self, file: int) -> str:
        """The name of data file number `file`."""
        return file_name(file, still=self.is_still(file))

    @property
    def file_names(self) -> list[str]:
        """The names of all data files."""
        return [self.file_name(file) for file in range(self.body.num_files)]

    def dtype(self, tensor: int) -> str:
        """Logical dtype of tensor number `tensor`."""
        return self.body.dtype_table[self.body.dtypes[tensor]]

    def shape(self, tensor: int) -> Shape:
        """Global shape of tensor number `tensor`."""
        return self.body.shape_table[self.body.shapes[tensor]]


class DecodedManifest(DecodedTable):
    """A manifest with access to its integer sequences, which are decoded on first use."""

    body: Manifest

    def __init__(self, body: Manifest, blob: bytes | memoryview) -> None:
        super().__init__(body, blob)

    def with_body(self, body: Manifest) -> DecodedManifest:
        """This manifest with another body. Both share the sequences that are decoded already."""
        other = DecodedManifest(body, self._blob)
        other._decoded = self._decoded
        return other

    def encode(self) -> bytes:
        """The bytes of this manifest's file."""
        return encode(self.body, [self._blob])

    @property
    def place(self) -> Place:
        """The checkpoint's place."""
        return Place(*self.body.place)

    @cached_property
    def candidates(self) -> dict[int, Candidate]:
        """The candidates of its still files, by index."""
        return {each.file: each for each in self.body.references}


def file_name(index: int, *, still: bool = False) -> str:
    """Name of data file `index` in the checkpoint's folder."""
    return f"{'still' if still else 'data'}-{index:05d}.safetensors"


def is_file_name(name: str) -> bool:
    """Whether `name` is the name of a data file, as `file_name` makes them."""
    return _FILE_NAME.fullmatch(name) is not None


def is_still_name(name: str) -> bool:
    """Whether `name` is the name of a still file."""
    return name.startswith("still-") and is_file_name(name)


def mark_name(index: int) -> str:
    """Name of the mark that takes the place of still file `index`, which equals its candidate."""
    return f"still-{index:05d}.same.json"


def is_mark_name(name: str) -> bool:
    """Whether `name` is the name of a mark, as `mark_name` makes them."""
    return _MARK_NAME.fullmatch(name) is not None


def encode(body: StateTable, blobs: Iterable[bytes | memoryview]) -> bytes:
    """The bytes of a manifest file, or of a table that ranks send each other."""
    packed = msgspec.msgpack.encode(body)
    compressed = zlib.compress(packed, 6)
    if len(packed) > _unfolded_limit(len(compressed)):
        # Very repetitive names are compressed less: a reader could not tell them from a decompression bomb.
        plain = zlib.compressobj(6, strategy=zlib.Z_HUFFMAN_ONLY)
        compressed = plain.compress(packed) + plain.flush()
    blob = b"".join(blobs)
    digest = xxhash.xxh3_128(compressed)
    digest.update(blob)
    return _HEAD.pack(MAGIC, len(compressed), len(packed), len(blob), digest.digest()) + compressed + blob


def decode(data: bytes, *, path: str) -> DecodedManifest:
    """Check and decode a manifest file. Raises `CorruptError`, or `IncompatibleError` for an unknown feature."""
    with _naming(path):
        body, blob = _decode(data, Manifest)
        if not _ascends(body.diverged) or not set(body.names).issuperset(body.diverged):
            raise corrupt("the names of diverged tensors are not sorted and unique, or not names of tensors")
        manifest = DecodedManifest(body, blob)
        _check_references(manifest)
        return manifest


def decode_table(data: bytes, *, path: str) -> DecodedTable:
    """As `decode`, for the table of a state that no checkpoint stores."""
    with _naming(path):
        return DecodedTable(*_decode(data, StateTable))


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name `path` in the errors of a ``with`` block."""
    try:
        yield
    except HoldfastError as error:
        error.path = error.path or path
        error.message = f"{path}: {error.message}"
        raise


def _decode(data: bytes, kind: type[B]) -> tuple[B, memoryview]:
    """The body of type `kind`, checked, and the bytes of its sequences."""
    if len(data) < _HEAD.size or data[:8] != MAGIC:
        raise corrupt("it does not begin like a manifest")
    _, compressed_nbytes, packed_nbytes, blob_nbytes, digest = _HEAD.unpack_from(data)
    largest = max(packed_nbytes, compressed_nbytes, blob_nbytes)
    if not packed_nbytes or largest > MAX_NBYTES or packed_nbytes > _unfolded_limit(compressed_nbytes):
        raise corrupt(f"it claims to hold {packed_nbytes} + {blob_nbytes} bytes")
    if len(data) != _HEAD.size + compressed_nbytes + blob_nbytes:
        raise corrupt(f"it has {count(len(data), 'byte')} instead of {_HEAD.size + compressed_nbytes + blob_nbytes}")
    rest = memoryview(data)[_HEAD.size :]
    if xxhash.xxh3_128_digest(rest) != digest:
        raise corrupt("its digest does not match its bytes")
    inflate = zlib.decompressobj()
    try:
        packed = inflate.decompress(rest[:compressed_nbytes], packed_nbytes)
    except zlib.error as error:
        raise corrupt(f"it cannot be decompressed ({error})") from error
    if len(packed) != packed_nbytes or not inflate.eof or inflate.unused_data:
        raise corrupt("its body is longer or shorter than it claims")
    try:
        body = decode_msgpack(packed, kind)
        _check_keys(packed, body)
    except _UNDECODABLE as error:
        raise _unreadable(packed, error) from error
    _check_features(body.reader_features)
    _check_tensors(body)
    _check_values(body)
    _check_sequences(body)
    return body, rest[compressed_nbytes:]


def _unfolded_limit(compressed_nbytes: int) -> int:
    return max(_FREE_PACKED_NBYTES, _MAX_RATIO * compressed_nbytes)


#: The errors that msgspec raises for bytes that do not hold a type: a `ValueError` for strings that are not UTF-8, a
#: `RecursionError` for deep nesting.
_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class _Features(msgspec.Struct):
    reader_features: tuple[str, ...] = ()


class _Maps(msgspec.Struct):
    aliases: msgspec.Raw
    metrics: msgspec.Raw = msgspec.Raw(b"\x80")  # the empty map: only manifests have metrics


def _check_keys(packed: bytes, body: StateTable) -> None:
    """Raise `ValueError` where a map has a key twice: msgspec keeps the last value, and another reader the first."""
    maps = decode_msgpack(packed, _Maps)
    sizes = [
        (packed, len(body.__struct_fields__) - (isinstance(body, Manifest) and not body.references)),
        (maps.metrics, len(body.metrics) if isinstance(body, Manifest) else 0),
        (maps.aliases, len(body.aliases)),
    ]
    if any(_map_size(bytes(raw)[:5]) != size for raw, size in sizes):
        raise ValueError("an object has a key twice")


def _map_size(head: bytes) -> int:
    """Number of entries of a MessagePack map, read from its first bytes."""
    width = {0xDE: 2, 0xDF: 4}.get(head[0])
    return head[0] & 0x0F if width is None else int.from_bytes(head[1 : 1 + width], "big")


def _unreadable(packed: bytes, error: Exception) -> HoldfastError:
    """The error for a body that this version cannot decode: `IncompatibleError` for an unknown feature, else damage."""
    try:
        _check_features(decode_msgpack(packed, _Features).reader_features)
    except IncompatibleError as unknown:
        return unknown
    except _UNDECODABLE:
        pass  # not even the features can be read: report the first error
    return corrupt(f"its body is malformed ({error})")


def _check_features(features: tuple[str, ...]) -> None:
    unknown = sorted(set(features) - KNOWN_FEATURES)
    if unknown:
        raise IncompatibleError(
            f"The checkpoint needs reader features that this version does not have: {', '.join(unknown):.200}.",
            code="incompatible.feature",
            action="Read it with a newer holdfast.",
        )


def _check_tensors(body: StateTable) -> None:
    """Refuse indexes outside their tables, names that are not sorted and unique, impossible shapes and dtypes."""
    num_tensors = len(body.names)
    if not num_tensors == len(body.dtypes) == len(body.shapes) == len(body.partitions):
        raise corrupt("its tensor columns have different lengths")
    for column, table in (
        (body.dtypes, len(body.dtype_table)),
        (body.shapes, len(body.shape_table)),
        (body.partitions, len(body.partition_table)),
    ):
        if num_tensors and not (min(column) >= 0 and max(column) < table):
            raise corrupt("a tensor column points outside its table")
    if not _ascends(body.names):
        raise corrupt("its tensor names are not sorted and unique")
    unknown = sorted(set(body.dtype_table) - DTYPES.keys())
    if unknown:
        raise corrupt(f"it names unknown dtypes: {', '.join(unknown):.200}")
    _check_sizes(body)
    names = set(body.names)
    if not names.issuperset(body.aliases.values()) or not names.isdisjoint(body.aliases):
        raise corrupt("an alias points to no tensor, or shadows one")


def _check_sizes(body: StateTable) -> None:
    for shape in set(body.shape_table):  # each distinct shape once: a hostile table may repeat one a million times
        if len(shape) > MAX_AXES or min(shape, default=0) < 0:
            raise corrupt("a shape has a negative extent or too many axes")
        if prod(filter(None, shape)) > MAX_NUMEL:  # extents of 0 do not count: no array can have the others either
            raise corrupt("a shape has more elements than any file can hold")
    total = data_nbytes(body)
    if total > _MAX_DATA_NBYTES:
        raise corrupt(f"its tensors have {count(total, 'byte')}, more than any storage can hold")


def data_nbytes(body: StateTable) -> int:
    """Bytes of all data sections: those of all tensors, and those reserved for values."""
    kinds = Counter(zip(body.dtypes, body.shapes, strict=True))
    itemsizes = [DTYPES[name].itemsize for name in body.dtype_table]
    tensors = sum(n * itemsizes[dtype] * prod(body.shape_table[shape]) for (dtype, shape), n in kinds.items())
    return tensors + sum(block.capacity for block in body.values)


def _ascends(names: tuple[str, ...]) -> bool:
    return all(map(lt, names, islice(names, 1, None)))


def _check_values(body: StateTable) -> None:
    files = [block.file for block in body.values]
    if not 0 <= body.num_files <= MAX_FILES:
        raise corrupt(f"it claims to have {count(body.num_files, 'file')}")
    if any(not 0 <= file < body.num_files for file in files) or len(set(files)) != len(files):
        raise corrupt("values are in a file that does not exist, or twice in one")
    paths = [path for block in body.values for path in block.paths]
    if len(set(paths)) != len(paths):
        raise corrupt("a value is in two places")
    if any(not 8 <= block.capacity <= 2 * MAX_NBYTES for block in body.values):
        raise corrupt("values have an impossible size")


def _check_sequences(body: StateTable) -> None:
    used = [body.writers, *(index for part in body.partition_table for index in _sequences_of(part))]
    if min(used) < 0 or max(used) >= len(body.sequences):
        raise corrupt("a partition names a sequence that does not exist")


def _check_references(manifest: DecodedManifest) -> None:
    body = manifest.body
    files = [each.file for each in body.references]
    if bool(files) != (REFERENCES in body.reader_features):
        raise corrupt("its list of references does not fit its reader features")
    if not all(map(lt, files, islice(files, 1, None))) or not all(0 <= file < body.num_files for file in files):
        raise corrupt("its references are not in the order of its files")
    if not all(manifest.is_still(file) for file in files):
        raise corrupt("it refers to a file of another checkpoint for tensors that training changes")
    if any(parse_folder(each.checkpoint) is None for each in body.references):
        raise corrupt("a reference names no folder of a checkpoint")


def _sequences_of(partition: Partition) -> tuple[int, ...]:
    if isinstance(partition, Grid):
        return (*partition.cuts, partition.owners)
    if isinstance(partition, FlatCuts):
        return (partition.cuts, partition.owners)
    return (*partition.starts, *partition.sizes, partition.owners)


def corrupt(what: str) -> CorruptError:
    """The error for a damaged manifest; `what` is a clause that names the damage."""
    return CorruptError(
        f"The manifest is damaged: {what:.400}.",
        code="corrupt.manifest",
        action="Load another checkpoint of the run, or another copy of this one.",
    )
