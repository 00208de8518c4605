"""The possible contents of a disk after a power failure, built from the recorded operations of a save.

The model is the strictest that POSIX allows. A write to a file is only certain after an fsync of that file: until then
each block of 4096 bytes is there or not, and the size is any that the file has had since. A directory entry
(of a new file or folder, a link, a removal) is only certain after an fsync of its directory: until then each name is
in any of the states that it went through, whatever its neighbours are in. An fsync that is under way covers nothing.

Run as a script (``python -m tests.faults.power_loss FOLDER``) it records the scenario and prints the calls, for strace.
"""

from __future__ import annotations

import builtins
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from holdfast.store import linux, posix

BLOCK = 4096

#: Calls of `os` that change nothing; any that is neither here nor recorded fails the test that meets it.
_HARMLESS = frozenset(
    {"close", "fsencode", "fspath", "fstat", "isatty", "listdir", "lstat", "preadv", "stat", "statvfs", "strerror"}
)


@dataclass(frozen=True)
class Write:
    """Bytes put into a file."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """A file's size set, or with `grow` made at least that."""

    file: int
    nbytes: int
    grow: bool = False


@dataclass(frozen=True)
class Entry:
    """The new meaning of a name in a folder: a file, a folder (-1), or nothing (None)."""

    folder: str
    name: str
    target: int | None


@dataclass(frozen=True)
class SyncFile:
    """Changes of the file before event number `covers` are certain."""

    file: int
    covers: int


@dataclass(frozen=True)
class SyncFolder:
    """Changes of the folder's entries before event number `covers` are certain."""

    folder: str
    covers: int


@dataclass(frozen=True)
class Mark:
    """Something that the caller did or learned: "begin" or "returned", the step, and what may be the head meanwhile."""

    what: Literal["begin", "returned"]
    step: int
    heads: frozenset[int] = frozenset()


Event = Write | Resize | Entry | SyncFile | SyncFolder | Mark
FOLDER = -1


class Recorder:
    """The log of what the POSIX backend of this process does below `root`, an empty folder.

    `skip` says which fsyncs are not made, by the path of the file or folder: as if the line were not in the source.
    """

    def __init__(self, root: Path, *, skip: Callable[[str, bool], bool] = lambda path, is_folder: False) -> None:
        self.log: list[Event] = []
        self.calls: list[tuple[str, str]] = []
        self._root = str(root)
        self._skip = skip
        self._lock = threading.Lock()
        self._num_files = 0
        self._files: dict[int, int] = {}  # by inode, the last file that had it
        self._paths: dict[int, str] = {}

    def mark(self, what: Literal["begin", "returned"], step: int, heads: frozenset[int] = frozenset()) -> None:
        self.log.append(Mark(what, step, heads))

    @contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(posix.__dict__, "os", self)
            patch.setitem(posix.__dict__, "open", self._open_object)
            patch.setitem(posix.__dict__, "reserve", self._reserve)
            patch.setitem(posix.__dict__, "rename_without_replace", self._rename)
            yield

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)
        if callable(value) and not isinstance(value, type) and name not in _HARMLESS:
            raise AssertionError(f"power loss has no model of os.{name}")
        return value

    # The calls of `os`, as the backend makes them.

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        descriptor = os.open(path, flags, mode)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            self._created(path, descriptor)
        return descriptor

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        content = bytes(data)
        count = os.pwrite(descriptor, data, offset)
        self._add("write", self._path(descriptor), Write(self._file(descriptor), offset, content[:count]))
        return count

    def ftruncate(self, descriptor: int, nbytes: int) -> None:
        os.ftruncate(descriptor, nbytes)
        self._add("truncate", self._path(descriptor), Resize(self._file(descriptor), nbytes))

    def fsync(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_folder = os.path.isdir(path)
        if self._skip(path, is_folder):
            return
        covers = len(self.log)
        os.fsync(descriptor)
        if path == self._root or path.startswith(self._root + os.sep):
            event = SyncFolder(self._relative(path), covers) if is_folder else SyncFile(self._file(descriptor), covers)
            self._add("fsync", path, event)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(path, mode)
        self._add("mkdir", path, self._entry(path, FOLDER))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)
        self._add("link", target, self._entry(target, self._files[os.stat(target).st_ino]))

    def unlink(self, path: str) -> None:
        os.unlink(path)
        self._add("unlink", path, self._entry(path, None))

    @property
    def path(self) -> Any:
        return os.path

    def _rename(self, source: str, target: str) -> bool:
        raise AssertionError("power loss has no model of a rename: this file system has links")

    def _reserve(self, descriptor: int, nbytes: int) -> None:
        linux.reserve(descriptor, nbytes)
        if nbytes:
            self._add("fallocate", self._path(descriptor), Resize(self._file(descriptor), nbytes, grow=True))

    def _open_object(self, path: str | int, mode: str, opener: Callable[[str, int], int] | None = None) -> Any:
        if isinstance(path, int) or mode != "xb":
            return builtins.open(path, mode)
        assert opener is not None
        return _Object(self, opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))

    # The log.

    def _created(self, path: str, descriptor: int) -> None:
        with self._lock:
            self._num_files += 1
            self._files[os.fstat(descriptor).st_ino] = self._num_files
        self._paths[self._num_files] = path
        self._add("create", path, self._entry(path, self._num_files))

    def _add(self, call: str, path: str, event: Event) -> None:
        with self._lock:
            self.calls.append((call, path))
            self.log.append(event)

    def _file(self, descriptor: int) -> int:
        return self._files[os.fstat(descriptor).st_ino]

    def _path(self, descriptor: int) -> str:
        return self._paths[self._file(descriptor)]

    def _relative(self, path: str) -> str:
        return os.path.relpath(path, self._root)

    def _entry(self, path: str, target: int | None) -> Entry:
        return Entry(self._relative(os.path.dirname(path)), os.path.basename(path), target)


