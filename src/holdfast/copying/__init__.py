"""`copy_run`: a whole run, or one checkpoint of it, copied between any two stores, while the run may be written."""

from __future__ import annotations

import os
import time
from functools import partial

from holdfast.copying.run_copy import RunCopy
from holdfast.phases import LOG
from holdfast.progress import counted
from holdfast.reports import CopyReport
from holdfast.run.by_path import RunPath, open_run, parse_run, selected_checkpoint
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store

__all__ = ["copy_run"]

#: A checkpoint that is copied sooner shows no bar.
_PATIENCE_S = 0.5


def copy_run(
    src: str | os.PathLike[str] | Location,
    dst: str | os.PathLike[str] | Location,
    *,
    read_back: bool = False,
    skip_damaged: bool = False,
) -> CopyReport:
    """Copy the run `src`, or one checkpoint of it (``RUN@step=700``, ``RUN@3.12``), into the run `dst`, in any store.

    Blocking. Call it in one process; of two calls at once into a bucket, one may have to be repeated. Needs no torch.
    `dst` is new, or an earlier copy of the same run: then it gets what it lacks, and nothing in it is deleted. After an
    interruption the same call continues. At every moment `dst` is a valid run, and its head is all there. It has the id
    of `src`: it is the same run in another place, and a job may go on from either. A checkpoint that was asked for by
    its selector is completed in `dst` where it lost files.

    A file that a checkpoint shares with earlier ones is written whole into its own folder, as by `compact`: each
    checkpoint of `dst` is self-contained, and `dst` takes as many bytes as if nothing had been shared.

    Every byte is read once, and compared with its digest before its file appears in `dst`; takes 16 MiB of buffers
    between folders, and some 200 MiB with object stores. With `read_back`, the files of the checkpoints that are copied
    are read again in `dst`, too; without it, files with the right size and header are kept.

    A job may save into `src` meanwhile, and delete checkpoints: what is copied is leased, as by every reader, and a
    checkpoint that vanished all the same is left out (``vanished``). What was committed after the call began is left to
    the next one. Not copied are unfinished saves, leases, requests, resumes and quarantines; pins of new checkpoints
    are.

    Raises:
        NotFoundError: there is no such run or checkpoint, or nothing is committed.
        ConfigurationError: `dst` holds something else (``config.not_a_run``), another run (``config.other_run``), or
            what `src` does not have, as after a job saved into it (``config.diverged``); or it is `src` itself, or
            another call copies into it now (``config.destination``). Nothing is changed then.
        CorruptError: a checkpoint of `src` is damaged; it does not appear in `dst`. With `skip_damaged`, it is left out
            (``damaged``), and the others are copied.
        StorageError: a store failed, or the disk of `dst` is full. Checkpoints that were copied stay.
    """
    return copy_by(src, dst, read_back=read_back, skip_damaged=skip_damaged)


def copy_by(src: RunPath, dst: RunPath, *, read_back: bool, skip_damaged: bool, shown: bool = True) -> CopyReport:
    """As `copy_run`. `shown` allows a bar."""
    began = time.monotonic()
    selection, target = parse(src), open_store(parse_run(dst).location)
    if selection.step is None and selection.place is None:
        source, only = open_run(src), None
    else:
        source, commit = selected_checkpoint(src)
        only = commit.place
    work = RunCopy(
        source,
        target,
        only=only,
        read_back=read_back,
        skip_damaged=skip_damaged,
        shown=partial(counted, shown=shown, after_s=_PATIENCE_S),
    )
    done = work.run()
    head = work.target_head()
    report = CopyReport(
        source=source.storage.location.url,
        path=target.location.url,
        head="" if head is None else str(head.place),
        step=None if head is None else head.step,
        copied=tuple(map(str, done.copied)),
        present=tuple(map(str, done.present)),
        vanished=tuple(map(str, done.vanished)),
        removed=tuple(map(str, done.removed)),
        damaged=tuple(map(str, done.damaged)),
        num_kept=done.num_kept,
        written_nbytes=done.written_nbytes,
        seconds=time.monotonic() - began,
    )
    LOG.info("copied %s, to %s", report.summary, report.path)
    return report
