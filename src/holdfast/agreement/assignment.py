"""One rank's share of the writes, derived from the manifest as any reader would derive it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import msgspec
import numpy as np

from holdfast.format.container import FileLayout, Files
from holdfast.format.manifest import Candidate, DecodedManifest, DecodedTable
from holdfast.io.sources import Source
from holdfast.state.flatten import FlatState
from holdfast.state.local_memory import LocalPieces, MemorySource, packed

T = TypeVar("T", bound=DecodedTable)


@dataclass(frozen=True)
class WriteAssignment(Generic[T]):
    """A rank's share in a plan: the layouts of its data files, of which it has none, a moving one, a still one, or
    both in that order. The share is the same in every save by the plan, which `turn` counts.
    """

    plan_id: str
    manifest: T
    layouts: tuple[FileLayout, ...]
    turn: int

    @property
    def nbytes(self) -> int:
        """The size of its data files together."""
        return sum(layout.nbytes for layout in self.layouts)

    @staticmethod
    def in_manifest(plan_id: str, manifest: T, rank: int) -> WriteAssignment[T]:
        """The share of `rank` in the first checkpoint of a plan, or in its table."""
        first, stop = np.searchsorted(manifest.writers, [rank, rank + 1]).tolist()
        files = Files(manifest)
        return WriteAssignment(plan_id, manifest, tuple(map(files.layout, range(first, stop))), 0)

    def again(self: StoredShare, references: tuple[Candidate, ...], **identity: object) -> StoredShare:
        """The same share in the next checkpoint by the plan. Its manifest differs from the last one in `identity`, and
        in the candidates of its still files (`references`)."""
        body = msgspec.structs.replace(self.manifest.body, **identity).with_references(references)
        return WriteAssignment(self.plan_id, self.manifest.with_body(body), self.layouts, self.turn + 1)


#: The share of a rank in a checkpoint that is stored.
StoredShare: TypeAlias = WriteAssignment[DecodedManifest]


def sources_of(manifest: DecodedTable, layout: FileLayout, flat: FlatState, rank: int) -> list[Source]:
    """The memory of `rank` from which a data file's tensors are written, in the order of its entries; runs of small
    tensors are packed into one source."""
    return list(packed(memory_of(manifest, layout, flat, rank)))


def memory_of(manifest: DecodedTable, layout: FileLayout, flat: FlatState, rank: int) -> Iterator[MemorySource]:
    """The memory of `rank` that holds each entry of a data file, in the order of its entries."""
    names, pieces = manifest.body.names, LocalPieces(rank)
    for entry in layout.entries:
        held = flat.tensors[names[entry.tensor]]
        yield pieces.source(held.layout, held.memory, entry.part)
