"""Requests for a save, which any process leaves in a run for the job that trains.

A request is a record of its own in ``requests/``. It is no part of the history: the job deletes it when a save has
begun after it saw the request.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
from collections.abc import Iterable
from typing import Final

from holdfast.errors import ConfigurationError, HoldfastError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Record, Seconds
from holdfast.run.history import Run
from holdfast.run.paths import parse
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store

REQUESTS: Final = "requests"
_BEFORE_THE_FIRST_SAVE: Final = (
    " A job that has not saved yet has no run: only a signal or a file can ask it, OnRequest(signum=...) or "
    "OnRequest(file=...)."
)
_NAME: Final = re.compile(r"save-[0-9a-f]{16}\.json")


class SaveWanted(Record, frozen=True, kw_only=True, tag="save request"):
    """The record of a request: when it was `created`, in unix seconds, and `by` whom."""

    created: Seconds
    by: str


def request_save(run: str | os.PathLike[str] | Location) -> None:
    """Ask the job that trains on `run` to save soon. Returns when the request is stored.

    The job needs the policy `OnRequest`. If no job runs, the next one saves soon after its start. Any process may call
    this.

    Raises:
        NotFoundError: there is no run, because the job has not saved yet, for example.
        ConfigurationError: `run` names one checkpoint; code ``config.path``.
        StorageError: the request cannot be stored.
    """
    target = parse(run)
    if target.step is not None or target.place is not None:
        raise ConfigurationError(
            f"'{target}' is one checkpoint; a job saves into a run.",
            code="config.path",
            action=f"Name the run alone: {target.root}.",
            path=target.root,
        )
    try:
        run_of_job = Run.open(open_store(target.location), origin=target.origin)
    except NotFoundError as error:
        error.action += _BEFORE_THE_FIRST_SAVE
        raise
    leave_request(run_of_job)


def leave_request(run: Run) -> None:
    """Store a request in `run`."""
    wanted = SaveWanted(created=records.now(), by=_who())
    run.storage.create(f"{REQUESTS}/save-{secrets.token_hex(8)}.json", records.encode(wanted))


def is_request_name(name: str) -> bool:
    """Whether a file of this name in ``requests/`` is a request."""
    return _NAME.fullmatch(name) is not None


def pending_requests(store: Store) -> dict[str, str]:
    """The names of the requests in a run, each with who asked. One request to the store, and one for each."""
    return {name: _asker(store, name) for name in store.list(REQUESTS) if is_request_name(name)}


def delete_requests(store: Store, names: Iterable[str]) -> None:
    """Delete requests that a save has granted."""
    for name in names:
        store.delete(f"{REQUESTS}/{name}")


def _asker(store: Store, name: str) -> str:
    """The maker of the request `name`, as far as its record can be read."""
    key = f"{REQUESTS}/{name}"
    try:
        return records.decode(store.read(key), SaveWanted, path=store.path(key)).by
    except HoldfastError:
        return "somebody"


def _who() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container often has no name for its user
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"
