"""A folder of exports: each step has a folder in it, such as ``step-0000000700``.

The exporter first writes a draft: a hidden folder that has the checkpoint in its name. It renames the draft when the
draft is whole and durable. `folder_writer` removes its records from a draft last, so a draft without records is whole.
To remove an export, the exporter renames the folder first, so that nobody takes the rest of it for a whole export. Each
export has a mark: an empty file that `from_pretrained` ignores. The exporter never replaces, renames or removes a
folder without that mark, because somebody else has put it there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError
from holdfast.exporting.file_tasks import RECORD_NAME, is_files_record
from holdfast.format.records import Place
from holdfast.store.posix_errors import reported

_WHOLE: Final = re.compile(r"step-(?P<step>[0-9]{10,})")
_DRAFT: Final = re.compile(r"\.step-(?P<step>[0-9]{10,})@(?P<epoch>[0-9]+)\.(?P<seq>[0-9]+)\.draft")
#: The file that marks an export, made before the export gets its name.
_MARK: Final = ".holdfast-export-series"
_REMOVED: Final = re.compile(r"\.step-[0-9]{10,}\.removed")


class ExportDraft(NamedTuple):
    """An export that is not known to be whole: its step, and the place of its checkpoint."""

    step: int
    place: Place

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f".{_name(self.step)}@{self.place}.draft"


class ExportSeries:
    """The exports in `folder`, which is made with the first one. One process at a time writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """The folder of the export of `step`, once it is whole."""
        return self.folder / _name(step)

    def steps(self) -> list[int]:
        """The steps of the whole exports, sorted."""
        found = [match for match in map(_WHOLE.fullmatch, self._names()) if match is not None]
        return sorted(int(one["step"]) for one in found if _is_marked(self.folder / one.string))

    def drafts(self) -> list[ExportDraft]:
        """The drafts that interrupted exports left, sorted."""
        found = [match for match in map(_DRAFT.fullmatch, self._names()) if match is not None]
        return sorted(ExportDraft(int(one["step"]), Place(int(one["epoch"]), int(one["seq"]))) for one in found)

    def is_whole(self, draft: ExportDraft) -> bool:
        """Whether all of `draft` is written, so that only its name is missing."""
        path = self.folder / draft.name
        with reported("look at", str(path)):
            names = [each.name for each in path.iterdir()]
        is_under_way = any(name == RECORD_NAME or is_files_record(name) for name in names)
        return not is_under_way and any(name.endswith(".safetensors") for name in names)

    def check(self, step: int) -> None:
        """Refuse a step whose folder's name something else has: a file, a link, or a folder without the mark.

        Raises `ConfigurationError`, code ``config.destination``.
        """
        path = self.path(step)
        if os.path.lexists(path) and not _is_marked(path):
            raise ConfigurationError(
                f"'{path}' is in the way of the export of step {step}, and no ExportHub wrote it.",
                code="config.destination",
                action="Move it elsewhere, or give the exports another folder.",
                path=str(path),
                step=step,
            )

    def publish(self, draft: ExportDraft) -> None:
        """Give a whole draft its name. An older export of the step, as of a history that was rolled back, goes.

        Raises as `check` does.
        """
        self.check(draft.step)
        final, path = self.path(draft.step), self.folder / draft.name
        with reported("mark", str(path)):
            (path / _MARK).touch()
        _fsync(path)
        self._remove(final)
        with reported("rename", str(path)):
            path.rename(final)
        _fsync(self.folder)

    def discard(self, draft: ExportDraft) -> None:
        """Remove a draft."""
        with reported("remove", str(self.folder / draft.name)):
            shutil.rmtree(self.folder / draft.name)

    def keep_newest(self, number: int) -> list[int]:
        """Remove all whole exports but the `number` that were finished last. Returns the steps of those that went."""
        with reported("look at", str(self.folder)):
            finished = {step: self.path(step).stat().st_mtime_ns for step in self.steps()}
        gone = sorted(finished, key=lambda step: (finished[step], step))[:-number]
        for step in gone:
            self._remove(self.path(step))
        return sorted(gone)

    def clean(self) -> None:
        """Finish interrupted removals of folders."""
        for path in (self.folder / name for name in filter(_REMOVED.fullmatch, self._names())):
            with reported("remove", str(path)):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)

    def _remove(self, path: Path) -> None:
        if not path.exists():
            return
        hidden = path.with_name(f".{path.name}.removed")
        with reported("remove", str(path)):
            if hidden.exists():
                shutil.rmtree(hidden)
            path.rename(hidden)
            _fsync(self.folder)
            shutil.rmtree(hidden)

    def _names(self) -> list[str]:
        if not self.folder.exists():
            return []
        with reported("list", str(self.folder)):
            return [each.name for each in self.folder.iterdir()]


def _fsync(folder: Path) -> None:
    with reported("make durable", str(folder)):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # some network file systems have no fsync for folders
                raise
        finally:
            os.close(descriptor)


def _is_marked(path: Path) -> bool:
    """Whether `path` is a folder that an `ExportSeries` wrote."""
    with reported("look at", str(path)):
        return path.is_dir() and not path.is_symlink() and (path / _MARK).is_file()


def _name(step: int) -> str:
    return f"step-{step:010d}"
