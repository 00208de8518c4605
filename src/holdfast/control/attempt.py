"""One attempt of a job, and how its ranks find each other in a store that earlier attempts have used.

torchrun keeps one store for all restarts of a job, with everything that ranks had not read when they died. The nodes
count restarts on their own, so ranks cannot tell by a number what is old. So rank 0 makes up a name for each attempt,
which is part of all keys but these:

``hello``        every other rank appends an id of its own, made up for this attempt
``welcome/<id>`` rank 0's answer to an id: the name of the attempt, and the number of the operation that rank 0 is in;
                 the rank that has the id removes it

No rank of an earlier attempt knew the id, so an answer to it cannot be old. A hello may be old: rank 0 answers those
too, and nobody reads the answer. That a rank has come, rank 0 only believes when it gets a message of that rank under
the name. Until it has one of each rank, it looks for new ids while it waits.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from holdfast.control.key_value_store import KeyValueStore

_HELLO: Final = "hello"
_ID_NBYTES: Final = 8
#: Rank 0's pause between two looks for new ids is this part of its wait so far, within these limits.
_PAUSE_SHARE: Final = 1 / 8
_MIN_PAUSE_S: Final = 0.001
_MAX_PAUSE_S: Final = 0.1


class Attempt:
    """One process's part in an attempt of a job: its name, and the count of operations of this rank. Only one thread at
    a time uses it."""

    def __init__(self, name: str = "", *, is_open: bool = False) -> None:
        #: The name of the attempt; empty until this rank has joined it.
        self.name = name
        #: Whether this is rank 0, and some rank may not have joined.
        self.is_open = is_open
        self._id = secrets.token_bytes(_ID_NBYTES)
        self._has_said_hello = False
        #: Whether a thread is in `join` with the present id.
        self._is_joining = False
        self._num_operations = 0
        #: What the numbers of rank 0 have in addition to this rank's counts; known with the name.
        self._ahead = 0
        self._uses: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._answered: set[bytes] = set()

    @staticmethod
    def new() -> Attempt:
        """On rank 0: an attempt that nobody else has joined."""
        return Attempt(secrets.token_hex(_ID_NBYTES), is_open=True)

    @property
    def has_joined(self) -> bool:
        """Whether this rank knows the name."""
        return bool(self.name)

    def next_count(self) -> int:
        """This rank's count of the next operation. Operations may begin inside others, before this rank has joined."""
        self._num_operations += 1
        return self._num_operations - 1

    def number_of(self, count: int) -> int:
        """The number of the operation that has this `count` on this rank, which has joined: the same on all ranks."""
        return count + self._ahead

    def next_use(self, use: str) -> int:
        """The number of times that this rank has called this for `use` before."""
        return next(self._uses[use])

    def join(self, store: KeyValueStore, count: int, timeout_s: float) -> bool:
        """Join the attempt, if this rank has not: the operation with this `count` is the one that rank 0 is in. False
        where rank 0 did not answer in time, or `stop` was called; the next call goes on waiting for rank 0.

        A caller may stop waiting (Ctrl-C), and call this again while the thread of its earlier call is still here. That
        thread then joins nothing, or it has joined already: the operation that it is in counts."""
        if self.has_joined:
            return True
        if self._is_joining:
            self._id, self._has_said_hello = secrets.token_bytes(_ID_NBYTES), False
        rank_id, self._is_joining = self._id, True
        try:
            if not self._has_said_hello:
                store.append(_HELLO, rank_id)
                self._has_said_hello = True
            welcome = _welcome(rank_id)
            if not store.wait([welcome], timeout_s):
                return False
            answer = store.get(welcome).decode()
            store.delete(welcome)
            if not answer or self._id != rank_id:
                return False
            name, number = answer.split()
            self._ahead = int(number) - count
            self.name = name
            return True
        finally:
            if self._id == rank_id:
                self._is_joining = False

    def stop(self, claim: Callable[[str, bytes], object]) -> None:
        """Let a `join` of another thread end. `claim` stores a value under a key, unless the key exists."""
        claim(_welcome(self._id), b"")

    def await_ranks(
        self,
        store: KeyValueStore,
        number: int,
        awaited: Callable[[float], list[int]],
        timeout_s: float,
        *,
        is_left: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """On rank 0, in operation `number`: wait for ranks by `awaited`, which waits so many seconds and returns those
        that are still absent, and return its last result. Meanwhile answer the ranks that say hello, unless the caller
        of the operation `is_left`: it has stopped waiting, and its next operation answers them."""
        start_s = time.monotonic()
        while self.is_open and not is_left():
            self._answer(store, number)
            waited_s = time.monotonic() - start_s
            pause_s = min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            if pause_s >= timeout_s - waited_s:
                break
            if not awaited(pause_s):
                return []
        return awaited(max(timeout_s - (time.monotonic() - start_s), _MIN_PAUSE_S))

    def note_all(self, store: KeyValueStore) -> None:
        """On rank 0, after a message of every rank: nobody else will say hello."""
        if self.is_open:
            self.is_open = False
            self._answered.clear()
            store.delete(_HELLO)

    def _answer(self, store: KeyValueStore, number: int) -> None:
        if not store.check(_HELLO):
            return
        hellos = store.get(_HELLO)
        for start in range(0, len(hellos), _ID_NBYTES):
            rank_id = hellos[start : start + _ID_NBYTES]
            if rank_id not in self._answered:
                store.set(_welcome(rank_id), f"{self.name} {number}".encode())
                self._answered.add(rank_id)


def _welcome(rank_id: bytes) -> str:
    return f"welcome/{rank_id.hex()}"
