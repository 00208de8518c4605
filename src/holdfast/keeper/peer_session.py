"""The state of a keeper's work for one job: the peers, and the copies and parity that they have for this node."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, NamedTuple

from holdfast.keeper.pacing import LinkPaces
from holdfast.keeper.send_meter import SendMeter
from holdfast.node_memory.peering import PeerSecret, PeerTable
from holdfast.node_memory.slots import Contents, Slot
from holdfast.store.retry_budget import RetryBudget

_PATIENCE_S: Final = 20.0
_PATIENCE_S_PER_NBYTES: Final = 10 / (1 << 30)
#: Time for a mark to come, once peers hold all copies of a checkpoint for this node, before newer ones are sent. A node
#: that has gone on to a newer one first says no more of the older, and then no mark will come.
_MARK_S: Final = 3.0
#: Interval at which a peer is asked again whether its rows of parity are complete.
_ASK_AGAIN_S: Final = 0.1
#: Time for which the trouble of another node counts that has not been told again.
_TROUBLE_S: Final = 5.0
_RETRIES: Final = RetryBudget(total_s=math.inf, first_s=0.5, longest_s=15.0)


def patience_s(nbytes: int) -> float:
    """Time for a peer to take so many bytes, after which saves go on as if nothing protected them."""
    return _PATIENCE_S + nbytes * _PATIENCE_S_PER_NBYTES


class Sending(NamedTuple):
    """The sending of `slots` of the checkpoint of these `contents` to the peer number `target` of the `session`.
    Returns whether the peer has all that it needs of them."""

    session: PeerSession
    slots: tuple[Slot, ...]
    contents: Contents
    target: int
    sent: Future[bool]
    begun_s: float

    def is_to(self, session: PeerSession, target: int) -> bool:
        """Whether it is to that peer of that session."""
        return self.session is session and self.target == target

    @property
    def is_slow(self) -> bool:
        """Whether it takes so long that saves should not wait for it."""
        return time.monotonic() - self.begun_s > patience_s(sum(slot.nbytes for slot in self.slots))


@dataclass
class PeerState:
    """The state of the way to a peer: when it may be tried again, after how many failures, and the last trouble."""

    retry_at: float = 0.0
    num_failures: int = 0
    trouble: str = ""

    def fail(self, trouble: str) -> None:
        """Note a failure."""
        self.retry_at = time.monotonic() + (_RETRIES.pause_s(self.num_failures) or 0.0)
        self.num_failures += 1
        self.trouble = trouble

    def work(self, *, is_done: bool = True) -> None:
        """Note a success; unless it `is_done`, the peer is asked again soon."""
        self.retry_at = 0.0 if is_done else time.monotonic() + _ASK_AGAIN_S
        self.num_failures, self.trouble = 0, ""


@dataclass
class PeerSession:
    """The peers of one job, which this keeper knows by `table`. ``kept`` has, by slot name and checkpoint, the peers
    that hold the copy."""

    secret: PeerSecret
    table: PeerTable
    kept: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    peers: dict[int, PeerState] = field(default_factory=dict)
    #: By checkpoint id, the files that nodes have said are kept, which `lock` guards. Only the first node of the table
    #: counts.
    counted: dict[str, set[int]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)
    #: The checkpoint that the first node has marked last.
    marked: str = ""
    #: By checkpoint id and number of files, the time at which the first node was last told.
    said_at: dict[tuple[str, int], float] = field(default_factory=dict)
    #: By rank and peer, the size of the copies for which the peer was asked to take memory.
    prepared: dict[tuple[int, int], int] = field(default_factory=dict)
    meter: SendMeter = field(default_factory=SendMeter)
    #: The newest checkpoint of which peers hold all copies for this node, and since when it waits for its mark.
    awaited: tuple[str, float] = ("", 0.0)
    #: The checkpoint whose parity is being made, its step, and the time until which saves wait for that.
    encoded: tuple[str, int, float] = ("", 0, math.inf)
    #: The reason why saves should not wait for a mark, since one did not come in time; "" since one has come.
    unmarked: str = ""
    #: By node, the trouble that it has told the first node, and when. Only the first node has it.
    troubles: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: The trouble of another node that the first node has told this one, and when.
    elsewhere: tuple[str, float] = ("", -math.inf)
    paces: LinkPaces = field(init=False)

    def __post_init__(self) -> None:
        self.paces = LinkPaces(self.table.pacing)

    def state(self, peer: int) -> PeerState:
        """The state of the way to a peer."""
        return self.peers.setdefault(peer, PeerState())

    def forget(self, slots: Iterable[Slot]) -> None:
        """Forget which peers hold copies of what `slots` held before."""
        held = {(slot.name, slot.record.contents.checkpoint_id) for slot in slots if slot.record.contents is not None}
        self.kept = {key: peers for key, peers in self.kept.items() if key in held}

    def count(self, checkpoint_id: str, files: Iterable[int], num_files: int) -> bool:
        """Note on the first node that all copies of these files are kept. Returns whether all are now, and forgets them
        then. Any thread may call it."""
        with self.lock:
            counted = self.counted.setdefault(checkpoint_id, set())
            counted.update(files)
            if len(counted) < num_files:
                return False
            del self.counted[checkpoint_id]
            self.marked = checkpoint_id
            return True

    @property
    def lateness(self) -> str:
        """The reason why saves should not wait for parity or for a mark, which is late; "" where none is."""
        _, step, until_s = self.encoded
        if time.monotonic() > until_s:
            return f"step {step} is not protected yet: its parity is not complete on all nodes of the group."
        return self.unmarked

    def note_trouble(self, node: int, trouble: str) -> None:
        """Note on the first node why slots of a node cannot be protected now. Any thread may call it."""
        with self.lock:
            self.troubles[node] = (trouble, time.monotonic())

    def note_elsewhere(self, trouble: str) -> None:
        """Note what the first node says of the trouble of other nodes. Any thread may call it."""
        self.elsewhere = (trouble, time.monotonic())

    @property
    def trouble_elsewhere(self) -> str:
        """The reason why slots of another node cannot be protected now, as far as this one knows; "" where there is
        none. Any thread may ask."""
        known = [self.elsewhere]
        if self.table.own == 0:
            with self.lock:
                known = [(_said_by(self.table, node, each[0]), each[1]) for node, each in self.troubles.items()]
        return next((text for text, at_s in known if text and time.monotonic() - at_s < _TROUBLE_S), "")

    def awaits_mark(self, due: Iterable[Slot], marked: Collection[str]) -> bool:
        """Whether an older checkpoint than that of the `due` slots may be marked at any moment: peers hold all its
        copies for this node, and the time for its mark is not over."""
        id_, since_s = self.awaited
        is_older = any(slot.record.contents and slot.record.contents.checkpoint_id != id_ for slot in due)
        return is_older and bool(id_) and id_ not in marked and time.monotonic() - since_s <= _MARK_S

    def await_mark(self, contents: Contents, nbytes: int) -> None:
        """Note that peers hold all copies for this node of the checkpoint of these `contents`, which is not marked:
        `nbytes` of them."""
        if self.awaited[0] != contents.checkpoint_id:
            self.awaited = contents.checkpoint_id, time.monotonic()
        elif time.monotonic() - self.awaited[1] > patience_s(nbytes):
            self.unmarked = (
                f"step {contents.step} is not protected yet: peers hold the copies for this node, but the keeper of "
                f"the first node, at {self.table.nodes[0].address}, does not say that all nodes have theirs."
            )


def _said_by(table: PeerTable, node: int, trouble: str) -> str:
    return f"the keeper at {table.nodes[node].address} says: {trouble}" if trouble else ""
