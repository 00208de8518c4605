"""What one rank writes, derived from the manifest as any reader would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from holdfast.agreement.messages import Planned, Written
from holdfast.checkpoint.reading import pack_values
from holdfast.errors import StorageError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import FileLayout, Files
from holdfast.format.manifest import DecodedManifest
from holdfast.format.values import Node
from holdfast.io.buffers import pipeline_pool
from holdfast.io.meter import Meter
from holdfast.io.sources import BytesSource, Source
from holdfast.io.writer import write_file
from holdfast.state.flatten import FlatState
from holdfast.state.memory import LocalPieces, MemorySource, packed
from holdfast.store.base import Store
from holdfast.store.timed import TimedStore


@dataclass(frozen=True)
class Share:
    """A rank's part in a plan: its data file, if it has one. Holds for every save that uses the plan.

    `turn` counts the saves that used it.
    """

    plan_id: str
    manifest: DecodedManifest
    layout: FileLayout | None
    turn: int

    @staticmethod
    def of(storage: Store, planned: Planned, rank: int, remembered: Share | None) -> Share:
        """The share of `rank`: as remembered where the plan is the same, else from the manifest in `storage`.

        Raises:
            StorageError: this rank does not see what rank 0 wrote.
        """
        if remembered is not None and remembered.plan_id == planned.plan_id:
            body = msgspec.structs.replace(remembered.manifest.body, checkpoint_id=planned.checkpoint_id)
            return Share(planned.plan_id, remembered.manifest.with_body(body), remembered.layout, remembered.turn + 1)
        return Share.in_manifest(planned.plan_id, _read_manifest(storage, planned, rank), rank)

    @staticmethod
    def in_manifest(plan_id: str, manifest: DecodedManifest, rank: int) -> Share:
        """The share of `rank` in the first checkpoint of a plan."""
        writers = manifest.sequence(manifest.body.writers)
        index = int(np.searchsorted(writers, rank))
        has_file = index < len(writers) and writers[index] == rank
        return Share(plan_id, manifest, Files(manifest).layout(index) if has_file else None, 0)

    def write(
        self,
        storage: TimedStore,
        folder: str,
        flat: FlatState,
        values: Mapping[str, Node],
        rank: int,
        *,
        meter: Meter,
    ) -> Written:
        """Write this rank's data file; durable when it returns. `values` are what its file holds."""
        layout = self.layout
        if layout is None:
            return Written(-1, 0, "")
        sources = sources_of(self.manifest, layout, flat, rank)
        if layout.values is not None:
            block = pack_values(dict(values), capacity=layout.values.capacity)
            sources.append(BytesSource(block))
        nbytes = layout.data_start + layout.data_nbytes
        key = records.checkpoint_key(folder, fmt.file_name(layout.index))

        def write() -> bytes:
            with pipeline_pool() as pool:
                return write_file(
                    storage.direct_writer(key, nbytes=nbytes),
                    sources,
                    data_start=layout.data_start,
                    header=lambda table: container.header(self.manifest, layout, table),
                    pool=pool,
                    meter=meter,
                )

        table = storage.run("write", storage.path(key), write)
        return Written(layout.index, nbytes, xxhash.xxh3_128_hexdigest(table))


def sources_of(manifest: DecodedManifest, layout: FileLayout, flat: FlatState, rank: int) -> list[Source]:
    """The tensors of a data file, in the order of its entries, from what `rank` holds; small ones together."""
    return list(packed(memory_of(manifest, layout, flat, rank)))


def memory_of(manifest: DecodedManifest, layout: FileLayout, flat: FlatState, rank: int) -> Iterator[MemorySource]:
    """The memory of each entry of a data file, from what `rank` holds."""
    names, pieces = manifest.body.names, LocalPieces(rank)
    for entry in layout.entries:
        held = flat.tensors[names[entry.tensor]]
        yield pieces.source(held.layout, held.memory, entry.part)


def _read_manifest(storage: Store, planned: Planned, rank: int) -> DecodedManifest:
    key = records.checkpoint_key(planned.folder, fmt.NAME)
    path = storage.path(key)
    if storage.nbytes(key) is None:
        raise StorageError(
            f"rank {rank} does not see '{path}', which rank 0 has just written.",
            code="storage.not_shared",
            action="Give all ranks one path on a file system that all nodes share.",
            path=path,
            rank=rank,
        )
    data = storage.read(key)
    if xxhash.xxh3_128_hexdigest(data) != planned.digest:
        raise StorageError(
            f"rank {rank} reads other bytes from '{path}' than rank 0 wrote.",
            code="storage.inconsistent",
            action="Check that the file system shows all nodes the same files.",
            path=path,
            rank=rank,
        )
    return fmt.decode(data, path=path)
