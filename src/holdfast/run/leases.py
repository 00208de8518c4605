"""Leases of readers: records that keep the files of a checkpoint while somebody reads them (`holdfast.run.holds`).

A thread of its own makes and renews the lease of each reader, so a read never waits for it. It needs no lock and no
answer: until the record exists, the reader is as safe as one that may not write into the run. So the shortest reads
leave none: two durable changes beside a load of 5 ms made it three times as long (measured).

Readers leave leases only where somebody deletes checkpoints by a policy (`lease_is_wanted`). Elsewhere a read leaves
nothing in a run, and costs one look.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Final

from holdfast.checkpoint.sealed import Sealed
from holdfast.errors import HoldfastError
from holdfast.format import records
from holdfast.format.hold_records import LEASES_WANTED_KEY, LeasesWanted
from holdfast.format.records import Place
from holdfast.latch import Latch
from holdfast.run.history import Located
from holdfast.run.holds import create_by_name, create_lease
from holdfast.store.base import Store
from holdfast.store.timed import untimed

#: The time that a lease lasts. It is renewed after half of it.
LEASE_S: Final = 900.0
#: A read that ends sooner needs no lease: its record would take longer than the read.
_FIRST_S: Final = 0.1
#: Longest wait for the deletion of leases.
_PATIENCE_S: Final = 1.0


class ReadLease:
    """The lease of a reader on the checkpoint at `place`, until `end`. A thread makes, renews and deletes it, but makes
    none if the read ends within `after_s`.

    Neither the constructor nor `end` waits for the store, or raises its errors: a reader goes on without a lease.
    """

    def __init__(self, storage: Store, place: Place, *, after_s: float = _FIRST_S) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._made = Latch()
        work = (storage, place, self._ended, self._made, after_s)
        self._thread = Thread(target=_keep, args=work, name="holdfast-lease", daemon=True)
        with suppress(RuntimeError):  # the interpreter ends, or the machine has no room for a thread
            self._thread.start()

    def await_record(self, timeout_s: float) -> None:
        """Wait until the lease exists, or cannot be made, for `timeout_s` at most."""
        if self._thread.is_alive():
            self._made.wait(timeout_s)

    def end(self) -> None:
        """Have the lease deleted. May be called again, by any thread."""
        if self._thread.is_alive():
            _ENDING.add(self._thread)
        self._ended.put(None)


#: The threads of this process that keep leases, and how to end each. The copy of a forked process has no living one.
_LIVING: Final[dict[Thread, SimpleQueue[None]]] = {}
#: Those of them whose reads have ended, so that they are about to delete their leases.
_ENDING: Final[set[Thread]] = set()


def leased(located: Located) -> ReadLease | None:
    """A lease on the checkpoint that was found; None where nobody deletes checkpoints of its run by a policy."""
    run, commit = located.run, located.sealed.commit
    return None if run is None or commit is None else lease_on(run.storage, commit.place)


def lease_on(storage: Store, place: Place) -> ReadLease | None:
    """A lease on the checkpoint at `place` of the run in `storage`, as `leased` gives one."""
    try:
        return ReadLease(untimed(storage), place) if lease_is_wanted(storage) else None
    except HoldfastError:
        return None


@contextmanager
def lease_during(sealed: Sealed) -> Iterator[None]:
    """A lease on the checkpoint `sealed`, as `leased` gives one, while the block reads it."""
    lease = None if sealed.commit is None else lease_on(sealed.storage, sealed.commit.place)
    try:
        yield
    finally:
        if lease is not None:
            lease.end()


def lease_is_wanted(storage: Store) -> bool:
    """Whether somebody deletes checkpoints of the run by a policy. One request."""
    return storage.nbytes(LEASES_WANTED_KEY) is not None


def want_leases(storage: Store) -> None:
    """Have readers leave leases in the run from now on."""
    if not lease_is_wanted(storage):
        create_by_name(storage, LEASES_WANTED_KEY, LeasesWanted(created=records.now()))


def await_ended_reads() -> None:
    """Wait until the leases of reads of this process that have ended are deleted; for a short time at most."""
    _join([thread for thread in [*_ENDING] if thread.is_alive()])


def _keep(storage: Store, place: Place, ended: SimpleQueue[None], made: Latch, after_s: float) -> None:
    _LIVING[current_thread()] = ended
    key = ""
    try:
        if _has_ended(ended, after_s):
            return
        while True:
            renewed = create_lease(storage, place, lasting_s=LEASE_S)
            if key:
                storage.delete(key)
            key = renewed
            made.set()
            if _has_ended(ended, LEASE_S / 2):
                storage.delete(key)
                return
    except HoldfastError:
        return  # the reader may not write into the run, or the store is in trouble: the lease ends by itself
    finally:
        made.set()
        del _LIVING[current_thread()]
        _ENDING.discard(current_thread())


def _has_ended(ended: SimpleQueue[None], within_s: float) -> bool:
    """Wait for the end of the read, and say whether it came."""
    with suppress(Empty):
        ended.get(timeout=within_s)
        return True
    return False


def _end_all() -> None:
    """Delete the leases of this process at its end."""
    living = {thread: ended for thread, ended in [*_LIVING.items()] if thread.is_alive()}
    for ended in living.values():
        ended.put(None)
    _join(living)


def _join(threads: Iterable[Thread]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    for thread in threads:
        thread.join(max(end_s - time.monotonic(), 0))


atexit.register(_end_all)
