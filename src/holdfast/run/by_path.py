"""Runs and checkpoints by their paths: that of a run, or ``RUN@step=700``, ``RUN@3.12`` (`holdfast.run.paths`)."""

from __future__ import annotations

import os
from typing import NamedTuple

from holdfast.errors import ConfigurationError
from holdfast.format.records import CHECKPOINTS, Commit
from holdfast.run.history import Run, is_folder, no_head
from holdfast.run.paths import Selection, parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store

RunPath = str | os.PathLike[str] | Location


class CommittedAt(NamedTuple):
    """A committed checkpoint, and its run."""

    run: Run
    commit: Commit


def open_run(path: RunPath) -> Run:
    """Open the run at `path`. Raises `ConfigurationError` for a path that selects one checkpoint, or is one."""
    target = parse_run(path)
    storage = open_store(target.location)
    if is_folder(storage):
        folder = target.location.parent
        run = folder.parent if folder is not None and folder.url.endswith(f"/{CHECKPOINTS}") else None
        raise _one_checkpoint(path, "is", f"Name {run or 'its run'}.")
    return Run.open(storage, origin=target.origin)


def parse_run(path: RunPath) -> Selection:
    """Parse the path of a run, which need not exist. Raises `ConfigurationError` for one that selects a checkpoint."""
    target = parse(path)
    if target.step is not None or target.place is not None:
        raise _one_checkpoint(path, "selects", f"Name the run alone: {target.root}.")
    return target


def checkpoint_at(path: RunPath) -> CommittedAt:
    """The checkpoint that `path` selects, or the head of the run there."""
    target = parse(path)
    if target.step is None and target.place is None:
        run = open_run(path)
        return CommittedAt(run, run.head() or no_head(run))
    run = Run.open(open_store(target.location), origin=target.origin)
    return CommittedAt(run, run.find(step=target.step, place=target.place))


def selected_checkpoint(path: RunPath) -> CommittedAt:
    """The checkpoint that `path` selects. Raises `ConfigurationError`, code ``config.path``, for one that selects
    none."""
    target = parse(path)
    if target.step is None and target.place is None:
        raise ConfigurationError(
            f"'{path}' does not name a checkpoint of a run.",
            code="config.path",
            action=f"Write {target.root}@PLACE or {target.root}@step=N; holdfast ls {target.root} lists them.",
            path=str(path),
        )
    return checkpoint_at(path)


def _one_checkpoint(path: RunPath, how: str, action: str) -> ConfigurationError:
    what = f"'{path}' {how} one checkpoint, but a whole run is needed here."
    return ConfigurationError(what, code="config.path", action=action, path=str(path))
