"""The proof that both ends of a connection know the secret of their job.

    client                              server
    hello: magic, version, role, nonce  ->
                                        <-  hello: magic, version, role, nonce
    proof                               ->
                                        <-  verdict, proof

A proof is the HMAC-SHA256 of the prover's role and of both hellos. It convinces because of what it binds:

* Both nonces are random, and each end chooses one. A recorded conversation, played again, meets another nonce.
* The roles differ. Hellos or proofs that are sent back to their sender have its own role, and are refused.
* The version is part of the hellos. Nobody in between can make both ends use an older one.

The magic and the version come first and never change their places, so that each version can tell the other ends what
it is. All frames have a fixed size of at most 43 bytes, and one deadline covers all of them. The handshake keeps
strangers away; it does not encrypt or sign what follows. Somebody who can change packets between the nodes can read and
change what passes. (Digests find changes by accident: each message has one, and keepers compare those of files.)
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

from holdfast.peers.peer_errors import not_our_peer, peer_failed
from holdfast.peers.wire import Deadline, Wire

MAGIC: Final = b"HFPEERS\n"
VERSION: Final = 1
#: A secret has at least so many bytes.
MIN_SECRET_NBYTES: Final = 16

#: Magic, version, role and nonce.
HELLO: Final = struct.Struct("<8sHc32s")
#: Verdict and proof.
VERDICT: Final = struct.Struct("<B32s")
_NONCE_NBYTES: Final = 32
_PROOF_NBYTES: Final = 32

_CLIENT: Final = b"C"
_SERVER: Final = b"S"

_SAME_VERSION: Final = "Run the same version of Holdfast on all nodes."
_OTHER_PROGRAM: Final = "Look which program uses that port, and restart the job: its keepers then choose other ports."
_NEW_TABLE: Final = (
    "Holdfast tries again: after a restart of the job, a keeper may learn of the new secret a moment later."
)


class Verdict(IntEnum):
    """The server's answer to the proof of a client."""

    WELCOME = 1
    WRONG_SECRET = 2
    #: The proof is right, but the server serves as many connections as it can.
    FULL = 3


class _Hello(NamedTuple):
    magic: bytes
    version: int
    role: bytes
    nonce: bytes


def check_secret(secret: bytes) -> None:
    """Raise ValueError for a secret that somebody could guess."""
    if len(secret) < MIN_SECRET_NBYTES:
        raise ValueError(f"a secret has at least {MIN_SECRET_NBYTES} bytes, not {len(secret)}")


def introduce(wire: Wire, address: str, *, secret: bytes, deadline: Deadline) -> None:
    """Prove to the server at `address` that this end knows `secret`, and have it prove the same.

    Raises:
        ConfigurationError: it is no keeper of this job and version, code ``config.peer``.
        StorageError: it serves as many connections as it can, code ``storage.peer``.
        OSError: it closed the connection, or the deadline is over.
    """
    mine = _hello(_CLIENT)
    wire.send(mine, deadline)
    theirs = _receive_hello(wire, deadline)
    hello = _Hello(*HELLO.unpack(theirs)) if theirs else None
    if hello is None:
        raise not_our_peer(address, "is no keeper of Holdfast", action=_OTHER_PROGRAM)
    if hello.version != VERSION:
        versions = f"speaks version {hello.version} of the protocol between keepers, and this node version {VERSION}"
        raise not_our_peer(address, versions, action=_SAME_VERSION)
    if hello.role != _SERVER:
        raise not_our_peer(address, "sends messages back to their sender", action=_OTHER_PROGRAM)
    wire.send(_proof(secret, _CLIENT, mine, theirs), deadline)
    verdict, proof = VERDICT.unpack(wire.receive(VERDICT.size, deadline))
    if verdict == Verdict.WRONG_SECRET:
        raise not_our_peer(address, "does not know the secret of this job", action=_NEW_TABLE, retryable=True)
    if not hmac.compare_digest(proof, _proof(secret, _SERVER, mine, theirs)):
        raise not_our_peer(address, "did not prove that it knows the secret of this job", action=_OTHER_PROGRAM)
    if verdict != Verdict.WELCOME:
        raise peer_failed(address, "serves as many connections as it can")


def admit(wire: Wire, *, secret: bytes, deadline: Deadline, has_room: Callable[[], bool]) -> str:
    """Have the client prove that it knows `secret`, and prove the same to it. Calls `has_room` once the client has.

    Returns why the client is refused, or an empty text.

    Raises:
        OSError: the client closed the connection, or the deadline is over.
    """
    theirs = _receive_hello(wire, deadline)
    if not theirs:
        return "it is no keeper of Holdfast"
    mine, hello = _hello(_SERVER), _Hello(*HELLO.unpack(theirs))
    wire.send(mine, deadline)  # to any keeper: it tells a client of another version which one this is
    if hello.version != VERSION:
        return f"it speaks version {hello.version} of the protocol between keepers, and this node version {VERSION}"
    if hello.role != _CLIENT:
        return "it sends messages back to their sender"
    if not hmac.compare_digest(wire.receive(_PROOF_NBYTES, deadline), _proof(secret, _CLIENT, theirs, mine)):
        wire.send(VERDICT.pack(Verdict.WRONG_SECRET, bytes(_PROOF_NBYTES)), deadline)
        return "it does not know the secret of the job"
    verdict = Verdict.WELCOME if has_room() else Verdict.FULL
    wire.send(VERDICT.pack(verdict, _proof(secret, _SERVER, theirs, mine)), deadline)
    return "" if verdict == Verdict.WELCOME else "this node serves as many connections as it can"


def _hello(role: bytes) -> bytes:
    return HELLO.pack(MAGIC, VERSION, role, secrets.token_bytes(_NONCE_NBYTES))


def _receive_hello(wire: Wire, deadline: Deadline) -> bytes:
    """The hello of the other end; empty where its first bytes are those of another protocol."""
    magic = wire.receive(len(MAGIC), deadline)
    return magic + wire.receive(HELLO.size - len(MAGIC), deadline) if magic == MAGIC else b""


def _proof(secret: bytes, role: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    return hmac.digest(secret, role + client_hello + server_hello, "sha256")
