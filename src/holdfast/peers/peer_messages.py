"""The messages between keepers: requests, replies, and their encoding.

A message is MessagePack of at most `MAX_NBYTES`. A reader decodes it to one of the types below or refuses it: nothing
in it is executed. The bytes of files travel beside the messages (`transport`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec

from holdfast.decoding import decode_msgpack
from holdfast.format.records import Count, Hex16, HexDigest
from holdfast.node_memory.parity_records import HeldRow, ParityGroup, SlotDigests
from holdfast.node_memory.slots import Contents
from holdfast.peers.peer_errors import not_understood
from holdfast.wording import count

#: Size limit of an encoded message. A job of 100,000 files fits.
MAX_NBYTES: Final = 2**20
#: Limit for the characters of the trouble that a node tells others.
MAX_TROUBLE_LEN: Final = 4096
#: Characters of what is wrong with a message that its error has: that may quote the message.
_TOLD_LEN: Final = 300

_Trouble = Annotated[str, msgspec.Meta(max_length=MAX_TROUBLE_LEN)]
_Digests = Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=2)]


class PeerMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """The base of all messages."""


class OfferCopy(PeerMessage, frozen=True):
    """Offer a copy of the sealed slot of `rank`: its contents, and the digest of each of its files.

    Answered by `CopyWanted`, `CopyKept` where the peer has this copy, or `Declined`.
    """

    contents: Contents
    digests: _Digests
    rank: Count


class PrepareCopies(PeerMessage, frozen=True):
    """Have memory for `num_copies` copies of slots of `rank` with up to `nbytes`, before they are offered. Answered by
    `Noted` or `Declined`."""

    rank: Count
    nbytes: Count
    num_copies: Annotated[int, msgspec.Meta(ge=1, le=2)]


class PutRange(PeerMessage, frozen=True):
    """Send `nbytes` of the copy `token`, from `start` of its region on. The bytes follow. Answered by `Noted`."""

    token: Count
    start: Count
    nbytes: Count


class PutGeneration(PeerMessage, frozen=True):
    """Send the generation file of a checkpoint, which has `nbytes`. The bytes follow. Answered by `Noted`."""

    checkpoint_id: Hex16
    nbytes: Count


class Finish(PeerMessage, frozen=True):
    """All ranges of the copy `token` were sent. Answered by `CopyKept` or `Damaged`."""

    token: Count


class GetRange(PeerMessage, frozen=True):
    """Ask for `nbytes` of data file number `file` of a checkpoint, from `start` on, to make parity of them. Answered by
    `Sent`; the bytes follow, at the pace of copies."""

    checkpoint_id: Hex16
    file: Count
    start: Count
    nbytes: Count


class OfferParity(PeerMessage, frozen=True):
    """Offer the sealed slots of a checkpoint that node number `sender` of the table of peers has, all of them, for the
    rows of parity that the peer keeps. It asks for their bytes by `GetRange`.

    Answered by `ParityWanted`, `CopyKept` where the rows are complete, or `Declined`.
    """

    checkpoint_id: Hex16
    sender: Count
    slots: tuple[SlotDigests, ...]


class SumPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The `nbytes` from `start` of data file number `file`."""

    file: Count
    start: Count
    nbytes: Count


