"""Helpers of commands for runs: how to find one by its path, and how to describe its head."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import CHECKPOINTS
from holdfast.run.history import Run, is_folder
from holdfast.run.paths import Selection, parse
from holdfast.store.urls import open_store


def open_run(path: str) -> Run:
    """Open the run at `path`. Raises `ConfigurationError` for a path that selects one checkpoint, or is one."""
    target = parse_run(path)
    storage = open_store(target.location)
    if is_folder(storage):
        folder = Path(target.root).absolute().parent
        raise _one_checkpoint(path, "is", f"Name {folder.parent if folder.name == CHECKPOINTS else 'its run'}.")
    return Run.open(storage, origin=target.origin)


def parse_run(path: str) -> Selection:
    """Parse the path of a run, which need not exist. Raises `ConfigurationError` for one that selects a checkpoint."""
    target = parse(path)
    if target.step is not None or target.place is not None:
        raise _one_checkpoint(path, "selects", f"Name the run alone: {target.root}.")
    return target


def _one_checkpoint(path: str, how: str, action: str) -> ConfigurationError:
    what = f"'{path}' {how} one checkpoint, but this command needs a whole run."
    return ConfigurationError(what, code="config.path", action=action, path=path)


class RunHead(msgspec.Struct, frozen=True):
    """The head of a run.

    `place` and `step` are null where nothing is committed, or where its record cannot be read: then `damage` is the
    code of the error.
    """

    place: str | None = None
    step: int | None = None
    damage: str | None = None

    @staticmethod
    def of(run: Run) -> RunHead:
        """The current head of `run`."""
        try:
            head = run.head()
        except CorruptError as error:
            return RunHead(damage=error.code)
        return RunHead() if head is None else RunHead(str(head.place), head.step)

    def __str__(self) -> str:
        if self.damage is not None:
            return f"unreadable ({self.damage})"
        return "nothing yet" if self.place is None else f"step {self.step} at {self.place}"