class _Object:
    """A small file as `open` gives it: what is written goes to the kernel when it is flushed."""

    def __init__(self, recorder: Recorder, descriptor: int) -> None:
        self._recorder = recorder
        self._descriptor = descriptor
        self._done = 0
        self._held = b""

    def write(self, data: bytes) -> int:
        self._held += data
        return len(data)

    def flush(self) -> None:
        while self._held:
            count = self._recorder.pwrite(self._descriptor, self._held, self._done)
            self._done, self._held = self._done + count, self._held[count:]

    def fileno(self) -> int:
        return self._descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        os.close(self._descriptor)


@dataclass
class _Pending:
    """The certain state of something, and the events that may have happened to it since."""

    certain: list[Event] = field(default_factory=list)
    possible: list[Event] = field(default_factory=list)


#: A state of the disk: what is in each file, None for folders, by path relative to the root.
Tree = dict[str, bytes | None]


def build(tree: Tree, root: Path) -> None:
    """Make that state below `root`, which does not exist."""
    root.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


class Remains:
    """The legal states of the disk when the power fails after the first `num_events` of a log."""

    def __init__(self, log: list[Event], num_events: int) -> None:
        happened = log[:num_events]
        file_sync: dict[int, int] = {}
        folder_sync: dict[str, int] = {}
        for event in happened:
            if isinstance(event, SyncFile):
                file_sync[event.file] = max(event.covers, file_sync.get(event.file, 0))
            if isinstance(event, SyncFolder):
                folder_sync[event.folder] = max(event.covers, folder_sync.get(event.folder, 0))
        self._files: dict[int, _Pending] = {}
        self._entries: dict[tuple[str, str], _Pending] = {}
        for number, event in enumerate(happened):
            if isinstance(event, Write | Resize):
                pending = self._files.setdefault(event.file, _Pending())
                synced = file_sync.get(event.file, 0)
            elif isinstance(event, Entry):
                pending = self._entries.setdefault((event.folder, event.name), _Pending())
                synced = folder_sync.get(event.folder, 0)
            else:
                continue
            (pending.certain if number < synced else pending.possible).append(event)

    def sample(self, generator: random.Random, share: float) -> Tree:
        """One of the states: of what is uncertain, about `share` happened."""
        folders: dict[str, dict[str, int]] = {}
        for (folder, name), pending in self._entries.items():
            events = [*pending.certain, *_some_first(pending.possible, generator, share)]
            last = events[-1] if events else None
            if isinstance(last, Entry) and last.target is not None:
                folders.setdefault(folder, {})[name] = last.target
        contents: dict[int, bytes] = {}
        tree: Tree = {}
        # A folder whose own entry was lost takes its content with it: only what hangs on the root remains.
        reached = ["."]
        while reached:
            folder = reached.pop()
            for name, target in folders.get(folder, {}).items():
                path = os.path.normpath(os.path.join(folder, name))
                if target == FOLDER:
                    tree[path] = None
                    reached.append(path)
                    continue
                if target not in contents:  # two names of one file have one content
                    contents[target] = self._content(target, generator, share)
                tree[path] = contents[target]
        return tree

    def _content(self, file: int, generator: random.Random, share: float) -> bytes:
        pending = self._files.get(file, _Pending())
        content = bytearray()
        for event in pending.certain:
            _apply(event, content)
        sizes = [len(content)]
        size = len(content)
        for event in pending.possible:
            size = _size_after(event, size)
            sizes.append(size)
            if isinstance(event, Write):
                for start in range(0, len(event.data), BLOCK):
                    if generator.random() < share:
                        _apply(Write(file, event.offset + start, event.data[start : start + BLOCK]), content)
        # The later sizes are as likely as anything else is to have happened.
        wanted = next((size for size in reversed(sizes) if generator.random() < share), sizes[0])
        return bytes(content[:wanted].ljust(wanted, b"\0"))


def _some_first(events: list[Event], generator: random.Random, share: float) -> list[Event]:
    """The events of one name happen in order: any number of the first ones."""
    count = 0
    while count < len(events) and generator.random() < share:
        count += 1
    return events[:count]


def _size_after(event: Event, nbytes: int) -> int:
    if isinstance(event, Write):
        return max(nbytes, event.offset + len(event.data))
    assert isinstance(event, Resize)
    return max(nbytes, event.nbytes) if event.grow else event.nbytes


def _apply(event: Event, content: bytearray) -> None:
    nbytes = _size_after(event, len(content))
    del content[nbytes:]
    content.extend(bytes(nbytes - len(content)))
    if isinstance(event, Write):
        content[event.offset : event.offset + len(event.data)] = event.data


def expected(log: list[Event], num_events: int) -> frozenset[int | None]:
    """The steps that the head may be of when the power fails after so many events; None: there may be no head."""
    heads: frozenset[int | None] = frozenset({None})
    for event in log[:num_events]:
        if isinstance(event, Mark):
            heads = frozenset({event.step}) if event.what == "returned" else heads | event.heads | {event.step}
    return heads


def main() -> None:
    """Record the scenario and print its calls."""
    from tests.faults.test_power_loss import scenario

    recorder = Recorder(Path(sys.argv[1]))
    scenario(recorder, Path(sys.argv[1]))
    sys.stdout.write(json.dumps(recorder.calls))


if __name__ == "__main__":
    main()
