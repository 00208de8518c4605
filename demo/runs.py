"""The place for the runs of the story: the demo's folder, or a bucket on an S3 server that the demo starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import holdfast
from holdfast.format import manifest, records
from holdfast.run.paths import parse
from holdfast.store.base import Store
from holdfast.store.urls import open_store
from tests.support.servers.s3 import MotoServer


class Runs(NamedTuple):
    """The runs below `base`, a folder or the URL of a bucket."""

    base: str

    def path(self, name: str) -> str:
        """The path of run `name`."""
        return f"{self.base}/{name}"

    def copy(self, source: str, target: str) -> None:
        """Copy a run at rest. Any tool can copy folders."""
        if "://" in self.base:
            holdfast.copy_run(source, target)
        else:
            shutil.copytree(source, target)


@contextmanager
def runs_in(out: Path, *, s3: bool) -> Iterator[Runs]:
    """The place for runs of a story whose files lie in `out`. With `s3`, it is a bucket of a server that ends with the
    ``with`` block; processes that are started in the block find it by their environment."""
    if not s3:
        yield Runs(str(out))
        return
    server = MotoServer(out)
    try:
        bucket = server.new_bucket()
        os.environ.update(bucket.environment)
        yield Runs(bucket.url)
    finally:
        server.kill()


class FileToCome(NamedTuple):
    """A data file that the newest checkpoint of a run is to have: its `step` and `folder`, and the file's name."""

    step: int
    folder: str
    name: str


def store_of(run: str) -> Store:
    """The store of a run."""
    return open_store(parse(run).location)


def file_to_come(storage: Store, *, rank: int) -> FileToCome | None:
    """The data file of `rank` in the newest checkpoint, if all that readers can see of it is that it is to come."""
    newest = max(storage.list(records.CHECKPOINTS), default="")
    found = records.parse_folder(newest)
    name = manifest.file_name(rank)
    folder = f"{records.CHECKPOINTS}/{newest}"
    if found is None or not _is_to_come(storage, folder, name):
        return None
    return FileToCome(found[0], folder, name)


def _is_to_come(storage: Store, folder: str, name: str) -> bool:
    names = storage.list(folder)
    return manifest.NAME in names and name not in names


def data_nbytes(run: str, step: int) -> int:
    """The bytes of all data files of the checkpoints of `step`."""
    storage = store_of(run)
    folders = [f"{records.CHECKPOINTS}/{each}" for each in storage.list(records.CHECKPOINTS)]
    folders = [each for each in folders if each.startswith(f"{records.CHECKPOINTS}/step-{step:010d}-")]
    files = [f"{folder}/{name}" for folder in folders for name in storage.list(folder) if name.endswith(".safetensors")]
    return sum(storage.nbytes(file) or 0 for file in files)
