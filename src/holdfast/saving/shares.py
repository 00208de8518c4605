"""One rank's writes in a save: its share in the manifest that rank 0 published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import xxhash

from holdfast.agreement.assignment import StoredShare, WriteAssignment, sources_of
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.errors import StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import FileLayout
from holdfast.format.manifest import DecodedManifest
from holdfast.format.records import FileSeal
from holdfast.format.values import Node
from holdfast.io.buffers import NUM_THREADS, pipeline_pool, writing_pool
from holdfast.io.create_only import CheckedWriter
from holdfast.io.meter import Meter
from holdfast.io.ordered import OrderedData, changed
from holdfast.io.sources import BytesSource, Source
from holdfast.io.writer import write_file
from holdfast.run.complete import sealed_file
from holdfast.run.still_files import StoredFile
from holdfast.saving.messages import Planned, Written
from holdfast.state.flatten import FlatState
from holdfast.state.marks import Versions
from holdfast.store.base import Store
from holdfast.store.timed import TimedStore


def share_in(storage: Store, planned: Planned, rank: int, remembered: StoredShare | None) -> StoredShare:
    """The share of `rank`: the `remembered` one if the plan is the same, else from the manifest in `storage`.

    Raises:
        StorageError: this rank does not see the manifest that rank 0 wrote.
    """
    if remembered is not None and remembered.plan_id == planned.plan_id:
        return remembered.again(planned.references, checkpoint_id=planned.checkpoint_id)
    return WriteAssignment.in_manifest(planned.plan_id, _read_manifest(storage, planned, rank), rank)


def write_share(
    share: StoredShare,
    storage: TimedStore,
    folder: str,
    flat: FlatState,
    values: Mapping[str, Node],
    rank: int,
    *,
    meter: Meter,
    meanwhile: Callable[[], None],
    every_s: float,
) -> Written:
    """Write this rank's data files, which are durable on return. `values` are the values that they hold. A still file
    that equals its candidate gets a mark instead. `meanwhile` is called ``every_s``; if it raises, the files are given
    up. After an error none of the files stays, so that another try can write them."""
    during = During(meanwhile, every_s)
    seals: list[FileSeal] = []
    try:
        for layout in share.layouts:
            sources = sources_of(share.manifest, layout, flat, rank)
            if layout.values is not None:
                block = pack_values(dict(values), capacity=layout.values.capacity)
                sources.append(BytesSource(block))
            target = StoredFile(storage, share.manifest, folder, layout)
            versions = _versions(share, layout, flat)
            seals.append(_marked(target, sources, during) or _written(target, sources, versions, meter, during))
    except Exception:
        with suppress(StorageError):
            for seal in seals:
                storage.delete(records.checkpoint_key(folder, seal.name))
        raise
    return Written(tuple(seals))


class During(NamedTuple):
    """A function for the wait for a file that is written: the caller calls it ``every_s``."""

    call: Callable[[], None]
    every_s: float


def _marked(target: StoredFile, sources: Sequence[Source], during: During) -> FileSeal | None:
    """The entry of the seal for a still file that equals its candidate, which gets a mark; None for any other file."""
    if target.candidate is None:
        return None

    def digests() -> bytes:
        with pipeline_pool() as pool:
            return OrderedData(sources, pool, NUM_THREADS, target.manifest.digests).digests()

    table = target.storage.limit.run("hash", target.path, digests, meanwhile=during.call, every_s=during.every_s)
    seal = sealed_file(target.manifest, target.layout, table)
    return seal if target.marked(seal) else None


def _written(
    target: StoredFile, sources: Sequence[Source], versions: Versions, meter: Meter, during: During
) -> FileSeal:
    storage, layout = target.storage, target.layout

    def write() -> bytes:
        writer = storage.limit.direct_writer(storage, target.key, nbytes=layout.nbytes)
        with writing_pool(writer) as pool:
            return write_file(
                CheckedWriter(writer, _check_of(versions)) if writer.in_order else writer,
                sources,
                data_start=layout.data_start,
                header=lambda table: container.header(target.manifest, layout, table),
                pool=pool,
                meter=meter,
                kind=target.manifest.digests,
            )

    table = storage.limit.run(
        "write",
        target.path,
        lambda: storage.limit.repeated(write),
        meanwhile=during.call,
        every_s=during.every_s,
    )
    return sealed_file(target.manifest, layout, table)


def _versions(share: StoredShare, layout: FileLayout, flat: FlatState) -> Versions:
    names = share.manifest.body.names
    return Versions([part for entry in layout.entries for part in flat.tensors[names[entry.tensor]].memory])


def _check_of(versions: Versions) -> Callable[[], None]:
    """A check for the end of a file whose data is hashed in the live tensors, and sent from there: digests do not show
    a tensor that was changed and changed back in between, but torch counts its changes."""

    def check() -> None:
        if versions.changed():
            raise changed()

    return check


def _read_manifest(storage: Store, planned: Planned, rank: int) -> DecodedManifest:
    key = records.checkpoint_key(planned.folder, fmt.NAME)
    path = storage.path(key)
    if storage.nbytes(key) is None:
        other = "" if path == planned.path else f" as '{planned.path}'"
        action = "Give all ranks one path on a file system that all nodes share"
        raise StorageError(
            f"rank {rank} does not see '{path}', which rank 0 has just written{other}.",
            code="storage.not_shared",
            action=f"{action}. With several runs, save into them in the same order." if other else f"{action}.",
            path=path,
            rank=rank,
        )
    data = storage.read(key)
    if xxhash.xxh3_128_hexdigest(data) != planned.digest:
        raise StorageError(
            f"the bytes that rank {rank} reads from '{path}' are not those that rank 0 wrote.",
            code="storage.inconsistent",
            action="Check that the file system shows all nodes the same files.",
            path=path,
            rank=rank,
        )
    return fmt.decode(data, path=path)
