"""The meeting point of the ranks of one operation: a store that they share, and the operation that each rank entered
last.

`holdfast.control.channel` sends messages through a `Meeting`; `holdfast.control.torch_store` makes one from a TCPStore.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.node_board import NodeBoard
from holdfast.control.processes import Process
from holdfast.control.unread import UnreadBroadcasts

T = TypeVar("T")


class Meeting(Protocol):
    """The meeting point of the ranks of one operation. Only one thread at a time uses it."""

    def join(self, timeout_s: float) -> bool:
        """On another rank than 0: join the attempt of the job that rank 0 is in (`holdfast.control.attempt`). Returns
        at once where this rank has joined. False where rank 0 did not answer in time, or after `stop_joining`. Call it
        inside `ask`."""

    def stop_joining(self) -> None:
        """Let `join` end. May be called while an `ask` is under way."""

    def await_ranks(self, awaited: Callable[[float], list[int]], timeout_s: float) -> list[int]:
        """On rank 0: wait by `awaited`, which waits so many seconds for ranks and returns those that are absent, and
        return its last result. Meanwhile let ranks join. Call it inside `ask`."""

    def note_all(self) -> None:
        """On rank 0: all ranks have joined. Call it inside `ask`."""

    @property
    def store(self) -> KeyValueStore:
        """A store that holds the keys of this operation alone. Make its requests inside `ask`."""

    @property
    def name(self) -> str:
        """The prefix of the keys of this operation in `root`."""

    @property
    def root(self) -> KeyValueStore:
        """A store that holds the keys of all operations of these ranks. Make its requests inside `ask`."""

    @property
    def board(self) -> NodeBoard:
        """The board of the ranks of this node; kept from one operation to the next."""

    @property
    def unread(self) -> UnreadBroadcasts:
        """The broadcasts of this rank, if it is rank 0, that some rank may not have read; kept from one operation to
        the next."""

    @property
    def processes(self) -> dict[int, Process]:
        """The process of each rank that has reported it; kept from one operation to the next."""

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        """Run `call`, which makes requests to the store, and return its result or raise its error; call `meanwhile` now
        and then until it ends. Raises `StorageError`, code ``storage.control``, after `timeout_s`."""

    def claim(self, key: str, value: bytes) -> None:
        """Store `value` under `key` unless the key exists. May be called while an `ask` is under way."""

    def append(self, key: str, value: bytes) -> None:
        """Add `value` to the end of the value of `key`. May be called while an `ask` is under way."""

    def announce(self, rank: int, label: str) -> None:
        """Record that `rank` has entered the operation `label`."""

    def whereabouts(self, rank: int) -> str | None:
        """The last operation that `rank` entered; None before its first."""

    def has_come_again(self, rank: int, label: str) -> bool:
        """Whether `rank` has entered an operation `label` that is later than this one."""

    def next(self) -> Meeting:
        """The meeting of the operation after this one."""

    def in_background(self) -> Meeting:
        """A second meeting of this operation, for another thread."""

    def leave(self) -> None:
        """Release the connection for other meetings: the operation is over."""
