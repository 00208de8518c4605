"""Notes in a run's folder in memory about the keepers of other nodes: who they are, and what each sends to whom.

The ranks of a job write the secret first. A keeper that finds it listens, and writes its port. When the ranks of all
nodes have exchanged the addresses, they write the table. A keeper that is started later finds all of them, and listens
at the same port, so its peers need not know of its death. Each file is replaced as a whole.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Annotated, Final, Literal, TypeAlias, TypeVar

import msgspec
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import ConfigurationError
from holdfast.node_memory.generations import protected_ids, unmark_protected
from holdfast.node_memory.node_folder import NodeFolder

_SECRET_NAME: Final = "peers.secret"  # noqa: S105 - the name of a file
_PORT_NAME: Final = "peers.port"
_TABLE_NAME: Final = "peers.table"
_TROUBLE_NAME: Final = "peers.trouble"
_ELSEWHERE_NAME: Final = "peers.elsewhere"
_SPEED_NAME: Final = "peers.speed"

_Note = TypeVar("_Note", bound=msgspec.Struct)

#: The ways in which keepers keep out of the way of training: they learn whether it uses the network; they suppose that
#: it does; or they do not care.
PaceMode: TypeAlias = Literal["auto", "idle", "none"]
#: The least limit of the bytes that a node sends: peers end a transfer that is much slower.
MIN_PROTECT_BYTES_PER_S: Final = 1_000_000


class PeerSecret(msgspec.Struct, frozen=True, array_like=True):
    """The secret of a job, which its keepers prove to each other, and the address of this node's network."""

    secret: bytes
    host: str


class PeerPort(msgspec.Struct, frozen=True, array_like=True):
    """The port at which the keeper listens for those that know the secret with this `secret_digest`; `error` says why
    it does not."""

    secret_digest: bytes
    port: int = 0
    error: str = ""


class PeerNode(msgspec.Struct, frozen=True, array_like=True):
    """A node of the job: the identity of its folder, and the address of its keeper."""

    identity: str
    address: str


class PeerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """The bytes per second at which this node has last sent copies to others."""

    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]


class ParityTable(msgspec.Struct, frozen=True, array_like=True):
    """The `groups` of nodes that share parity, as numbers of nodes in the order of each group, of which `losses` may be
    lost; and the ranks of each node."""

    losses: int
    groups: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[int, ...], ...]


class PacingRules(msgspec.Struct, frozen=True, array_like=True):
    """The pace at which keepers send copies, and the most bytes that each node sends in a second."""

    mode: PaceMode = "auto"
    bytes_per_s: Annotated[float, msgspec.Meta(ge=MIN_PROTECT_BYTES_PER_S)] | None = None


class Adoption(msgspec.Struct, frozen=True, array_like=True):
    """The `files` of a checkpoint whose owners are lost, and for each the number of the node, in `nodes`, that protects
    its copy as if it were a slot of its own."""

    checkpoint_id: str
    files: tuple[int, ...]
    nodes: tuple[int, ...]


class PeerTable(msgspec.Struct, frozen=True, array_like=True):
    """The nodes of a job, of which this one is number `own`. For each there are the numbers of the nodes to which it
    sends copies of its slots; or `parity` says which nodes keep parity for each other. They send at the pace of
    `pacing`. `secret_digest` is that of the job's secret. `adoption` tells of nodes that were lost before the job."""

    secret_digest: bytes
    own: int
    nodes: tuple[PeerNode, ...]
    targets: tuple[tuple[int, ...], ...]
    parity: ParityTable | None = None
    pacing: PacingRules = PacingRules()
    adoption: Adoption | None = None

    @property
    def is_sound(self) -> bool:
        """Whether all numbers are those of nodes."""
        groups = () if self.parity is None else self.parity.groups
        adopters = () if self.adoption is None else self.adoption.nodes
        num_nodes = len(self.nodes)
        numbers = {self.own, *(number for each in (*self.targets, *groups, adopters) for number in each)}
        if not numbers <= set(range(num_nodes)) or len(self.targets) != num_nodes:
            return False
        return self.parity is None or (
            len(self.parity.ranks) == num_nodes and sorted(sum(groups, ())) == list(range(num_nodes))
        )

    @property
    def group(self) -> tuple[int, ...]:
        """The nodes that share parity with this one, in the order of their group, which includes this one; none without
        parity."""
        groups = () if self.parity is None else self.parity.groups
        return next((group for group in groups if self.own in group), ())

    @property
    def adopted(self) -> frozenset[int]:
        """The files of the checkpoint in `adoption` that this node protects though it only has copies of them."""
        adoption = self.adoption
        if adoption is None:
            return frozenset()
        pairs = zip(adoption.files, adoption.nodes, strict=False)
        return frozenset(file for file, node in pairs if node == self.own)

    @property
    def partners(self) -> tuple[int, ...]:
        """The nodes that protect this one's slots: those that get copies of them, or share parity."""
        return self.targets[self.own] if self.parity is None else tuple(n for n in self.group if n != self.own)


