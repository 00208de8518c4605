"""The folder on a disk of a node that takes the files of checkpoints before the run does.

Its layout is that of the run, below the run's id, and its files are the run's, byte for byte::

    <root>/<run id>/checkpoints/step-...-<id>/    the manifest, the data files of this node's ranks, and the seal
    <root>/<run id>/generations/<id>              what a keeper must know to bring them to the run

Every file appears whole and durable under its name, or not at all. The seal comes last: it says that the run has the
commit. So what there is says by itself what is left to do, after the death of any process and after power loss:

1. A part without a seal is owed to the run.
2. A part with a seal may be removed: its data files first, then its manifest and seal, and its generation last. Whoever
   finds a generation without a manifest and data files finds the remains of a removal, and removes them too.
3. What the disk has damaged is no reason to remove the rest. A seal that is not the checkpoint's counts as none, and a
   manifest that is lost beside data files is written again.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Place, Seal
from holdfast.node_disk.disk_store import NODE_DISK, DiskStore
from holdfast.node_memory.generations import Generation, decode_generation, encode_generation
from holdfast.node_memory.node_folder import NodeFolder, why_not_private
from holdfast.node_memory.noted_disks import NotedDisk, is_noted, note_disk, noted_disks
from holdfast.run.complete import StoredManifest, check_file
from holdfast.store.base import Location

_GENERATIONS: Final = "generations"
_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
#: Age at which a file in the making counts as left, even where nothing shows whether its writer lives.
_LEFT_S: Final = 3600.0

#: Folders that the log has called read-only.
_told: Final = set[Path]()
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskPart:
    """This node's part of a checkpoint of the run `run_id`, on its disk. `store` is the folder of the run there."""

    store: DiskStore
    run_id: str
    generation: Generation

    @property
    def checkpoint_id(self) -> str:
        """The id of the checkpoint."""
        return self.generation.checkpoint_id

    @property
    def place(self) -> Place:
        """The place of the checkpoint in the history of the run."""
        return self.generation.place

    def key(self, name: str) -> str:
        """The key of file `name` of the checkpoint, in this store as in the run's."""
        return records.checkpoint_key(self.generation.folder, name)

    def path(self, number: int) -> str:
        """The path of data file `number`."""
        return self.store.path(self.key(self._names[number]))

    def begin(self) -> None:
        """Create the folder with the manifest and the generation, if they are missing; durable on return.

        Raises `ConfigurationError`, code ``config.local``, where the folder is another user's; and `StorageError`.
        """
        own_folder(Path(self.store.location.url))
        self.store.create(self.key(fmt.NAME), self.generation.manifest)
        self.store.create(self._generation_key, encode_generation(self.generation))

    @property
    def is_drained(self) -> bool:
        """Whether the run has the commit of the checkpoint, as far as this disk can tell."""
        return self._seal() is not None

    def has(self, numbers: Collection[int]) -> bool:
        """Whether all data files with these numbers are still on the disk, in whatever condition."""
        return all(self.store.nbytes(self.key(self._names[number])) is not None for number in numbers)

    def stored_nbytes(self, numbers: Collection[int]) -> tuple[int, int]:
        """Of the data files with these numbers, the bytes that went to the run, and those that did not, because an
        earlier checkpoint has them there. Only where `is_drained`."""
        seal = self._seal()
        files = [seal.files[number] for number in numbers] if seal is not None else []
        referenced_nbytes = sum(file.nbytes for file in files if file.is_referenced)
        return sum(file.nbytes for file in files) - referenced_nbytes, referenced_nbytes

    def note_commit(self, seal: bytes) -> None:
        """Record that the run has the commit of the checkpoint, whose `seal` this is."""
        key = self.key(records.SEAL_NAME)
        if not self.store.create(key, seal) and not self.is_drained:
            self.store.delete(key)
            self.store.create(key, seal)

    def file_numbers(self) -> list[int]:
        """The numbers of the data files that are there."""
        present = set(self.store.list(self._folder))
        return [number for number, name in enumerate(self._names) if name in present]

    def held_files(self) -> Iterator[tuple[int, FileSeal]]:
        """The number and the seal's entry of each data file that is there and has the header that the manifest
        requires. Reads their headers. Logs and skips other files."""
        files = Files(self._stored.manifest)
        for number in self.file_numbers():
            try:
                yield number, check_file(self.store, self._stored, files.layout(number))
            except HoldfastError as error:
                _log.warning("a file on the disk of this node is passed over: %s", error)

    def remove(self) -> None:
        """Remove the part. If this is interrupted, `sweep` goes on with it."""
        self.remove_leftovers()
        names = [name for name in self.store.list(self._folder) if name not in (fmt.NAME, records.SEAL_NAME)]
        for name in (*names, fmt.NAME, records.SEAL_NAME):
            self.store.delete(f"{self._folder}/{name}")
        self.store.delete(self._generation_key)

    def remove_leftovers(self) -> None:
        """Remove the files that dead writers left without a name."""
        for name in self.store.leftovers(self._folder, older_than_s=_LEFT_S):
            self.store.delete(f"{self._folder}/{name}")

    def _seal(self) -> Seal | None:
        """The seal of the checkpoint; None where there is none, or another file has its name."""
        key = self.key(records.SEAL_NAME)
        try:
            seal = records.decode(self.store.read(key), Seal, path=self.store.path(key))
        except (NotFoundError, CorruptError):
            return None
        is_it = (seal.checkpoint_id, seal.place) == (self.checkpoint_id, self.place)
        return seal if is_it and len(seal.files) == len(self._names) else None

    @cached_property
    def _stored(self) -> StoredManifest:
        generation = self.generation
        manifest = fmt.decode(generation.manifest, path=self.store.path(self._generation_key))
        return StoredManifest(generation.folder, generation.manifest, manifest)

    @cached_property
    def _names(self) -> Sequence[str]:
        return self._stored.manifest.file_names

    @property
    def _folder(self) -> str:
        return f"{records.CHECKPOINTS}/{self.generation.folder}"

    @property
    def _generation_key(self) -> str:
        return f"{_GENERATIONS}/{self.generation.checkpoint_id}"


