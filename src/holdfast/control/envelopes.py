"""What ranks put under keys for each other: messages with their errors, encoded."""

from __future__ import annotations

import struct
from typing import Any, Final

import msgspec

from holdfast.control.processes import Process
from holdfast.decoding import decode_msgpack
from holdfast.errors import ErrorWire, HoldfastError, from_wire, to_wire

#: A message goes in chunks; the first begins with how many there are.
NUM_CHUNKS: Final = struct.Struct(">I")
#: A message for others, or why there is none.
Outcome = bytes | Exception


class RankEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One rank's contribution to a gather. The first of an operation says which process the rank is."""

    phase: str
    label: str
    step: int | None
    payload: bytes
    error: ErrorWire | None
    process: Process | None = None


class GroupEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """What the first rank of a group collected from its members, in rank order, and who was missing."""

    members: tuple[RankEnvelope, ...]
    absent: tuple[int, ...]


class Broadcast(RankEnvelope, frozen=True, array_like=True):
    """What rank 0 tells all ranks. The first of an operation says which process rank 0 is. An error is about the
    operation of `step`, which may be an earlier one than that of rank 0."""


def encoded(message: object) -> bytes:
    """A message as MessagePack; bytes as they are."""
    return message if isinstance(message, bytes) else msgspec.msgpack.encode(message)


def encoded_outcome(outcome: object) -> Outcome:
    """The same, or the error that is there in its place, or that encoding raises."""
    try:
        return outcome if isinstance(outcome, Exception) else encoded(outcome)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for a message
        return error


def decoded(payload: bytes, kind: Any) -> Any:
    """The message of type `kind` that `encoded` wrote."""
    return payload if kind is bytes else decode_msgpack(payload, kind)


def payload_of(down: Broadcast) -> bytes:
    """What was broadcast; raises the error that was."""
    if down.error is not None:
        raise from_wire(down.error)
    return down.payload


def packed(message: msgspec.Struct) -> bytes:
    """A small message as it is stored under its key."""
    return first_chunk(1, msgspec.msgpack.encode(message))


def first_chunk(num_chunks: int, first: bytes) -> bytes:
    """The first chunk of a message as it is stored."""
    return NUM_CHUNKS.pack(num_chunks) + first


def error_wire(error: Exception) -> ErrorWire:
    """An error as it travels; one that is none of ours is ``unexpected``."""
    if isinstance(error, HoldfastError):
        return to_wire(error)
    unexpected = HoldfastError(
        f"{type(error).__name__}: {error}.",
        code="unexpected",
        action="The log of the rank that failed has the traceback.",
    )
    return to_wire(unexpected)
