"""The ranks of a job introduce the keepers of their nodes to each other, so that these protect snapshots.

All ranks send the card of their node; rank 0 places the copies or the parity, and gives a secret to all. Each rank
tells its keeper the secret, and waits until the keeper listens. Then all send its address, and get the table of all.
Nothing else than that passes through the job's store: keepers do the rest, and outlive the job.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.cooperative.network import own_host
from holdfast.errors import ConfigurationError, DeadlineError, HoldfastError
from holdfast.keeper.client import ensure_keeper
from holdfast.node_memory.claims import has_any_trainer
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory
from holdfast.node_memory.peering import (
    Adoption,
    PacingRules,
    ParityTable,
    PeerNode,
    PeerSecret,
    PeerTable,
    digest_of,
    note_secret,
    note_table,
    noted_port,
)
from holdfast.phases import attempt
from holdfast.protection.cards import NodeCard
from holdfast.protection.placement import place_copies, place_parity
from holdfast.protection.policies import Copies, Parity

#: The variable of the environment that names the failure domains of a node.
DOMAIN_VARIABLE: Final = "HOLDFAST_DOMAIN"

#: Limit for the bytes of the file that names them.
_DOMAIN_NBYTES: Final = 4096
_SECRET_NBYTES: Final = 32
#: Time for a keeper to listen after it was told the secret.
_LISTEN_S: Final = 20.0
_LOOK_S: Final = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProtectionRules:
    """The wishes of a user: the policy, the failure domain of this node (a name, or the path of a file that has it),
    whether training may go on without protection, and the pace of copies. Rank 0's pace holds for all nodes."""

    policy: Copies | Parity
    domain: str | Path | None = None
    is_required: bool = False
    pacing: PacingRules = field(default_factory=PacingRules)


