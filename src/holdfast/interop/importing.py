"""The import of a foreign checkpoint: all of it is read once, and written as the first checkpoint of a run.

Nothing imports torch here, so a machine without an accelerator can do it, in bounded memory.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import xxhash

from holdfast.checkpoint.delivery import ArrayTargets
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import Entry, FileLayout, Files
from holdfast.format.dtypes import CARRIERS
from holdfast.format.records import Commit, FileSeal, Place
from holdfast.format.values import Node
from holdfast.geometry import flat_boxes
from holdfast.interop.given_places import ForeignTensor, StateTables
from holdfast.io.buffers import NUM_THREADS, BufferPool
from holdfast.io.meter import Meter
from holdfast.io.sources import BytesSource, Source
from holdfast.io.writer import write_file
from holdfast.plan.load import ReadRequest
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate, RankValues
from holdfast.run.complete import StoredManifest, seal_and_commit
from holdfast.run.history import Run
from holdfast.store.base import Bytes, Store

#: Bytes of the new file that are put together at once, by each of the writer's threads. All their parts are read
#: together: in larger windows, each foreign file is opened and planned less often, and more parts lie side by side.
WINDOW_NBYTES: Final = 16 * container.BLOCK_NBYTES


def import_state(state: StoredState, storage: Store, step: int, *, meter: Meter | None = None) -> Commit:
    """Write `state` into the run at the root of `storage`, as its first checkpoint, of `step`. Blocks until it is
    committed and durable.

    Reads and writes every byte once, with 48 MiB of buffers, and those of a load. If it fails, no checkpoint becomes
    visible, and another import into the same run may follow.

    Raises:
        ConfigurationError: code ``config.unloaded_history``: the run has checkpoints; or the folder is no run.
        CorruptError, IncompatibleError: a part of `state` is damaged, or is no value; nothing is written.
        StorageError: a store failed.
    """
    nodes = dict(state.nodes)  # reads all values, before anything is written
    state.find_places(range(len(state.manifest.body.names)))
    run = Run.create(storage)
    if run.places():
        raise ConfigurationError(
            f"run '{storage.location}' has checkpoints, so nothing is imported into it.",
            code="config.unloaded_history",
            action="Name a new run.",
            path=storage.location.url,
        )
    newest = run.newest_epoch() or 0
    epoch = run.open_epoch(after=newest, opened_from=None, why="start", world_size=1)
    identity = CheckpointIdentity(
        checkpoint_id=secrets.token_hex(8),
        run_id=run.run_id,
        place=Place(epoch.epoch, 1),
        step=step,
        created=records.now(),
        metrics={},
    )
    packed = pack_values(nodes)
    data = _template(state, nodes, packed).encode(identity)
    folder = records.folder_name(step, identity.checkpoint_id)
    stored = StoredManifest(folder, data, fmt.decode(data, path=folder))
    storage.create(stored.key(fmt.NAME), data)
    seal = _write(state, storage, stored, packed, meter)
    run.check_fence(epoch.epoch)
    return seal_and_commit(run, stored, [seal])


def _template(state: StoredState, nodes: Mapping[str, Node], packed: bytes) -> ManifestTemplate:
    """The manifest of a checkpoint that holds the state in one file."""
    tables, manifest = StateTables(), state.manifest
    for number, name in enumerate(manifest.body.names):
        sizes = np.asarray([manifest.shape(number)], np.int64)
        whole = ForeignTensor(
            name, manifest.dtype(number), manifest.shape(number), np.zeros_like(sizes), sizes, np.zeros(1, np.int64)
        )
        tables.add(whole)
    block = RankValues(0, len(packed), tuple(sorted(nodes)))
    values = (fmt.ValueBlock(0, block.capacity, block.paths),)
    return ManifestTemplate(
        *tables.finish(num_files=1, aliases=manifest.body.aliases, values=values, features=(fmt.SMALL_LAST,))
    )


def _write(state: StoredState, storage: Store, stored: StoredManifest, packed: bytes, meter: Meter | None) -> FileSeal:
    layout = Files(stored.manifest).layout(0)
    assert layout.values is not None
    name = fmt.file_name(0)
    sources: list[Source] = [_StateSource(state, layout)]
    sources.append(BytesSource(packed.ljust(layout.values.capacity, b"\0")))
    with BufferPool(NUM_THREADS * WINDOW_NBYTES, buffer_nbytes=WINDOW_NBYTES) as pool:
        table = write_file(
            storage.writer(stored.key(name), nbytes=layout.nbytes),
            sources,
            data_start=layout.data_start,
            header=lambda digests: container.header(stored.manifest, layout, digests),
            pool=pool,
            meter=meter,
        )
    return FileSeal(name, layout.nbytes, xxhash.xxh3_128_hexdigest(table))


class _StateSource:
    """The tensors of a state as the bytes of a data file. Reads what it is asked for, and keeps nothing."""

    def __init__(self, state: StoredState, layout: FileLayout) -> None:
        self._state = state
        self._entries: Sequence[Entry] = [entry for entry in layout.entries if entry.nbytes]
        #: The end of each entry; they follow each other without gaps.
        self._ends = list(accumulate(entry.nbytes for entry in self._entries))

    @property
    def nbytes(self) -> int:
        """As `Source.nbytes`."""
        return self._ends[-1] if self._ends else 0

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`; reads must be of whole elements."""
        wants: list[ReadRequest] = []
        arrays = []
        at, behind = start, start + len(out)
        while at < behind:
            entry = self._entries[bisect_right(self._ends, at)]
            stop = min(behind, entry.offset + entry.nbytes)
            itemsize = int(self._state.files.itemsizes[entry.tensor])
            held = out[at - start : stop - start].view(CARRIERS[itemsize])
            first = (at - entry.offset) // itemsize
            shape = self._state.manifest.shape(entry.tensor)
            for offset, box in flat_boxes(shape, first, first + len(held)):
                wants.append(ReadRequest(entry.tensor, box))
                arrays.append(held[offset : offset + box.numel].reshape(box.size))
            at = stop
        self._state.read(wants, ArrayTargets(arrays))
