"""Records of rows of parity: what a row is the parity of, and by which digests that is verified.

A row of parity lies in a slot of its own kind (`SlotKind.PARITY`). The contents in its cell name the checkpoint, and
have the number of the stripe for a file. Behind the parity lies the record, whose digest the cell has: it replaces what
is lost with a node, which slots that had and with which digests.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError
from holdfast.format.records import Count, Hex16, HexDigest
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotRecord, SlotState
from holdfast.protection.stripes import LineFile, NodeLine, Striping
from holdfast.store.base import Bytes

_LENGTH: Final = struct.Struct("<Q")


class SlotDigests(msgspec.Struct, frozen=True, array_like=True):
    """The files in a sealed slot of `rank`, and the digest of each."""

    rank: Count
    files: Annotated[tuple[SlotFile, ...], msgspec.Meta(min_length=1, max_length=2)]
    digests: Annotated[tuple[HexDigest, ...], msgspec.Meta(min_length=1, max_length=2)]

    @staticmethod
    def of(slot: Slot) -> SlotDigests:
        """Those of a hashed `slot`."""
        assert slot.record.contents is not None
        return SlotDigests(slot.rank, slot.record.contents.files, tuple(filter(None, slot.record.digests)))


class GroupNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of a group that shares parity, and its sealed slots of a checkpoint."""

    identity: str
    slots: tuple[SlotDigests, ...]

    @property
    def files(self) -> dict[int, str]:
        """The digest of each data file of the node, by number."""
        return {part.file: digest for slot in self.slots for part, digest in zip(slot.files, slot.digests, strict=True)}


class ParityGroup(msgspec.Struct, frozen=True, array_like=True):
    """The `nodes` of a group in their order, and how many of them may be lost."""

    nodes: tuple[GroupNode, ...]
    losses: Count

    @property
    def striping(self) -> Striping:
        """The stripes of the group. Raises `ValueError` for a group that no keeper makes."""
        return Striping(tuple(map(_line, self.nodes)), self.losses)


class ParityRecord(msgspec.Struct, frozen=True, array_like=True):
    """A row of parity: number `row` of stripe number `stripe` of a `group`. `digest` is that of the digests of its
    blocks."""

    group: ParityGroup
    stripe: Count
    row: Count
    digest: str = ""


class HeldRow(msgspec.Struct, frozen=True, array_like=True):
    """A complete row of parity on a node, of a checkpoint."""

    checkpoint_id: Hex16
    record: ParityRecord


def _line(node: GroupNode) -> NodeLine:
    files = sorted(part for slot in node.slots for part in map(_line_file, slot.files))
    return NodeLine(node.identity, tuple(files))


def _line_file(part: SlotFile) -> LineFile:
    return LineFile(part.file, part.data_start, part.nbytes)


def needed_nbytes(parity_nbytes: int, record: ParityRecord) -> int:
    """The size of a slot for a row of parity of so many bytes with this `record`, whose digest may be missing yet."""
    return parity_nbytes + _LENGTH.size + len(msgspec.msgpack.encode(record)) + 2 * 64


def parity_in(slot: Slot) -> Bytes:
    """The parity in a slot."""
    contents = slot.record.contents
    assert contents is not None
    return slot.data[: contents.nbytes]


def finish_row(slot: Slot, contents: Contents, record: ParityRecord) -> None:
    """Write the `record` behind the parity in `slot`, which this process was filling, and make the slot HELD."""
    data = msgspec.msgpack.encode(record)
    end = contents.nbytes + _LENGTH.size
    slot.data[contents.nbytes : end] = np.frombuffer(_LENGTH.pack(len(data)), np.uint8)
    slot.data[end : end + len(data)] = np.frombuffer(data, np.uint8)
    slot.advance(SlotRecord(SlotState.STAGED, contents))
    slot.advance(SlotRecord(SlotState.HELD, contents, _digest(data)))


def record_of(slot: Slot) -> ParityRecord:
    """The record of a HELD row of parity. Raises `CorruptError` where it is damaged."""
    contents = slot.record.contents
    assert contents is not None
    end = contents.nbytes + _LENGTH.size
    (length,) = _LENGTH.unpack(slot.data[contents.nbytes : end].tobytes().ljust(_LENGTH.size, b"\0"))
    data = slot.data[end : end + length].tobytes()
    if _digest(data) == slot.record.digest:
        with suppress(msgspec.DecodeError):  # it counts as damaged
            return decode_msgpack(data, ParityRecord)
    raise CorruptError(
        f"the record of the parity in '{slot.path}' is damaged.",
        code="corrupt.slot",
        action="Check the memory of this machine. Holdfast does without that parity.",
        path=str(slot.path),
        step=contents.step,
        tier="node memory",
    )


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