class _PlacedNodes(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's answer to the cards: the secret, and for each node, in the order of its first rank, the nodes that keep
    its copies; or which nodes keep parity."""

    secret: bytes
    identities: tuple[str, ...]
    targets: tuple[tuple[int, ...], ...]
    parity: ParityTable | None
    adoption: Adoption | None


class ReachedKeeper(msgspec.Struct, frozen=True, array_like=True):
    """The address of the keeper of a rank's node."""

    identity: str
    address: str


class ProtectedPart(NamedTuple):
    """The part of a snapshot that `rank` has, with labels of the parallel groups of the rank."""

    rank: int
    groups: tuple[str, ...]


class CopiesLeft(NamedTuple):
    """The files of a restored checkpoint of which nodes have only copies, because their owners are lost: by number, the
    rank on whose node each was read."""

    checkpoint_id: str
    readers: Mapping[int, int]


class PeerMeeting:
    """The meeting of the peers of one rank's node. `error` says why the slots are not protected; None after a meeting
    that succeeded. `copies_left`, the same on all ranks, are protected again by the nodes that have them."""

    def __init__(self, rules: ProtectionRules) -> None:
        self.rules = rules
        self.copies_left: CopiesLeft | None = None
        self.error: HoldfastError | None = _not_met()
        self._secret = secrets.token_bytes(_SECRET_NBYTES)
        #: The secret of the last meeting, which is rank 0's, and the port at which the keeper of this node listened for
        #: those that know it (None: it did not).
        self._met: tuple[bytes, int | None] = (b"", None)
        self._notes: tuple[str, ...] = ()

    def meet(self, folder: NodeFolder, part: ProtectedPart, channel: Channel, deadline: Deadline) -> None:
        """Meet the peers, and have the keeper of `folder` protect the slots, of which this rank has a `part`. The
        keeper must be at work. Collective: the same errors are raised on all ranks.

        Raises:
            ConfigurationError: protection is required and cannot be had.
            DeadlineError: ranks did not answer.
        """
        before, self.error = self.error, None
        try:
            self._meet(folder, part, channel, deadline)
        except DeadlineError:
            self.error = before
            raise
        except HoldfastError as error:
            self.error = error
            if self.rules.is_required:
                raise
            if channel.rank == 0 and (before is None or str(before) != str(error)):
                _log.warning("the memory of the nodes is not protected against their loss: %s", error)

    def is_outdated(self, folder: NodeFolder) -> bool:
        """Whether the keeper of `folder` has begun to listen since the last meeting, or listens at another port, which
        its peers do not know: a new one does where a stranger has taken the port of the one that died."""
        (secret, met_port), port = self._met, noted_port(folder)
        is_ours = port is not None and not port.error and port.secret_digest == digest_of(secret)
        return is_ours and port is not None and port.port != met_port

    def protect_again(
        self,
        folder: NodeFolder,
        run: str,
        left: CopiesLeft | None,
        part: ProtectedPart,
        channel: Channel,
        deadline: Deadline,
    ) -> None:
        """Meet after a restore, and have what the nodes hold protected again, with the copies that are `left` of lost
        nodes, and memory taken for copies. Does nothing where a job trains on a node: its own nodes protect it.
        Collective. Whatever prevents it is not an error: the first save meets, and says what is wrong."""
        self.copies_left = left

        def give_way() -> None:
            if has_any_trainer(folder):
                raise _trains(folder)

        def make_ready() -> None:
            give_way()
            ensure_keeper(folder, run)

        try:
            channel.confirm("keepers", attempt(make_ready), deadline)
            self._meet(folder, part, channel, deadline, before_note=give_way)
        except HoldfastError as error:
            _log.info("the nodes protect nothing before the first save of this job: %s", error)
        else:
            self.error = None

    def _meet(
        self,
        folder: NodeFolder,
        part: ProtectedPart,
        channel: Channel,
        deadline: Deadline,
        *,
        before_note: Callable[[], None] = lambda: None,
    ) -> None:
        """Meet. Calls `before_note` at once before each note in the folder of the node, whose error ends the
        meeting."""

        def card() -> NodeCard:
            domains = _domains(self.rules.domain)
            return NodeCard(folder.identity(), own_host(), (part.rank,), domains, part.groups)

        def place(cards: Sequence[NodeCard]) -> _PlacedNodes:
            nodes = merged(cards)
            targets, parity, notes = _placed(nodes, self.rules.policy)
            if notes != self._notes:
                for note in notes:
                    _log.warning("protected memory: %s", note)
            self._notes = notes
            identities = tuple(each.identity for each in nodes)
            adoption = None if self.copies_left is None else _adoption(self.copies_left, cards, identities)
            return _PlacedNodes(self._secret, identities, targets, parity, adoption)

        def listen() -> ReachedKeeper:
            before_note()
            self._met = (placed.secret, None)
            keeper = reached(folder, placed.secret)
            self._met = (placed.secret, int(keeper.address.rpartition(":")[2]))
            return keeper

        def table(reached: Sequence[ReachedKeeper]) -> PeerTable:
            addresses = {each.identity: each.address for each in reached}
            nodes = tuple(PeerNode(each, addresses[each]) for each in placed.identities)
            _require_unlike(nodes)
            rules = (placed.targets, placed.parity, self.rules.pacing, placed.adoption)
            return PeerTable(digest_of(placed.secret), 0, nodes, *rules)

        placed = channel.exchange("nodes", attempt(card), place, deadline, takes=NodeCard, gives=_PlacedNodes)
        found = channel.exchange("keepers", attempt(listen), table, deadline, takes=ReachedKeeper, gives=PeerTable)

        def note() -> None:
            before_note()
            own = placed.identities.index(folder.identity())
            with unusable_memory(folder.path):
                note_table(folder, msgspec.structs.replace(found, own=own))

        channel.confirm("table", attempt(note), deadline)


def reached(folder: NodeFolder, secret: bytes) -> ReachedKeeper:
    """Have the keeper of `folder`, which must be at work, listen for those that know `secret`.

    Raises:
        ConfigurationError: it does not.
    """
    with unusable_memory(folder.path):
        note_secret(folder, PeerSecret(secret, own_host()))
        return ReachedKeeper(folder.identity(), _await_address(folder, secret))


class _PlacedPolicy(NamedTuple):
    """For each node the nodes that keep its copies; or who keeps parity; and notes on wishes that are not fulfilled."""

    targets: tuple[tuple[int, ...], ...]
    parity: ParityTable | None
    notes: tuple[str, ...]


def _placed(nodes: Sequence[NodeCard], policy: Copies | Parity) -> _PlacedPolicy:
    if isinstance(policy, Copies):
        copies = place_copies(nodes, policy.n)
        return _PlacedPolicy(copies.holders, None, copies.notes)
    found = place_parity(nodes, policy)
    table = ParityTable(policy.losses, found.groups, tuple(node.ranks for node in nodes))
    return _PlacedPolicy(((),) * len(nodes), table, found.notes)


def merged(cards: Sequence[NodeCard]) -> list[NodeCard]:
    """The cards of nodes, from those of their ranks."""
    nodes: dict[str, NodeCard] = {}
    for card in cards:
        known = nodes.get(card.identity)
        if known is None:
            nodes[card.identity] = card
            continue
        nodes[card.identity] = msgspec.structs.replace(
            known,
            ranks=(*known.ranks, *card.ranks),
            groups=tuple(sorted({*known.groups, *card.groups})),
        )
    return list(nodes.values())


def _adoption(left: CopiesLeft, cards: Sequence[NodeCard], identities: Sequence[str]) -> Adoption:
    """For each of the copies that are `left`, the number of the node that protects it; `cards` are those of ranks."""
    numbers = {identity: number for number, identity in enumerate(identities)}
    files = tuple(sorted(left.readers))
    return Adoption(left.checkpoint_id, files, tuple(numbers[cards[left.readers[file]].identity] for file in files))


def _domains(given: str | Path | None) -> tuple[str, ...]:
    """The failure domains of this node, the smallest first; the names are given as a path, the largest first."""
    if isinstance(given, Path):
        text = _text_of(given).strip()
        names = domain_parts(text)
        if not names:
            raise _no_domain(given, "is empty")
        if len(text.splitlines()) > 1:
            raise _no_domain(given, "has more than one line")
    else:
        names = domain_parts(os.environ.get(DOMAIN_VARIABLE, "") if given is None else given)
    return tuple(reversed(names))


def _text_of(path: Path) -> str:
    """The text of a small file. Nothing else is read: a named pipe without a writer would not come to its end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise _no_domain(path, "is no regular file")
            data = os.read(fd, _DOMAIN_NBYTES + 1)
        finally:
            os.close(fd)
        if len(data) > _DOMAIN_NBYTES:
            raise _no_domain(path, f"has more than {_DOMAIN_NBYTES:,} bytes")
        return data.decode()
    except OSError as error:
        raise _no_domain(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _no_domain(path, f"cannot be read: {error}") from error


def domain_parts(text: str) -> list[str]:
    """The names of failure domains that `text` gives, the largest first. Slashes separate them."""
    return [part.strip() for part in text.split("/") if part.strip()]


def _no_domain(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"'{path}', the file that names the failure domain of this node, {why}.",
        code="config.protection",
        action="Write the domain into that file, in one line, such as block-2/rack-7, or pass it as domain=.",
        path=str(path),
    )


def _await_address(folder: NodeFolder, secret: bytes) -> str:
    """The address at which the keeper of `folder` listens for those that know `secret`."""
    end = time.monotonic() + _LISTEN_S
    while time.monotonic() < end:
        port = noted_port(folder)
        if port is not None and port.secret_digest == digest_of(secret):
            if port.error:
                raise _cannot_listen(folder, port.error)
            return f"{own_host()}:{port.port}"
        time.sleep(_LOOK_S)
    raise _cannot_listen(folder, f"it did not within {_LISTEN_S:.0f} s")


def _require_unlike(nodes: Sequence[PeerNode]) -> None:
    """Raise `ConfigurationError` where two nodes have one address, such as that of the loopback and by chance the same
    port: a keeper that connects there reaches itself, and would hold the copies of its own slots."""
    address, number = Counter(node.address for node in nodes).most_common(1)[0]
    if number > 1:
        raise ConfigurationError(
            f"{number} nodes give {address} as the address of their keeper.",
            code="config.protection",
            action="Set MASTER_ADDR to an address that all nodes reach, or start torchrun with --local-addr.",
        )


def _cannot_listen(folder: NodeFolder, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the keeper of this node does not listen for other nodes: {why}.",
        code="config.protection",
        action="Read its log, keeper.log in that folder, and allow TCP connections between the nodes.",
        path=str(folder.path),
    )


def check_policies(policies: Sequence[str]) -> None:
    """Raise `ConfigurationError` if ranks want other policies than rank 0; "" stands for none."""
    for rank, policy in enumerate(policies):
        if policy != policies[0]:
            first, other = (each or "none" for each in (policies[0], policy))
            raise ConfigurationError(
                f"the ranks want their snapshots protected in different ways: rank 0 {first}, and rank {rank} {other}.",
                code="config.unlike_protection",
                action="Pass the same protect= and require_protection= to Memory on all ranks.",
            )


def _trains(folder: NodeFolder) -> ConfigurationError:
    return ConfigurationError(
        "a job trains on this run already, and its nodes protect what it saves.",
        code="config.protection",
        action="No action needed: the first save of this job stops that one.",
        path=str(folder.path),
    )


def _not_met() -> HoldfastError:
    return ConfigurationError(
        "The nodes of the job have not met yet, so no snapshot is protected.",
        code="config.protection",
        action="No action needed: they meet at the first save into memory.",
    )