def part_of(root: Path, run_id: str, generation: Generation) -> DiskPart:
    """This node's part of the checkpoint of `generation` below `root`, whether it is there yet or not."""
    return DiskPart(DiskStore(str(root / run_id)), run_id, generation)


def found_parts(disk: NotedDisk) -> Iterator[DiskPart]:
    """The parts of checkpoints of one run on a disk of this node, in any order. Folders of other users and of other
    runs are passed over, and damaged records too."""
    for run_id, store in _stores(disk):
        for name in store.list(_GENERATIONS):
            key = f"{_GENERATIONS}/{name}"
            with suppress(NotFoundError):
                try:
                    generation = decode_generation(store.read(key), path=store.path(key), tier=NODE_DISK)
                except CorruptError as error:
                    _log.warning("%s", error)
                    continue
                if generation.run == disk.run and generation.checkpoint_id == name:
                    yield DiskPart(store, run_id, generation)


def _stores(disk: NotedDisk) -> Iterator[tuple[str, DiskStore]]:
    """The ids of the runs of this user on a disk, with their folders there."""
    for run_id in _names(disk.path):
        folder = disk.path / run_id
        if _RUN_ID.fullmatch(run_id) and _is_own(folder):
            yield run_id, DiskStore(str(folder))


def sweep(disk: NotedDisk) -> None:
    """Remove what dead keepers left: parts whose removal was interrupted, and files in the making. Only for the keeper
    of the run on this node."""
    for part in list(found_parts(disk)):
        if part.store.nbytes(part.key(fmt.NAME)) is not None:
            part.remove_leftovers()
        elif part.file_numbers():
            part.begin()
        else:
            part.remove()
    for _, store in _stores(disk):
        _sweep_nameless(store)


