"""Pins and leases hold checkpoints of a run. A protocol makes sure that a removal and a holder see each other.

Somebody who must rely on a checkpoint, and somebody who is about to delete it, each create a record first and look for
the record of the other afterwards. A store shows a created object in every later listing, so at least one of the two
sees the other:

* *A removal* creates a **notice**, then looks for pins, leases and epochs, and only then creates the tombstone, which
  hides the checkpoint. If it finds that somebody needs the checkpoint, it deletes the notice, and nothing has happened.
* *Somebody who pins* a checkpoint, or *opens an epoch* from it, creates the pin or the epoch, and then looks for
  notices. If there is none, every later removal finds the pin or the epoch. If there is one, its removal may have
  looked too early: so he waits until the notice is gone (`await_removals`), and then looks for the tombstone.
* *A reader* creates a **lease** and does not care for notices, because he needs only the files: each removal looks for
  leases once more after the tombstone exists, and deletes no file while there is one.

A removal that takes longer than `NOTICE_S` from its notice to its tombstone gives up. So whoever has watched a notice
for longer than that knows that its process is dead or has given up. The argument needs no clocks of two machines.

They matter only for the end of a lease whose reader was killed: a lease counts for `CLOCKS_S` longer than it says, so
clocks may differ by that much.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError, HoldfastError, StorageError
from holdfast.format import records
from holdfast.format.hold_records import (
    PINS,
    HoldName,
    Lease,
    RemovalNotice,
    lease_key,
    notice_key,
    parse_hold_name,
)
from holdfast.format.records import Place, Record
from holdfast.store.base import Store

#: The time for which a lease counts after its end, because clocks of machines differ.
CLOCKS_S: Final = 600.0
#: Longest time from a removal's notice to its tombstone.
NOTICE_S: Final = 20.0
#: Longest wait for the end of an announced removal. Longer than `NOTICE_S`, so a removal that outlasts it is dead.
PATIENCE_S: Final = 30.0
#: The time after which a notice is that of a dead process, so that anybody may delete it.
OLD_NOTICE_S: Final = 86_400.0
#: Time between two looks for a notice.
_LOOK_S: Final = 0.02


class Holds(NamedTuple):
    """The records in ``pins/``, as of one listing. `ended` are the keys of leases and notices that no longer count."""

    pinned: frozenset[Place]
    leases: tuple[HoldName, ...]
    ended: tuple[str, ...]

    @staticmethod
    def of(storage: Store) -> Holds:
        """The pins and leases that are in storage now. One request."""
        now_s = time.time()
        pinned, leases, ended = set(), [], []
        for name in storage.list(PINS):
            hold = parse_hold_name(name)
            if hold is None:
                continue
            if hold.kind == "pin":
                pinned.add(hold.place)
            elif hold.time_s + (CLOCKS_S if hold.kind == "until" else OLD_NOTICE_S) <= now_s:
                ended.append(f"{PINS}/{name}")
            elif hold.kind == "until":
                leases.append(hold)
        return Holds(frozenset(pinned), tuple(leases), tuple(ended))

    def reasons(self, place: Place) -> tuple[str, ...]:
        """The reasons why the checkpoint at `place` must stay."""
        until_s = max((lease.time_s for lease in self.leases if lease.place == place), default=None)
        pin = ("it is pinned",) if place in self.pinned else ()
        return pin if until_s is None else (*pin, f"a reader uses it, until {clock(until_s)} UTC at the latest")


def check_unheld(storage: Store, place: Place) -> None:
    """Raise `ConfigurationError` where the checkpoint at `place` is pinned (``config.pinned``), or a reader uses it
    (``config.in_use``). One request."""
    holds = Holds.of(storage)
    if place in holds.pinned:
        action = f"Unpin it first (holdfast unpin '{storage.location}@{place}'), or choose another one."
        raise _held(storage, place, "config.pinned", " and ".join(holds.reasons(place)), action)
    _check_unread(storage, place, holds)


def check_unread(storage: Store, place: Place) -> None:
    """Raise `ConfigurationError`, code ``config.in_use``, where a reader uses the checkpoint at `place`. One
    request."""
    _check_unread(storage, place, Holds.of(storage))


@contextmanager
def removal_announced(storage: Store, place: Place) -> Iterator[Callable[[], None]]:
    """Tell everybody, during the ``with`` block, that the checkpoint at `place` is about to be deleted.

    Gives a function to call right before the tombstone is created: it raises `StorageError` where that is too late,
    because the store was slow. The notice of a process that dies in the block stays, and harms nobody.
    """
    key = _created_notice(storage, place)
    end_s = time.monotonic() + NOTICE_S

    def check_in_time() -> None:
        if time.monotonic() > end_s:
            raise StorageError(
                f"checkpoint {place} of '{storage.location}' was not removed: the store took more than {NOTICE_S:g} s "
                "to answer.",
                code="storage.timeout",
                action="Try again when the file server is less busy.",
                path=storage.location.url,
                retryable=True,
            )

    try:
        yield check_in_time
    finally:
        storage.delete(key)


def await_removals(storage: Store, place: Place) -> None:
    """Wait until each removal of the checkpoint at `place` that is announced now has ended, or can no longer begin.

    One request where none is announced; that is nearly always so.
    """
    end_s = time.monotonic() + PATIENCE_S
    announced = _notices(storage, place)
    while announced and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        announced &= _notices(storage, place)


def create_lease(storage: Store, place: Place, *, lasting_s: float) -> str:
    """Create the lease of a reader that lasts for `lasting_s`, and return its key. Raises `StorageError` where the
    reader may not write into the run."""
    until_s = min(records.now() + lasting_s, float(records.LAST_S))
    lease = Lease(place=place, until=until_s, holder=holder())
    key = lease_key(lease, secrets.token_hex(8))
    storage.create(key, records.encode(lease))
    return key


def create_by_name(storage: Store, key: str, record: Record) -> bool:
    """As `Store.create`, for a `record` whose name decides, so that nobody need read it: where storage is full, it is
    empty. An empty file takes a name and no block, so a deletion can begin on a full disk, which it is to make room on.
    """
    try:
        return storage.create(key, records.encode(record))
    except StorageError as error:
        if error.code != "storage.full":
            raise
    return storage.create(key, b"")


def is_held(error: HoldfastError) -> bool:
    """Whether `error` says that somebody needs a checkpoint, which is therefore not deleted."""
    return error.code in ("config.needed", "config.pinned", "config.in_use")


def delete_ended(storage: Store, holds: Holds) -> None:
    """Delete the records that no longer count."""
    for key in holds.ended:
        with suppress(StorageError):
            storage.delete(key)


def _check_unread(storage: Store, place: Place, holds: Holds) -> None:
    if any(lease.place == place for lease in holds.leases):
        action = "Wait until the reader has ended, or choose another one."
        raise _held(storage, place, "config.in_use", " and ".join(holds.reasons(place)), action)


def _held(storage: Store, place: Place, code: str, why: str, action: str) -> ConfigurationError:
    root = storage.location
    return ConfigurationError(
        f"checkpoint {place} of '{root}' cannot be removed: {why}.", code=code, action=action, path=root.url
    )


def _created_notice(storage: Store, place: Place) -> str:
    notice = RemovalNotice(place=place, created=records.now(), holder=holder())
    key = notice_key(notice, secrets.token_hex(8))
    create_by_name(storage, key, notice)
    return key


def _notices(storage: Store, place: Place) -> set[str]:
    """The names of the notices of removals of the checkpoint at `place`."""
    found = ((name, parse_hold_name(name)) for name in storage.list(PINS))
    return {name for name, hold in found if hold is not None and hold.kind == "removing" and hold.place == place}


def holder() -> str:
    """The machine and the process, for messages."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def clock(unix_s: int) -> str:
    """A time in unix seconds as text for people, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(unix_s, records.LAST_S)))
