"""From data files to a commit: the checks before sealing, and the one way to seal and commit a checkpoint.

Seal and commit are functions of the manifest and of the data files. So any process that finds all files of a manifest
present and sound may finish the checkpoint: the coordinator of the save, a surviving rank, ``holdfast doctor`` days
later. They all call `seal_and_commit` in the end, and all write the same bytes, also at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from msgspec import UNSET

from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.errors import CorruptError, FencedError, NotFoundError, StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import TABLE_OFFSET, FileLayout, Files
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import Commit, Diverged, FileSeal, Place, Seal, SealDigest
from holdfast.format.reference_records import ReferenceName
from holdfast.format.tombstones import Abandoned
from holdfast.io.digest import table_nbytes
from holdfast.io.reread import stored_digests
from holdfast.run.history import Run
from holdfast.run.paths import some
from holdfast.signing import SIGNED
from holdfast.store.base import Store


@dataclass(frozen=True)
class StoredManifest:
    """The manifest of a checkpoint that may be unsealed: the name of its folder, its bytes, and their decoded form."""

    folder: str
    data: bytes
    manifest: DecodedManifest

    @property
    def is_signed(self) -> bool:
        """Whether the checkpoint is signed."""
        return SIGNED in self.manifest.body.reader_features

    @property
    def record_features(self) -> tuple[str, ...]:
        """The reader features that the seal and the commit of the checkpoint have in common."""
        return (SIGNED,) if self.is_signed else ()

    def key(self, name: str) -> str:
        """The key of file `name` of the checkpoint."""
        return records.checkpoint_key(self.folder, name)


def read_manifest(run: Run, folder: str) -> StoredManifest:
    """Read the manifest in ``checkpoints/<folder>`` of `run`.

    Raises:
        NotFoundError: there is none; code ``not_found.file``.
        CorruptError: it is damaged, or does not belong into this folder (``corrupt.folder``) or run (``corrupt.run``).
    """
    key = records.checkpoint_key(folder, fmt.NAME)
    path = run.storage.path(key)
    try:
        data = run.storage.read(key)
    except NotFoundError as error:
        raise _missing(run.storage.path(records.checkpoint_key(folder, "x"))[:-2], [fmt.NAME]) from error
    manifest = fmt.decode(data, path=path)
    body = manifest.body
    if body.run_id != run.run_id:
        raise CorruptError(
            f"'{path}' belongs to another run ({body.run_id}).",
            code="corrupt.run",
            action="Move the folder back to that run, or open it by its own path.",
            path=path,
            step=body.step,
        )
    if records.parse_folder(folder) != (body.step, body.checkpoint_id):
        raise CorruptError(
            f"'{path}' is the manifest of checkpoint {body.checkpoint_id} at step {body.step}: its folder was renamed.",
            code="corrupt.folder",
            action="Give the folder its name back.",
            path=path,
            step=body.step,
        )
    return StoredManifest(folder, data, manifest)


def missing_files(storage: Store, stored: StoredManifest) -> list[str]:
    """Names of the data files that do not exist (yet). A mark stands for the still file that it is named after. One
    request."""
    found = set(storage.list(f"{records.CHECKPOINTS}/{stored.folder}"))
    names, marked = stored.manifest.file_names, stored.manifest.candidates
    return [
        name
        for index, name in enumerate(names)
        if name not in found and not (index in marked and fmt.mark_name(index) in found)
    ]


def check_files(
    run: Run, stored: StoredManifest, *, deep: bool, known: Mapping[int, FileSeal] = MappingProxyType({})
) -> tuple[FileSeal, ...]:
    """Check that all data files exist and are sound, and return their seals.

    Compares sizes and headers, byte for byte, except for the `known` files; with `deep` also all data with the
    digests. Blocking; reads each header, and with `deep` everything, in bounded memory.

    Raises:
        NotFoundError: files are missing; names them; code ``not_found.file``.
        CorruptError: a file is not the one that the manifest describes.
    """
    absent = missing_files(run.storage, stored)
    if absent:
        raise _missing(run.storage.path(stored.key(fmt.NAME)).rpartition("/")[0], absent)
    files = Files(stored.manifest)
    seals = tuple(
        known.get(index) or check_file(run.storage, stored, files.layout(index))
        for index in range(stored.manifest.body.num_files)
    )
    if deep:
        prefix = records.checkpoint_key(stored.folder, "")
        checkpoint = Checkpoint(Sealed(run.storage, prefix, _seal(stored, seals), run.run_id))
        faults = [fault for fault in verify_checkpoint(checkpoint, deep=True) if fault.code != "extra.file"]
        if faults:
            action = "Restore the file from another copy of the run; if there is none, remove the checkpoint."
            raise CorruptError(faults[0].message, code=faults[0].code, action=action, path=faults[0].path)
    return seals


def check_present(checkpoint: Checkpoint) -> None:
    """Check that all files of a sealed checkpoint exist and have the sealed sizes. One request per file.

    Raises:
        CorruptError: some are missing, or have another size; code ``corrupt.incomplete``.
    """
    bad = checkpoint.sealed.lacking()
    if bad:
        raise CorruptError(
            f"the checkpoint in '{checkpoint.folder}' is incomplete. Missing, or of the wrong size: {some(bad)}.",
            code="corrupt.incomplete",
            action="Restore the files from another copy of the run, or load an older checkpoint. To copy a run that is "
            "being saved into, use holdfast cp.",
            path=checkpoint.path(bad[0]),
            step=checkpoint.seal.step,
        )


def complete(run: Run, folder: str, *, deep: bool = True) -> Commit:
    """Commit the checkpoint in ``checkpoints/<folder>``, after sealing it where it is unsealed; durable on return.

    Blocking; reads all data files, or without `deep` only their headers (enough for a rank that took part in the save:
    files appear whole). The commit lands at its own place: it is the head only where no newer one exists. Repeated and
    concurrent calls give the same commit.

    Raises:
        NotFoundError: files are missing; names them; code ``not_found.file``.
        CorruptError: a file is damaged, or is not of this checkpoint or run.
        FencedError: the checkpoint was given up or removed, or its place has another one.
    """
    return finish(run, read_manifest(run, folder), deep=deep)


def finish(
    run: Run, stored: StoredManifest, *, deep: bool, known: Mapping[int, FileSeal] = MappingProxyType({})
) -> Commit:
    """As `complete`, for a caller that has the manifest, and knows the seals of files it wrote (`known`, by number)."""
    if run.is_removed(stored.manifest.place):
        raise _given_up(run.storage.path(stored.key(fmt.NAME)), "removed", stored)
    return seal_and_commit(run, stored, check_files(run, stored, deep=deep, known=known))


def seal_and_commit(run: Run, stored: StoredManifest, files: Sequence[FileSeal]) -> Commit:
    """Seal and commit a checkpoint whose data files are durable and match `files`; durable on return."""
    seal, body = encode_seal(stored, files), stored.manifest.body
    key = stored.key(records.SEAL_NAME)
    # A process that finishes the checkpoint and one that gives it up both create the seal's name: only one succeeds.
    if not run.storage.create(key, seal) and (found := run.storage.read(key)) != seal:
        if not records.is_same(found, seal, Seal, path=run.storage.path(key)):
            raise _other_seal(run.storage.path(key), stored, found)
        seal = found  # another process has signed the same seal with another key
    # Seal before the check: where the folder was removed meanwhile, creating the seal has made the folder anew.
    _check_visible(run, stored)
    commit = Commit(
        place=stored.manifest.place,
        step=body.step,
        checkpoint=stored.folder,
        checkpoint_id=body.checkpoint_id,
        seal=SealDigest(len(seal), stored.manifest.digests.hex(seal)),
        nbytes=sum(file.nbytes for file in files),
        referenced_nbytes=sum(file.nbytes for file in files if file.is_referenced) or UNSET,
        created=body.created,
        metrics={name: records.to_metric(value) for name, value in body.metrics.items()},
        diverged=Diverged.of(body.diverged),
        reader_features=stored.record_features,
    )
    run.publish(commit)
    _release_candidates(run, stored, files)
    return commit


def _release_candidates(run: Run, stored: StoredManifest, files: Iterable[FileSeal]) -> None:
    """Let the folders go that hold candidates of a committed checkpoint, and none of its `files`."""
    candidates = {each.checkpoint for each in stored.manifest.candidates.values()}
    for holder in candidates - {file.checkpoint for file in files}:
        run.storage.delete(ReferenceName(stored.manifest.place, stored.folder, holder).key)


def encode_seal(stored: StoredManifest, files: Iterable[FileSeal]) -> bytes:
    """The bytes of the seal of a checkpoint whose data files match `files`."""
    return records.encode(_seal(stored, files))


def _check_visible(run: Run, stored: StoredManifest) -> None:
    """Raise `StorageError` unless this process sees all files, which their writers have reported as written."""
    storage = run.storage
    # On a network file system a listing may lag behind, but a request for the name itself does not.
    manifest = stored.manifest
    absent = [name for name in missing_files(storage, stored) if not _is_there(storage, stored, name)]
    if storage.nbytes(stored.key(fmt.NAME)) is None:
        absent.insert(0, fmt.NAME)
    if absent:
        path = storage.path(stored.key(absent[0]))
        if run.is_removed(stored.manifest.place):  # another process finished it, and then it was removed
            raise _given_up(path, "removed", stored)
        rank = 0 if absent[0] == fmt.NAME else int(manifest.writers[manifest.file_names.index(absent[0])])
        raise StorageError(
            f"the rank that commits does not see '{path}', which rank {rank} has just written.",
            code="storage.not_shared",
            action="Find out whether the file was removed, or whether a node lost its mount of this path.",
            path=path,
            rank=rank,
        )


def _is_there(storage: Store, stored: StoredManifest, name: str) -> bool:
    """Whether a data file, or its mark, exists. Asks for their names."""
    names = (name, fmt.mark_name(stored.manifest.file_names.index(name)))
    return any(storage.nbytes(stored.key(each)) is not None for each in names)


def committed_before_fence(run: Run, stored: StoredManifest) -> Commit | None:
    """The commit of the checkpoint, if another process has made it before a newer epoch was opened; None if no newer
    epoch was. Raises `FencedError` where the checkpoint was not committed before. One request, mostly."""
    place = stored.manifest.place
    try:
        run.check_fence(place.epoch)
    except FencedError:
        if run.is_committed(place) and (commit := run.commit(place)).checkpoint == stored.folder:
            return commit
        raise
    return None


def check_can_commit(run: Run, stored: StoredManifest) -> None:
    """Raise `FencedError` where a checkpoint is not committed and never can be: a newer epoch was opened, or the
    checkpoint was removed. Two requests."""
    committed_before_fence(run, stored)
    if run.is_removed(stored.manifest.place):
        raise _given_up(run.storage.path(stored.key(fmt.NAME)), "removed", stored)


def can_commit(run: Run, place: Place, folder: str) -> bool:
    """Whether an uncommitted checkpoint may still be committed: nobody has removed it, or given it up as unfinished.
    Two requests."""
    if run.is_removed(place):
        return False
    try:
        return not is_abandoned(run.storage.read(records.checkpoint_key(folder, records.SEAL_NAME)))
    except NotFoundError:
        return True


def is_abandoned(seal: bytes) -> bool:
    """Whether the bytes in the place of a seal are the record of a checkpoint that was given up."""
    try:
        records.decode(seal, Abandoned, path="")
    except CorruptError:
        return False
    return True


def _seal(stored: StoredManifest, files: Iterable[FileSeal]) -> Seal:
    body, listed = stored.manifest.body, tuple(files)
    references = (records.REFERENCES,) if any(file.is_referenced for file in listed) else ()
    return Seal(
        reader_features=(*stored.record_features, *references),
        checkpoint_id=body.checkpoint_id,
        place=stored.manifest.place,
        step=body.step,
        manifest=FileSeal(fmt.NAME, len(stored.data), stored.manifest.digests.hex(stored.data)),
        files=listed,
    )


def sealed_file(manifest: DecodedManifest, layout: FileLayout, table: bytes) -> FileSeal:
    """The entry of the seal for the data file of this `layout` whose block digests are `table`: it depends on nothing
    else, so all finishers of a checkpoint agree which files earlier checkpoints have."""
    name, kind = manifest.file_name(layout.index), manifest.digests
    digest = kind.hex(table)
    if not manifest.is_still(layout.index):
        return FileSeal(name, layout.nbytes, digest)
    content = container.content_digest(layout, table, kind)
    candidate = manifest.candidates.get(layout.index)
    holder = candidate.checkpoint if candidate is not None and candidate.content == content else UNSET
    return FileSeal(name, layout.nbytes, digest, content, holder)


def check_file(storage: Store, stored: StoredManifest, layout: FileLayout) -> FileSeal:
    """The seal of a data file that exists, or of the one that its mark stands for. Compares its size and its header,
    but not its data.

    Raises `CorruptError` for a file that is not the one that the manifest describes.
    """
    key, checkpoint_id = stored.key(stored.manifest.file_name(layout.index)), stored.manifest.body.checkpoint_id
    candidate = stored.manifest.candidates.get(layout.index)
    if candidate is not None and storage.nbytes(key) is None:
        key = records.checkpoint_key(candidate.checkpoint, stored.manifest.file_name(layout.index))
        checkpoint_id = records.id_of(candidate.checkpoint)
        if storage.nbytes(key) is None:
            raise _unsound(storage.path(key), "it is not there, and this checkpoint refers to it", stored)
    path = storage.path(key)
    reader = storage.reader(key)
    try:
        if reader.nbytes != layout.nbytes:
            raise _unsound(path, f"it has {reader.nbytes} bytes instead of {layout.nbytes}", stored)
        header = np.empty(layout.data_start, np.uint8)
        reader.read_at(0, header)
    finally:
        reader.close()
    found = header.tobytes()
    # The header must be the one that the manifest gives for the table: that binds the table to this file.
    kind = stored.manifest.digests
    size = table_nbytes(layout.data_nbytes, kind)
    table = container.parse_table(found[TABLE_OFFSET : TABLE_OFFSET + 2 * size])
    if len(table) != size or found != container.header_in(checkpoint_id, layout, table, kind):
        raise _unsound(path, "its header is not the one that the manifest requires", stored)
    sealed = sealed_file(stored.manifest, layout, table)
    if checkpoint_id != stored.manifest.body.checkpoint_id and not sealed.is_referenced:
        raise _unsound(path, "its digests are not those that this checkpoint refers to", stored)
    return sealed


def check_data(storage: Store, stored: StoredManifest, layout: FileLayout) -> FileSeal:
    """As `check_file`, but compares all data, too, with the digests in the file. Reads the file once."""
    seal = check_file(storage, stored, layout)
    key, nbytes, kind = stored.key(seal.name), layout.data_nbytes, stored.manifest.digests
    table, _ = stored_digests(storage, key, data_start=layout.data_start, data_nbytes=nbytes, kind=kind)
    if kind.hex(table) != seal.digest:
        raise _unsound(storage.path(key), "its data does not match its digests", stored)
    return seal


def _missing(folder: str, names: list[str]) -> NotFoundError:
    return NotFoundError(
        f"the checkpoint in '{folder}' cannot be finished: {some(names)} {'is' if len(names) == 1 else 'are'} missing.",
        code="not_found.file",
        action="Wait if its writers are still at work. Otherwise restore the files, or remove the folder.",
        path=folder,
    )


def _unsound(path: str, what: str, stored: StoredManifest) -> CorruptError:
    return CorruptError(
        f"{path} is damaged: {what}.",
        code="corrupt.file",
        action="Restore the file from another copy of the run; if there is none, remove the checkpoint.",
        path=path,
        step=stored.manifest.body.step,
    )


def _other_seal(path: str, stored: StoredManifest, found: bytes) -> FencedError | CorruptError:
    if is_abandoned(found):
        return _given_up(path, "given up as unfinished", stored)
    return CorruptError(
        f"'{path}' does not seal the files beside it.",
        code="corrupt.seal",
        action="Restore the seal or the data files from another copy of the run.",
        path=path,
        step=stored.manifest.body.step,
    )


def _given_up(path: str, how: str, stored: StoredManifest) -> FencedError:
    place, step = stored.manifest.place, stored.manifest.body.step
    return FencedError(
        f"checkpoint {place} (step {step}) was {how}, and cannot be committed any more ('{path}').",
        code="fenced.given_up",
        action="Continue from the head of the run, and save again.",
        path=path,
        step=stored.manifest.body.step,
    )
