"""Messages between keepers: what is sent is what arrives, and nothing else is understood."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import StorageError
from holdfast.format.records import Place
from holdfast.node_memory.parity_records import GroupNode, HeldRow, ParityGroup, ParityRecord, SlotDigests
from holdfast.node_memory.slots import Contents, SlotFile
from holdfast.peers.peer_messages import (
    CheckHeld,
    CopyKept,
    CopyWanted,
    Damaged,
    Declined,
    Finish,
    GetRange,
    GetSum,
    ListedSlot,
    ListedSlots,
    ListHeld,
    MarkProtected,
    NodesFailed,
    Noted,
    NoteProtected,
    NoteTrouble,
    NotTaken,
    OfferCopy,
    OfferParity,
    ParityWanted,
    PeerMessage,
    PrepareCopies,
    PutGeneration,
    PutRange,
    RebuildCopy,
    RequestRefused,
    SendCopies,
    Sent,
    SumHop,
    SumPart,
    Unprotected,
    decode_reply,
    decode_request,
    encode_message,
)
from tests.peers.stub_keeper import CHECKPOINT

SLOT = SlotDigests(5, (SlotFile(6, 0, 4096, 8192),), ("a" * 32,))
GROUP = ParityGroup((GroupNode("a", (SLOT,)), GroupNode("b", ())), 1)
RECORD = ParityRecord(GROUP, 1, 2, "c" * 32)
HOP = SumHop("127.0.0.1:9", 255, 10, 20, (SumPart(1, 2, 3),), 4, 5, 6)
CONTENTS = Contents("f" * 32, CHECKPOINT, Place(2, 3), 700, 5, 4096, 10**9, second=SlotFile(6, 10**9, 4096, 8192))
REQUESTS = (
    OfferCopy(CONTENTS, ("a" * 32, "b" * 64), 7),
    PutRange(2**63 - 1, 1 << 40, 1 << 30),
    PutGeneration(CHECKPOINT, 12),
    Finish(5),
    GetRange(CHECKPOINT, 5, 0, 1),
    NoteProtected(CHECKPOINT, (1, 2, 3), 4),
    NoteTrouble(2, "the peer is away"),
    MarkProtected(CHECKPOINT),
    OfferParity(CHECKPOINT, 3, (SLOT, SLOT)),
    GetSum(CHECKPOINT, 20, (HOP, HOP)),
    RebuildCopy(5, GROUP, (1,), ("127.0.0.1:9", ""), None),
    CheckHeld(CHECKPOINT, (1, 2), 2),
    PrepareCopies(7, 1 << 40, 2),
    ListHeld(),
    SendCopies(CHECKPOINT, (1, 2), "127.0.0.1:9"),
)
REPLIES = (
    CopyWanted(5, True),
    ListedSlots((ListedSlot(CHECKPOINT, SLOT),), (), (HeldRow(CHECKPOINT, RECORD),)),
    CopyKept(),
    Declined("no room", is_full=True),
    Unprotected("the peer is away"),
    NotTaken("there is no room"),
    Damaged("block 3"),
    Noted(),
    Sent(9),
    RequestRefused("?"),
    ParityWanted(True),
    NodesFailed((1, 2), (3,), "gone"),
)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_arrives_as_it_was_sent_and_is_no_reply(request_: PeerMessage) -> None:
    data = encode_message(request_)
    assert decode_request(data) == request_
    with pytest.raises(StorageError, match=r"storage\.peer.*a message that is none.*same version of Holdfast"):
        decode_reply(data)


@pytest.mark.parametrize("reply", REPLIES, ids=lambda each: type(each).__name__)
def test_a_reply_arrives_as_it_was_sent_and_is_no_request(reply: PeerMessage) -> None:
    data = encode_message(reply)
    assert decode_reply(data) == reply
    with pytest.raises(StorageError, match=r"storage\.peer"):
        decode_request(data)


@pytest.mark.parametrize(
    "tree",
    [
        ["PutRange", 1, -1, 5],
        ["PutRange", 1, 0, 2**63],
        ["PutRange", 1, 0],
        ["PutRange", 1, 0, 5, 5],
        ["MarkProtected", "../../etc/pass"],
        ["NoteProtected", CHECKPOINT, [-1]],
        ["OfferCopy", msgspec.to_builtins(CONTENTS), ["a" * 32] * 3, 7],
        ["OfferCopy", msgspec.to_builtins(CONTENTS), ["not hex"], 7],
        ["OfferParity", CHECKPOINT, 0, [[0, [], []]]],
        ["GetSum", CHECKPOINT, 5, []],
        ["GetSum", CHECKPOINT, 5, [["127.0.0.1:9", 256, 5, 5, [], 0, 0, 0]]],
        ["GetSum", CHECKPOINT, 5, [["127.0.0.1:9", 0, 5, 5, [], 0, 0, 0]]],
        ["GetSum", CHECKPOINT, 5, [["127.0.0.1:9", 1, 5, 5, [[-1, 0, 5]], 0, 0, 0]]],
        ["RebuildCopy", 5, [[], 1], [-1], [], None],
        ["Unknown"],
        [],
        None,
        msgspec.Raw(b"\x92\xa6Finish"),
        msgspec.Raw(b"\x92\xa6Fini\xff\xff\x01"),
        msgspec.Raw(b"\x92\xadMarkProtected\xb0" + b"\xff" * 16),
        msgspec.Raw(b"\x91" * 5000),
    ],
)
def test_what_no_keeper_sends_is_refused(tree: object) -> None:
    with pytest.raises(StorageError) as caught:
        decode_request(msgspec.msgpack.encode(tree))
    assert caught.value.code == "storage.peer"


def test_the_files_of_a_very_large_job_fit_into_one_message_and_no_more_than_the_limit_is_encoded() -> None:
    files = tuple(range(150_000))
    assert decode_request(encode_message(NoteProtected(CHECKPOINT, files, len(files)))) == NoteProtected(
        CHECKPOINT, files, len(files)
    )
    with pytest.raises(ValueError, match=r"RequestRefused has 2,000,0\d\d bytes, and 1,048,576 is the limit"):
        encode_message(RequestRefused("x" * 2_000_000))


def test_a_message_with_a_long_name_is_refused_by_a_short_error() -> None:
    with pytest.raises(StorageError) as caught:
        decode_request(msgspec.msgpack.encode(["x" * 5000]))
    assert len(str(caught.value)) < 700
