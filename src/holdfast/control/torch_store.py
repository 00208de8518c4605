"""The control channel over the store of the default process group. The only part of `control` that knows torch."""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.control.attempt import Attempt
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.node_board import NodeBoard
from holdfast.control.processes import Process
from holdfast.control.requests import Requests, lost
from holdfast.control.unread import UnreadBroadcasts
from holdfast.errors import ConfigurationError
from holdfast.forked_torch import renew_pool
from holdfast.wording import kind_of

_PREFIX: Final = "holdfast"
_MAX_POLL_S: Final = 0.5
#: Time limit for storing a key on behalf of a rank that has ended; a later look tries again.
_CLAIM_S: Final = 2.0

T = TypeVar("T")


class TorchStore:
    """A torch store as a `KeyValueStore`. Where the store is gone, its methods raise a `StorageError`, code
    ``storage.control``.

    With ``blocking=False`` it polls instead of blocking in the store, for a connection that other code uses too.
    """

    def __init__(self, store: dist.Store, *, blocking: bool) -> None:
        self._store = store
        self._blocking = blocking

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        try:
            # The stub asks for str; stores take bytes, and as text they would be encoded as UTF-8.
            self._store.set(key, value)  # type: ignore[arg-type]
        except dist.DistError as error:
            raise lost(error) from error

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        try:
            return self._store.get(key)
        except dist.DistError as error:
            raise lost(error) from error

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, which exist."""
        try:
            if self._store.has_extended_api():  # type: ignore[attr-defined]  # the stubs lack it
                return self._store.multi_get(list(keys)) if keys else []
            return [self._store.get(key) for key in keys]
        except dist.DistError as error:
            raise lost(error) from error

    def append(self, key: str, value: bytes) -> None:
        """Add `value` to the end of the value of `key` (empty at first), atomically."""
        try:
            if self._store.has_extended_api():  # type: ignore[attr-defined]  # the stubs lack it, and `append`
                self._store.append(key, value)  # type: ignore[attr-defined]
                return
            while True:  # torch's FileStore cannot append
                before = self._store.get(key) if self._store.check([key]) else b""
                if self._store.compare_set(key, before, before + value) == before + value:  # type: ignore[arg-type]
                    return
        except dist.DistError as error:
            raise lost(error) from error

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Block until all `keys` exist; False when `timeout_s` (positive) passed first."""
        try:
            if not self._blocking:
                return self._poll(list(keys), timeout_s)
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
            return True
        except dist.DistStoreError:
            return False
        except dist.DistError as error:
            raise lost(error) from error

    def check(self, key: str) -> bool:
        """Whether `key` exists."""
        try:
            return self._store.check([key])
        except dist.DistError as error:
            raise lost(error) from error

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`, atomically, and return the new value."""
        try:
            return self._store.add(key, amount)
        except dist.DistError as error:
            raise lost(error) from error

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is fine."""
        try:
            self._store.delete_key(key)
        except dist.DistError as error:
            raise lost(error) from error

    def claim(self, key: str, value: bytes) -> bytes:
        """Store `value` under `key` unless the key exists. Returns the value that the key has."""
        try:
            # torch sets a missing key when the expected value is empty.
            return self._store.compare_set(key, "", value)  # type: ignore[arg-type]
        except dist.DistError as error:
            raise lost(error) from error

    def _poll(self, keys: list[str], timeout_s: float) -> bool:
        start = time.monotonic()
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                return False
            # The pause grows with the wait so far: quick answers come quickly, and long waits cost few requests.
            time.sleep(min(max(waited / 8, 0.001), _MAX_POLL_S, timeout_s - waited))
        return True


def _close_boards(boards: Mapping[str, NodeBoard]) -> None:
    for board in boards.values():
        board.close()


class StoreConnection:
    """A client of a process group's store, for one thread at a time: a clone of our own, or torch's client where the
    store cannot be cloned."""

    def __init__(self, store: dist.Store, timeout_s: float) -> None:
        """Connect within `timeout_s`, or raise `StorageError`, code ``storage.control``: torch itself would try for 30
        minutes to connect to a store that is gone."""
        self.requests = Requests()
        own = self.requests.ask(lambda: _clone(store), timeout_s)
        self.client = own or store
        # A wait occupies its client until it ends. Our clone may block; torch's client also serves torch, so we poll.
        self.is_own = own is not None
        #: The user in the background, if any; a weak reference, so a dead user frees it.
        self.user: ref[object] | None = None

    def let_go(self, user: object) -> None:
        """Note that `user` no longer needs this connection."""
        if self.user is not None and self.user() is user:
            self.user = None

    @property
    def is_free(self) -> bool:
        """Whether another user in the background may take this connection."""
        return (self.user is None or self.user() is None) and not self.requests.is_busy


class GroupStore:
    """One process's view of a process group's store: its connections, its part in the attempt per group of ranks, and
    the processes of those ranks."""

    def __init__(self, store: dist.Store) -> None:
        # A weak reference: the store is the key of the weak dictionary `_jobs`, which holds this object.
        self._store = ref(store)
        self._connection: StoreConnection | None = None
        self._in_background: list[StoreConnection] = []
        self._attempts: dict[str, Attempt] = {}
        self._processes: dict[str, dict[int, Process]] = defaultdict(dict)
        self._boards: dict[str, NodeBoard] = defaultdict(NodeBoard)
        self._unread: dict[str, UnreadBroadcasts] = defaultdict(UnreadBroadcasts)
        self._claims = Requests()
        finalize(self, _close_boards, self._boards)

    @property
    def store(self) -> dist.Store:
        """The store that torch itself uses. Raises `StorageError` after the end of its process group."""
        store = self._store()
        if store is None:
            raise lost("its process group has been destroyed")
        return store

    def connection(self, timeout_s: float) -> StoreConnection:
        """The connection of the operation in the foreground; a new one where a request hangs in the last."""
        if self._connection is None or self._connection.requests.is_busy:
            self._connection = StoreConnection(self.store, timeout_s)
        return self._connection

    def in_background(self, user: object, timeout_s: float) -> StoreConnection:
        """A connection for `user` alone, until it lets go or is collected: several Checkpointers may save in the
        background at the same time."""
        connection = next((each for each in self._in_background if each.is_free), None)
        if connection is None:
            connection = StoreConnection(self.store, timeout_s)
            self._in_background = [each for each in self._in_background if not each.requests.is_busy]
            self._in_background.append(connection)
        connection.user = ref(user)
        return connection

    def attempt(self, members: str, rank: int) -> Attempt:
        """The part of this process, which is `rank` of the group `members`, in the attempt of that group."""
        if members not in self._attempts:
            self._attempts[members] = Attempt() if rank else Attempt.new()
        return self._attempts[members]

    def processes(self, members: str) -> dict[int, Process]:
        """The known processes of a group, by rank; updated in place."""
        return self._processes[members]

    def board(self, members: str) -> NodeBoard:
        """The board of the ranks of a group that are on this node."""
        return self._boards[members]

    def unread(self, members: str) -> UnreadBroadcasts:
        """The broadcasts of this rank to a group that some rank may not have read."""
        return self._unread[members]

    def beside(self, request: Callable[[TorchStore], object]) -> None:
        """Make a `request` while our connections are waiting: through torch's own one. Does nothing while the last such
        request still hangs."""
        if not self._claims.is_busy:
            store = TorchStore(self.store, blocking=False)
            self._claims.ask(lambda: request(store), _CLAIM_S)


# Keyed by the store object, so that a new process group counts operations from zero on all of its ranks.
_jobs: WeakKeyDictionary[dist.Store, GroupStore] = WeakKeyDictionary()


class Member(NamedTuple):
    """This process as one of a group of ranks: its view of the job's store, the key prefix of the group (`name`), and
    its rank in the group."""

    job: GroupStore
    name: str
    rank: int
    world_size: int

    @property
    def attempt(self) -> Attempt:
        """The part of this process in the attempt of its group."""
        return self.job.attempt(self.name, self.rank)


class TorchMeeting:
    """A `Meeting` of a process group at its store, for the next operation of `member`, or for the one with this
    `count`."""

    def __init__(
        self, member: Member, count: int | None = None, *, deadline: Deadline, background: bool = False
    ) -> None:
        self._member = member
        self._attempt = member.attempt
        # Count the operation even where the store does not answer: the other ranks count it too.
        self._count = self._attempt.next_count() if count is None else count
        self._deadline = deadline
        self._is_background = background
        #: Whether the caller of `ask` has stopped waiting (Ctrl-C), and its request goes on.
        self._is_left = False
        timeout_s, job = deadline.remaining_s(), member.job
        self._connection = job.in_background(self, timeout_s) if background else job.connection(timeout_s)

    def join(self, timeout_s: float) -> bool:
        """As `Meeting.join`."""
        return self._attempt.has_joined or self._attempt.join(self._at(self._member.name), self._count, timeout_s)

    def stop_joining(self) -> None:
        """As `Meeting.stop_joining`."""
        job, name = self._member.job, self._member.name
        self._attempt.stop(lambda key, value: job.beside(lambda store: store.claim(f"{name}/{key}", value)))

    def await_ranks(self, awaited: Callable[[float], list[int]], timeout_s: float) -> list[int]:
        """As `Meeting.await_ranks`."""
        store = self._at(self._member.name)
        return self._attempt.await_ranks(store, self._number, awaited, timeout_s, is_left=lambda: self._is_left)

    def note_all(self) -> None:
        """As `Meeting.note_all`."""
        self._attempt.note_all(self._at(self._member.name))

    @property
    def name(self) -> str:
        """As `Meeting.name`."""
        return f"{self._number}" + ("/background" if self._is_background else "")

    @property
    def store(self) -> KeyValueStore:
        """As `Meeting.store`."""
        return self._at(self._prefix)

    @property
    def processes(self) -> dict[int, Process]:
        """As `Meeting.processes`."""
        return self._member.job.processes(self._member.name)

    @property
    def root(self) -> KeyValueStore:
        """As `Meeting.root`."""
        return self._at(self._root)

    @property
    def board(self) -> NodeBoard:
        """As `Meeting.board`."""
        return self._member.job.board(self._member.name)

    @property
    def unread(self) -> UnreadBroadcasts:
        """As `Meeting.unread`."""
        return self._member.job.unread(self._member.name)

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        """As `Meeting.ask`."""
        requests = self._connection.requests
        try:
            return requests.ask(call, timeout_s, meanwhile=meanwhile)
        finally:
            self._is_left = requests.is_busy

    def claim(self, key: str, value: bytes) -> None:
        """As `Meeting.claim`."""
        self._member.job.beside(lambda store: store.claim(f"{self._prefix}/{key}", value))

    def append(self, key: str, value: bytes) -> None:
        """As `Meeting.append`."""
        self._member.job.beside(lambda store: store.append(f"{self._prefix}/{key}", value))

    def announce(self, rank: int, label: str) -> None:
        """As `Meeting.announce`."""
        self._places.set(str(rank), f"{self._number} {label}".encode())

    def whereabouts(self, rank: int) -> str | None:
        """As `Meeting.whereabouts`."""
        place = self._place(rank)
        return None if place is None else place[1]

    def has_come_again(self, rank: int, label: str) -> bool:
        """As `Meeting.has_come_again`."""
        place = self._place(rank)
        return place is not None and place[0] > self._number and place[1] == label

    def next(self) -> TorchMeeting:
        """As `Meeting.next`."""
        return TorchMeeting(self._member, deadline=self._deadline)

    def in_background(self) -> TorchMeeting:
        """As `Meeting.in_background`."""
        return TorchMeeting(self._member, self._count, deadline=self._deadline, background=True)

    def leave(self) -> None:
        """As `Meeting.leave`."""
        self._connection.let_go(self)

    @property
    def _number(self) -> int:
        """The number of the operation, once this rank has joined."""
        return self._attempt.number_of(self._count)

    @property
    def _root(self) -> str:
        return f"{self._member.name}/{self._attempt.name}"

    @property
    def _prefix(self) -> str:
        return f"{self._root}/{self.name}"

    @property
    def _places(self) -> TorchStore:
        return self._at(f"{self._root}/at")

    def _place(self, rank: int) -> tuple[int, str] | None:
        """The number and the label of the last operation that `rank` entered; None before its first."""
        key, places = str(rank), self._places
        if not places.check(key):
            return None
        number, _, label = places.get(key).decode().partition(" ")
        return int(number), label

    def _at(self, prefix: str) -> TorchStore:
        connection = self._connection
        # While rank 0 lets ranks join, it waits for a moment at a time; torch logs each wait in the store that is over.
        blocking = connection.is_own and not self._attempt.is_open
        return TorchStore(dist.PrefixStore(prefix, connection.client), blocking=blocking)


def check_group(group: object) -> None:
    """Raise `TypeError` unless `group` is a process group, or None for all ranks of the job; `ConfigurationError` for
    the group that torch gives to ranks outside it."""
    if group is None or not dist.is_available() or isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise _not_in_group(global_rank())
    raise TypeError(f"group is a process group of torch.distributed, or None for all ranks, not {kind_of(group)}")


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of `group` (default: of the job), in the group's order; ``(0,)`` in one plain process."""
    check_group(group)
    if not dist.is_available() or not dist.is_initialized():
        return (0,)
    return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))


def global_rank() -> int:
    """The rank of this process in the job; 0 in one plain process."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def default_channel(
    label: str, group: dist.ProcessGroup | None = None, *, deadline: Deadline, step: int | None = None
) -> Channel:
    """A channel between the ranks of `group` (default: all ranks of the job); in one plain process, a channel of that
    process alone.

    Every rank of a group must make its channels in the same order, because an operation's keys contain the count of
    channels so far. All channels of a process share one connection, so only one may be in use at a time. Never calls a
    collective.

    Raises:
        ConfigurationError: ``config.no_process_group``: a rank of several has no process group.
        StorageError: ``storage.control``: the store of the process group does not answer before `deadline`.
    """
    renew_pool()  # here, because every call that starts threads begins with a channel
    member = member_of(group)
    if member is None:
        return Channel(None, rank=0, world_size=1, label=label, step=step)
    meeting = TorchMeeting(member, deadline=deadline)
    return Channel(meeting, rank=member.rank, world_size=member.world_size, label=label, step=step)


def member_of(group: dist.ProcessGroup | None) -> Member | None:
    """This process as a member of `group` (default: all ranks of the job); None in one plain process. Raises
    `ConfigurationError` as `default_channel`."""
    if not dist.is_available() or not dist.is_initialized():
        check_group(group)
        _refuse_lonely_ranks()
        return None
    store = _get_default_store()
    ranks = group_ranks(group)
    if dist.get_rank() not in ranks:
        raise _not_in_group(dist.get_rank())
    job = _jobs.get(store)
    if job is None:
        job = _jobs[store] = GroupStore(store)
    name = _PREFIX + ("" if group is None else "-" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16])
    return Member(job, name, ranks.index(dist.get_rank()), len(ranks))


def is_current(member: Member) -> bool:
    """Whether the process group that `member` belongs to still exists."""
    return dist.is_initialized() and _jobs.get(_get_default_store()) is member.job


def _not_in_group(rank: int) -> ConfigurationError:
    return ConfigurationError(
        f"rank {rank} is not in the group it called with.",
        code="config.not_in_group",
        action="Call save and load with a group on the ranks of that group only.",
        rank=rank,
    )


def _refuse_lonely_ranks() -> None:
    """Raise if this process was started as one of several ranks but has no process group: each rank would take itself
    for the whole job."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size not in ("", "0", "1"):
        raise ConfigurationError(
            f"this process was started as one of {world_size} ranks (WORLD_SIZE), but no process group is initialised.",
            code="config.no_process_group",
            action="Call torch.distributed.init_process_group first, or unset WORLD_SIZE in a job of one process.",
        )


def _clone(store: dist.Store) -> dist.Store | None:
    """A second client of `store`; None where torch (before 2.8) or this kind of store cannot clone."""
    try:
        # The existing connection fails at once where the server is gone; a new connection would be tried for long.
        store.check([_PREFIX])
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
    except dist.DistError as error:
        raise lost(error) from error
    except (AttributeError, RuntimeError):
        return None
    return clone
