"""One rank's writes in a save: its share in the manifest that rank 0 published."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import xxhash

from holdfast.agreement.assignment import StoredShare, WriteAssignment, sources_of
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.errors import StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import FileLayout
from holdfast.format.manifest import DecodedManifest
from holdfast.format.values import Node
from holdfast.io.buffers import writing_pool
from holdfast.io.create_only import CheckedWriter
from holdfast.io.meter import Meter
from holdfast.io.ordered import changed
from holdfast.io.sources import BytesSource
from holdfast.io.writer import write_file
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
        return remembered.again(checkpoint_id=planned.checkpoint_id)
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
) -> Written:
    """Write this rank's data file, which is durable on return. `values` are the values that the file holds."""
    layout = share.layout
    if layout is None:
        return Written(-1, 0, "")
    sources = sources_of(share.manifest, layout, flat, rank)
    if layout.values is not None:
        block = pack_values(dict(values), capacity=layout.values.capacity)
        sources.append(BytesSource(block))
    nbytes = layout.data_start + layout.data_nbytes
    key = records.checkpoint_key(folder, fmt.file_name(layout.index))

    def write() -> bytes:
        writer = storage.limit.direct_writer(storage, key, nbytes=nbytes)
        with writing_pool(writer) as pool:
            return write_file(
                CheckedWriter(writer, _check_of(_versions(share, layout, flat))) if writer.in_order else writer,
                sources,
                data_start=layout.data_start,
                header=lambda table: container.header(share.manifest, layout, table),
                pool=pool,
                meter=meter,
                kind=share.manifest.digests,
            )

    table = storage.limit.run("write", storage.path(key), write)
    return Written(layout.index, nbytes, share.manifest.digests.hex(table))


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