class SumHop(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node of a chain. The keeper at `address` adds the product of `factor` with `nbytes` of its own, and
    hands on `sum_nbytes` of the sum. Its own bytes are `parts` of its data files, one after the other; without parts,
    those from `start` of its row of parity of stripe number `stripe`."""

    address: str
    factor: Annotated[int, msgspec.Meta(ge=1, le=255)]
    nbytes: Count
    sum_nbytes: Count
    parts: tuple[SumPart, ...]
    stripe: Count = 0
    row: Count = 0
    start: Count = 0


class GetSum(PeerMessage, frozen=True):
    """Ask the last of `hops` for its sum of a chain, which has `nbytes`. It asks the one before it in the same way.
    Answered by `Sent`; the bytes follow."""

    checkpoint_id: Hex16
    nbytes: Count
    hops: Annotated[tuple[SumHop, ...], msgspec.Meta(min_length=1)]


class RebuildCopy(PeerMessage, frozen=True):
    """Rebuild the copy `token` from the parity of a `group` of which the nodes with the numbers `lost` are lost. The
    keepers of the others are at `addresses` ("" for lost ones), and the peer is number `own` or none of them (None).
    Answered by `CopyKept`, `NodesFailed`, or `Declined` where the cause is not known."""

    token: Count
    group: ParityGroup
    lost: tuple[Count, ...]
    addresses: tuple[str, ...]
    own: Count | None


class CheckHeld(PeerMessage, frozen=True):
    """Hash again what the peer has of a checkpoint: its own slots with these `files`, and `num_rows` of parity.
    Answered by `Noted`, or by `Damaged` where something has changed or is gone."""

    checkpoint_id: Hex16
    files: tuple[Count, ...]
    num_rows: Count


class ListHeld(PeerMessage, frozen=True):
    """Ask which sealed slots the peer has, which copies of slots of other nodes, and which rows of parity. Answered by
    `ListedSlots`."""


class SendCopies(PeerMessage, frozen=True):
    """Have the peer send copies of its slots with these `files` of a checkpoint, or of those that it has copies of, to
    the keeper at `address`, which knows the same secret. Answered by `CopyKept` when that has all of them, by
    `NotTaken`, or by `Declined`."""

    checkpoint_id: Hex16
    files: tuple[Count, ...]
    address: str


class NoteProtected(PeerMessage, frozen=True):
    """Say that all copies of these data files of a checkpoint, which has `num_files`, are kept. Answered by `CopyKept`
    where those of all its files are: the sender then marks it; by `Unprotected` where another node has told why its
    slots cannot be protected; or else by `Noted`."""

    checkpoint_id: Hex16
    files: tuple[Count, ...]
    num_files: Count


class NoteTrouble(PeerMessage, frozen=True):
    """Say why slots of node number `sender` of the table of peers cannot be protected now. Answered by `Noted`."""

    sender: Count
    trouble: _Trouble


class MarkProtected(PeerMessage, frozen=True):
    """Say that every file of a checkpoint has all its copies. Answered by `Noted`."""

    checkpoint_id: Hex16


class CopyWanted(PeerMessage, frozen=True):
    """The peer has room for the copy, which the sender calls `token` from now on. With `needs_generation`, the peer
    lacks the generation file of the checkpoint, and needs it first."""

    token: Count
    needs_generation: bool


class CopyKept(PeerMessage, frozen=True):
    """The peer holds the copy, or all its rows of parity of the checkpoint, whole and verified; or, as the answer to
    `NoteProtected`, all nodes have said so."""


class ParityWanted(PeerMessage, frozen=True):
    """The rows of the peer are not complete yet. With `needs_generation`, the peer lacks the generation file of the
    checkpoint, and needs it first."""

    needs_generation: bool


class ListedSlot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sealed slot of a checkpoint."""

    checkpoint_id: Hex16
    slot: SlotDigests


class ListedSlots(PeerMessage, frozen=True):
    """The sealed slots of the peer's node, its copies of others, and its rows of parity."""

    own: tuple[ListedSlot, ...]
    copies: tuple[ListedSlot, ...] = ()
    rows: tuple[HeldRow, ...] = ()


class NodesFailed(PeerMessage, frozen=True):
    """The nodes of the group with these `numbers` found damage in what they have, and the `silent` ones did not answer:
    their keepers may stand still, or have died, with all memory intact."""

    numbers: tuple[Count, ...]
    silent: tuple[Count, ...]
    reason: str


class Declined(PeerMessage, frozen=True):
    """The peer does not take the copy now. Training goes on. `is_full`: its memory cannot be used for it."""

    reason: str
    is_full: bool = False


class NotTaken(PeerMessage, frozen=True):
    """The node that was to get copies has no memory for them: `reason` is its own."""

    reason: str


class Unprotected(PeerMessage, frozen=True):
    """The checkpoint is not protected yet: `reason` says why slots of another node cannot be."""

    reason: _Trouble


class Damaged(PeerMessage, frozen=True):
    """The bytes that came do not match their digests. The peer has dropped the copy."""

    reason: str


class Noted(PeerMessage, frozen=True):
    """The request was carried out."""


class Sent(PeerMessage, frozen=True):
    """`nbytes` of the requested range follow."""

    nbytes: Count


class RequestRefused(PeerMessage, frozen=True):
    """The peer did not understand the request, or could not carry it out."""

    reason: str


Put: TypeAlias = PutRange | PutGeneration
Get: TypeAlias = GetRange | GetSum
PeerRequest: TypeAlias = (
    PrepareCopies
    | OfferCopy
    | OfferParity
    | Put
    | Get
    | Finish
    | RebuildCopy
    | CheckHeld
    | ListHeld
    | SendCopies
    | NoteProtected
    | NoteTrouble
    | MarkProtected
)
PeerReply: TypeAlias = (
    CopyWanted
    | CopyKept
    | ParityWanted
    | ListedSlots
    | NodesFailed
    | Declined
    | NotTaken
    | Unprotected
    | Damaged
    | Noted
    | Sent
    | RequestRefused
)


def encode_message(message: PeerMessage) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: they would be more than `MAX_NBYTES`.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_NBYTES:
        name, size = type(message).__name__, count(len(data), "byte")
        raise ValueError(f"the message {name} has {size}, and {MAX_NBYTES:,} is the limit")
    return data


def decode_request(data: bytes) -> PeerRequest:
    """The request that `data` is.

    Raises:
        StorageError: it is no request, code ``storage.peer``.
    """
    request: PeerRequest = _decoded(data, PeerRequest)
    return request


def decode_reply(data: bytes) -> PeerReply:
    """The reply that `data` is.

    Raises:
        StorageError: it is no reply, code ``storage.peer``.
    """
    reply: PeerReply = _decoded(data, PeerReply)
    return reply


def _decoded(data: bytes, kind: object) -> Any:
    try:
        return decode_msgpack(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        told = str(error)
        told = told if len(told) <= _TOLD_LEN else f"{told[:_TOLD_LEN]}..."
        raise not_understood(f"a message that is none: {told}") from error