def _sweep_nameless(store: DiskStore) -> None:
    """Remove what is left of parts that have no generation, because their keeper died before it was there."""
    for name in store.leftovers(_GENERATIONS, older_than_s=_LEFT_S):
        store.delete(f"{_GENERATIONS}/{name}")
    known = set(store.list(_GENERATIONS))
    for name in store.list(records.CHECKPOINTS):
        folder, about = f"{records.CHECKPOINTS}/{name}", records.parse_folder(name)
        if about is None or about[1] in known or time.time() - Path(store.path(folder)).stat().st_mtime < _LEFT_S:
            continue
        for left in store.leftovers(folder, older_than_s=_LEFT_S):
            store.delete(f"{folder}/{left}")
        if store.list(folder) == [fmt.NAME]:
            store.delete(f"{folder}/{fmt.NAME}")


def check_root(root: Path, run: Location) -> None:
    """Make the folder `root` if its parent is there, and check that this process can use it for `run`. A disk that has
    become read-only can still be read: where it has checkpoints of `run`, a warning says so, once.

    Raises:
        ConfigurationError: code ``config.local``: it cannot be used, or lies in the run, or the run in it.
    """
    if run.folder is not None:
        mine, its = Path(os.path.realpath(root)), Path(os.path.realpath(run.folder))
        if mine == its or mine in its.parents or its in mine.parents:
            raise _unusable(root, f"it and the run '{run}' lie in each other", "Pass a folder outside of the run.")
    try:
        with suppress(FileExistsError):
            root.mkdir()
        if not root.is_dir():
            raise _unusable(root, "it is not a folder")
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            if not (os.access(root, os.R_OK | os.X_OK) and any(found_parts(NotedDisk(str(root), run.url)))):
                raise _unusable(root, f"user {os.geteuid()} may not write to it")
            if root not in _told:
                _told.add(root)
                _log.warning(
                    "user %d may not write to '%s': its checkpoints are read, and new ones go to the run at once, and "
                    "not to this disk. If it has become read-only, the kernel log says why (dmesg)",
                    os.geteuid(),
                    root,
                )
    except OSError as error:
        raise _unusable(root, error.strerror or str(error)) from error


def use_disk(folder: NodeFolder, root: Path, run: Location) -> None:
    """Note in the memory of the node that parts of checkpoints of `run` may lie in the folder `root` on a disk, so that
    its keeper looks there. Where that is noted already, nothing else is done, because each save calls this. Raises as
    `check_root`."""
    disk = NotedDisk(str(root), run.url)
    if not is_noted(folder, disk):
        check_root(root, run)
        note_disk(folder, disk)


def parts_on_disks(folder: NodeFolder) -> dict[str, DiskPart]:
    """By id of the checkpoint, the parts on all disks that the memory of a run on this node notes. Logs and skips disks
    that cannot be used (any more): an earlier job may have noted them."""
    parts: dict[str, DiskPart] = {}
    for disk in noted_disks(folder):
        try:
            parts |= {part.checkpoint_id: part for part in found_parts(disk)}
        except HoldfastError as error:
            _log.warning("%s", error)
    return parts


def own_folder(folder: Path) -> None:
    """Make the folder of a run on a disk, for this user alone, if it is missing; durable on return.

    Raises:
        ConfigurationError: code ``config.local``: it belongs to another user, or others may use it.
    """
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error
    _check_own(folder)


def _check_own(folder: Path) -> None:
    try:
        status = folder.lstat()
    except OSError as error:
        raise _unusable(folder, error.strerror or str(error)) from error
    if not stat.S_ISDIR(status.st_mode):
        raise _unusable(folder, "it is not a folder")
    if (why := why_not_private(status)) is not None:
        raise _unusable(folder, why)


def _is_own(folder: Path) -> bool:
    try:
        _check_own(folder)
    except ConfigurationError:
        return False
    return True


def _names(root: Path) -> list[str]:
    try:
        return sorted(os.listdir(root))  # noqa: PTH208 - names alone
    except OSError as error:
        raise _unusable(root, error.strerror or str(error)) from error


def _unusable(
    path: Path, why: str, action: str = "Pass as local= a folder on a disk of the node in which this user may write."
) -> ConfigurationError:
    return ConfigurationError(
        f"'{path}' cannot take the files of checkpoints before the run does: {why}.",
        code="config.local",
        action=action,
        path=str(path),
        tier=NODE_DISK,
    )
