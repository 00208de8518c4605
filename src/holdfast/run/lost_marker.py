"""Repair of a run's lost or damaged marker from the run's own checkpoints: every manifest names the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from holdfast.errors import ConfigurationError, CorruptError, StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.manifest import Manifest
from holdfast.format.records import CHECKPOINTS, MARKER_KEY, Marker
from holdfast.run.history import Run
from holdfast.run.uncommitted import UNREADABLE
from holdfast.store.base import Store

#: The id of a run of which no manifest says the id.
_UNKNOWN_ID: Final = "0" * 32


def unmarked_run(storage: Store) -> Run:
    """The run at the root of `storage`, whose marker is lost or damaged, by the marker that it probably had. Changes
    nothing; for the doctor."""
    return Run(storage, probable_marker(storage) or _marker(_UNKNOWN_ID, records.now()))


def probable_marker(storage: Store) -> Marker | None:
    """The probable content of the lost marker; None where no manifest says it.

    Manifests of committed checkpoints say it, if all of them agree; else, where none is committed, all manifests.
    """
    run = Run(storage, _marker(_UNKNOWN_ID, 0.0))
    folders = set(storage.list(CHECKPOINTS))
    bodies = list(_bodies(storage, folders & set(_committed(run)))) or list(_bodies(storage, folders))
    run_ids = {body.run_id for body in bodies}
    if len(run_ids) != 1:
        return None
    return _marker(run_ids.pop(), min(body.created for body in bodies))


def make_marker_anew(storage: Store) -> None:
    """Write the lost or damaged marker anew; durable on return. A readable marker stays.

    Raises `ConfigurationError`, code ``config.remedy``, where no manifest says the id of the run, or where something
    that is no file has the marker's name and cannot be removed.
    """
    path, marker = storage.path(MARKER_KEY), probable_marker(storage)
    if marker is None:
        what = f"the checkpoints of '{storage.location}' do not say what its marker was."
        raise _no_remedy(path, what, "Restore the marker from another copy of the run.")
    if storage.create(MARKER_KEY, records.encode(marker)):
        return
    try:
        Run.open(storage)
    except CorruptError:
        try:
            storage.delete(MARKER_KEY)
        except StorageError as error:
            raise _no_remedy(path, error.message, f"Remove '{path}' by hand, then finish again.") from error
        storage.create(MARKER_KEY, records.encode(marker))
        Run.open(storage)


def _committed(run: Run) -> Iterator[str]:
    """The names of the folders that readable commits name."""
    for place in run.places():
        try:
            yield run.commit(place).checkpoint
        except UNREADABLE:
            continue


def _bodies(storage: Store, folders: Iterable[str]) -> Iterator[Manifest]:
    """The bodies of the readable manifests in `folders`."""
    for folder in folders:
        key = records.checkpoint_key(folder, fmt.NAME)
        try:
            yield fmt.decode(storage.read(key), path=storage.path(key)).body
        except UNREADABLE:
            continue


def _marker(run_id: str, created: float) -> Marker:
    return Marker(run_id=run_id, format=records.FORMAT, writer=records.writer(), created=created)


def _no_remedy(path: str, what: str, action: str) -> ConfigurationError:
    return ConfigurationError(what, code="config.remedy", action=action, path=path)