def digest_of(secret: bytes) -> bytes:
    """A name for a secret, which does not tell it."""
    return xxhash.xxh3_128_digest(secret)


def note_secret(folder: NodeFolder, secret: PeerSecret) -> None:
    """Tell the keeper of `folder` the secret of the job, so that it listens."""
    _note(folder, _SECRET_NAME, secret)


def noted_secret(folder: NodeFolder) -> PeerSecret | None:
    """The secret of the last job; None where there is none."""
    return _noted(folder, _SECRET_NAME, PeerSecret)


def note_port(folder: NodeFolder, port: PeerPort) -> None:
    """Tell the ranks of this node the port of its keeper. Only for the keeper."""
    _note(folder, _PORT_NAME, port)


def noted_port(folder: NodeFolder) -> PeerPort | None:
    """The port of the keeper, or of the one before it; None where there is none."""
    return _noted(folder, _PORT_NAME, PeerPort)


def note_table(folder: NodeFolder, table: PeerTable) -> None:
    """Tell the keeper of `folder` what to send to whom. Several ranks of the node may do so, with the same table.

    Marks of protection tell of the nodes of the last job, some of which may be lost. So a new table for copies ends
    them: the keepers of all nodes get it at the same time, offer their newest slots again, and mark them anew."""
    if noted_table(folder) == table:
        return
    for checkpoint_id in protected_ids(folder) if table.parity is None else ():
        unmark_protected(folder, checkpoint_id)
    _note(folder, _TABLE_NAME, table)


def noted_table(folder: NodeFolder) -> PeerTable | None:
    """The table of the last job; None where there is none, or its memory is not protected."""
    table = _noted(folder, _TABLE_NAME, PeerTable)
    return table if table is not None and table.is_sound else None


def note_peer_trouble(folder: NodeFolder, trouble: str) -> None:
    """Tell the ranks of this node why its slots cannot be protected now; "" says that they can. Only for the keeper."""
    _note_text(folder, _TROUBLE_NAME, trouble)


def peer_trouble(folder: NodeFolder) -> str:
    """The reason why slots of this node cannot be protected now; "" where there is none."""
    return _read(folder, _TROUBLE_NAME).decode(errors="replace")


def note_trouble_elsewhere(folder: NodeFolder, trouble: str) -> None:
    """Tell the ranks of this node why slots of another node cannot be protected now; "" says that they can. Only for
    the keeper."""
    _note_text(folder, _ELSEWHERE_NAME, trouble)


def trouble_elsewhere(folder: NodeFolder) -> str:
    """The reason why slots of another node cannot be protected now, so that this one waits for it; "" where there is
    none."""
    return _read(folder, _ELSEWHERE_NAME).decode(errors="replace")


def note_speed(folder: NodeFolder, speed: PeerSpeed) -> None:
    """Tell the ranks of this node how fast it sends. Only for the keeper."""
    _note(folder, _SPEED_NAME, speed)


def noted_speed(folder: NodeFolder) -> PeerSpeed | None:
    """The speed at which this node has last sent copies to others; None where it has sent none."""
    return _noted(folder, _SPEED_NAME, PeerSpeed)


def forget_peers(folder: NodeFolder) -> None:
    """Remove all notes about peers: the slots of `folder` are not protected any more."""
    for name in (_TABLE_NAME, _SECRET_NAME, _PORT_NAME, _TROUBLE_NAME, _ELSEWHERE_NAME, _SPEED_NAME):
        folder.discard(name)


def _note(folder: NodeFolder, name: str, note: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(note)
    if _read(folder, name) != data:
        folder.write(name, data)


def _note_text(folder: NodeFolder, name: str, text: str) -> None:
    if not text:
        folder.discard(name)
    elif text.encode() != _read(folder, name):
        folder.write(name, text.encode())


def _noted(folder: NodeFolder, name: str, kind: type[_Note]) -> _Note | None:
    """A note. A damaged one counts as none: the next job writes it again."""
    with suppress(msgspec.DecodeError):
        return decode_msgpack(_read(folder, name), kind)
    return None


def _read(folder: NodeFolder, name: str) -> bytes:
    with suppress(FileNotFoundError, ConfigurationError), os.fdopen(folder.open(name), "rb") as file:
        return file.read()
    return b""
