"""Going on from the newest checkpoint: from the memory of the nodes where it is there, whole, else from storage.

A copy in memory counts only where it is on the lineage of the run's head: it is the head's, or a later one of the
newest epoch, which its keeper is about to commit. What a rollback left behind is never restored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from torch.distributed import ProcessGroup

from holdfast.control.channel import Channel, Deadline
from holdfast.control.torch_store import default_channel, group_ranks
from holdfast.decoding import decode_msgpack
from holdfast.errors import CorruptError, DeadlineError, FencedError, HoldfastError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.records import FileSeal, Place, Seal
from holdfast.format.values import Node
from holdfast.keeper.claims import Claim
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.generations import Generation, give_up_generation, read_generation
from holdfast.keeper.node_folder import NodeFolder, unusable_memory
from holdfast.keeper.persist import data_file
from holdfast.keeper.slots import WHOLE, Slot, State, slot_names
from holdfast.loading import Loading, Options, load
from holdfast.phases import LOG, attempt
from holdfast.reports import LoadReport
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.complete import Stored, encode_seal
from holdfast.run.fallback import is_damage
from holdfast.run.history import Located, Run
from holdfast.run.paths import storage_at
from holdfast.storage.base import Storage
from holdfast.storage.memory import MemoryFile, MemoryStorage
from holdfast.transfer.timed import TimedStorage

_LOOK_S: Final = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class RestoreReport:
    """What was restored: `step` (None: there was nothing yet), at `place`, from `tier` ("node memory" or "storage").

    ``next_step`` is where the loop goes on. `load` says the rest.
    """

    step: int | None
    place: str | None
    tier: str | None
    load: LoadReport | None

    @property
    def next_step(self) -> int:
        """The step after the one that was restored; 0 where there was none."""
        return 0 if self.step is None else self.step + 1

    def __repr__(self) -> str:
        if self.load is None:
            return "<RestoreReport: there was nothing to restore; the next step is 0>"
        return f"<RestoreReport from {self.tier}: {self.load!r}>"


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """A data file that is in the memory of a node, whole; of the run `run_id`, in the epoch opened with `incarnation`
    ("": not recorded)."""

    run_id: str
    incarnation: str
    checkpoint_id: str
    place: Place
    step: int
    file: int
    nbytes: int
    digest: str
    is_committed: bool


class _Inventory(msgspec.Struct, frozen=True, array_like=True):
    """What a rank finds on its node, as far as it knows the manifests; and whether some trainer is filling a slot."""

    node: str
    held: tuple[_Held, ...]
    is_filling: bool


class _Chosen(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks restore: the seal of a checkpoint, the newest epoch of its run, the folder's name, the ranks that
    alone can read each file (empty: all can read all), and whether it is committed. No seal: from storage.

    `given_up` are checkpoints that are in memory in part only: those who had the rest are gone. `let_go` are those of
    another history than storage has."""

    seal: bytes = b""
    epoch: int = 0
    folder: str = ""
    owners: tuple[int, ...] = ()
    committed: bool = True
    given_up: tuple[str, ...] = ()
    let_go: tuple[str, ...] = ()


class Restored(NamedTuple):
    """A report, and the place of what was restored if that was not committed yet."""

    report: RestoreReport
    uncommitted: Place | None


def restore(
    run: str,
    state: Mapping[str, object],
    *,
    node_dir: Path | None,
    select: str | Sequence[str] | None,
    group: ProcessGroup | None,
    verify: bool,
    timeout_s: float,
) -> Restored:
    """Fill `state` from the newest checkpoint of `run`. Collective over `group`. See `Checkpointer.restore`."""
    if node_dir is not None:
        try:
            options = Options(select, verify=verify, continues=True)
            restored = _from_memory(run, state, node_dir, group, options, timeout_s=timeout_s)
        except HoldfastError as error:
            if not is_damage(error) and error.code != "storage.memory":
                raise
            what = "is damaged" if is_damage(error) else "cannot be read"
            _log.warning("what is in memory %s, going to storage: %s", what, error)
        else:
            if restored is not None:
                return restored
    try:
        report = load(run, state, select=select, continues=True, group=group, verify=verify, timeout_s=timeout_s)
    except NotFoundError as error:
        if error.code not in ("not_found.run", "not_found.head"):
            raise
        return Restored(RestoreReport(None, None, None, None), None)
    return Restored(RestoreReport(report.step, report.place, "storage", report), None)


def await_commit(run: str, place: Place, *, node_dir: Path, timeout_s: float) -> None:
    """Return when what was restored from memory is committed: until then nothing can follow it in the history."""
    end = time.monotonic() + timeout_s
    uri = storage_at(run).uri
    with (
        NodeFolder(uri, node_dir=node_dir) as folder,
        TimedStorage(storage_at(run), timeout_s=2 * timeout_s) as storage,
    ):
        while storage.nbytes(records.commit_key(place)) is None:
            ensure_keeper(folder, uri)
            if time.monotonic() > end:
                raise DeadlineError(
                    f"The checkpoint {place}, restored from memory, was not committed within {timeout_s:.0f} s.",
                    code="timeout.commit",
                    action="See the log of the keeper for what holds it up.",
                    path=storage.uri,
                )
            time.sleep(_LOOK_S)


def drop_parts(run: str, node_dir: Path, channel: Channel, deadline: Deadline) -> None:
    """Give up what is in the memory of the nodes in part only. Collective."""
    with _looked_at(run, node_dir, channel, deadline):
        pass


def _from_memory(
    run: str,
    state: Mapping[str, object],
    node_dir: Path,
    group: ProcessGroup | None,
    options: Options,
    *,
    timeout_s: float,
) -> Restored | None:
    deadline = Deadline(timeout_s)
    channel = default_channel("restore", group, deadline=deadline)
    with _looked_at(run, node_dir, channel, deadline) as (folder, slots, chosen):
        if not chosen.seal:
            return None
        seal = records.decode(chosen.seal, Seal, path=str(folder.path))
        with TimedStorage(storage_at(run), timeout_s=deadline.for_storage_s) as storage:
            memory = _memory(folder, slots, seal, chosen.folder)
            located = Located(memory, Run.open(storage), None, f"{records.CHECKPOINTS}/{chosen.folder}/", seal)
            report = _load(channel, deadline, group, state, located, chosen, options=options)
        if channel.rank == 0:
            LOG.info("restored from node memory: %s", report.summary)
        uncommitted = None if chosen.committed else seal.place
        return Restored(RestoreReport(report.step, report.place, "node memory", report), uncommitted)


@contextmanager
def _looked_at(
    run: str, node_dir: Path, channel: Channel, deadline: Deadline
) -> Iterator[tuple[NodeFolder, list[Slot], _Chosen]]:
    """What this node has in memory, and what of it all nodes choose to go on from; the rest of which only a part is
    there is given up."""
    uri = storage_at(run).uri
    with ExitStack() as stack:
        folders: list[NodeFolder] = []
        slots: list[Slot] = []

        def look() -> bytes:
            with unusable_memory(node_dir):
                folder = stack.enter_context(NodeFolder(uri, node_dir=node_dir))
                folders.append(folder)
                stack.enter_context(Claim(folder))  # nothing of it gives way while it is looked at
                slots.extend(stack.enter_context(_sealed_slots(folder, uri, timeout_s=deadline.for_storage_s / 2)))
                return msgspec.msgpack.encode(_inventory(folder, slots))

        def choose(payloads: Sequence[bytes]) -> bytes:
            with TimedStorage(storage_at(uri), timeout_s=deadline.for_storage_s) as storage:
                return _choose(storage, folders[0], payloads)

        def give_up() -> bytes:
            with unusable_memory(node_dir):
                for checkpoint_id in chosen.given_up:
                    give_up_generation(folders[0], checkpoint_id)
                _let_go(folders[0], slots, chosen.let_go)
            return b""

        chosen = decode_msgpack(channel.exchange("inventory", attempt(look), choose, deadline), _Chosen)
        if chosen.given_up or chosen.let_go:
            channel.collect("inventory", attempt(give_up), deadline)
        yield folders[0], slots, chosen


def _load(
    channel: Channel,
    deadline: Deadline,
    group: ProcessGroup | None,
    state: Mapping[str, object],
    located: Located,
    chosen: _Chosen,
    *,
    options: Options,
) -> LoadReport:
    checkpoint = Checkpoint(located)
    if chosen.owners:
        checkpoint.nodes = _all_values(channel, deadline, checkpoint, chosen.owners)
    with TimedStorage(located.storage, timeout_s=deadline.for_storage_s) as storage:
        loading = Loading(channel, deadline, storage, group_ranks(group)[channel.rank], options)
        return loading.fill(state, lambda: checkpoint, epoch=chosen.epoch, owners=chosen.owners or None, in_memory=True)


def _all_values(
    channel: Channel, deadline: Deadline, checkpoint: Checkpoint, owners: Sequence[int]
) -> Mapping[str, Node]:
    """The table of values, of which each rank can read a part."""
    mine = [file for file, owner in enumerate(owners) if owner == channel.rank]

    def unite(payloads: Sequence[bytes]) -> bytes:
        tables = map(value_codec.decode, payloads)
        return value_codec.encode({path: node for table in tables for path, node in table.items()})

    part = attempt(lambda: value_codec.encode(checkpoint.values_in(mine)))
    return value_codec.decode(channel.exchange("values", part, unite, deadline))


@contextmanager
def _sealed_slots(folder: NodeFolder, run: str, *, timeout_s: float) -> Iterator[list[Slot]]:
    """The slots of the node; what was staged is sealed by its keeper first, for which it has `timeout_s`."""
    with ExitStack() as stack:
        slots: list[Slot] = []
        for name in slot_names(folder):
            with suppress(FileNotFoundError, CorruptError):
                slots.append(stack.enter_context(Slot(folder, name)))
        if any(slot.state in (State.STAGED, State.SEALED) for slot in slots):
            ensure_keeper(folder, run)
        end = time.monotonic() + timeout_s
        while staged := [slot for slot in slots if slot.refresh().state == State.STAGED]:
            ensure_keeper(folder, run)
            if time.monotonic() > end:
                for slot in staged:
                    _log.warning("restore passes over '%s': its keeper did not seal it in %.0f s", slot.path, timeout_s)
                break
            time.sleep(_LOOK_S)
        yield slots


def _inventory(folder: NodeFolder, slots: Sequence[Slot]) -> _Inventory:
    held = []
    known: dict[str, Generation] = {}
    for slot in slots:
        record = slot.record
        contents = record.contents
        if contents is not None and record.state in WHOLE:
            with suppress(FileNotFoundError, CorruptError):
                id_ = contents.checkpoint_id
                generation = known[id_] = known.get(id_) or read_generation(folder, id_)
                held.append(
                    _Held(
                        contents.run_id,
                        generation.incarnation,
                        id_,
                        contents.place,
                        contents.step,
                        contents.file,
                        contents.nbytes,
                        record.digest,
                        record.state == State.COMMITTED,
                    )
                )
    is_filling = any(slot.state == State.WRITING and slot.is_taken for slot in slots)
    return _Inventory(folder.identity(), tuple(held), is_filling)


def _choose(storage: Storage, folder: NodeFolder, payloads: Sequence[bytes]) -> bytes:
    """On rank 0: the newest checkpoint on the lineage of the head in `storage` that all nodes together hold."""
    inventories = [decode_msgpack(payload, _Inventory) for payload in payloads]
    places = {each.checkpoint_id: each.place for inventory in inventories for each in inventory.held}
    try:
        run = Run.open(storage)
    except NotFoundError:
        return msgspec.msgpack.encode(_Chosen())
    epoch, head = run.newest_epoch() or 0, run.head()
    foreign = _foreign(run, [each for inventory in inventories for each in inventory.held])
    let_go = tuple(sorted(foreign))
    _warn_of(run, foreign.values())
    given_up: list[str] = []
    # Where another job is at work, what is there in part may be about to become whole.
    is_filling = any(inventory.is_filling for inventory in inventories)
    for checkpoint_id in sorted(places.keys() - foreign.keys(), key=places.__getitem__, reverse=True):
        place = places[checkpoint_id]
        whole = _whole(run, folder, inventories, checkpoint_id)
        if whole is None:
            if not is_filling and not _is_committed(inventories, checkpoint_id):
                given_up.append(checkpoint_id)
            continue
        is_head = head is not None and head.checkpoint_id == checkpoint_id
        if is_head or (place.epoch == epoch and (head is None or head.place < place)):
            stored, files = whole
            seal = encode_seal(stored, [next(iter(holders.values())) for holders in files])
            owners = _owners(inventories, files)
            chosen = _Chosen(seal, epoch, stored.folder, owners, is_head, tuple(given_up), let_go)
            return msgspec.msgpack.encode(chosen)
    return msgspec.msgpack.encode(_Chosen(given_up=tuple(given_up), let_go=let_go))


def _foreign(run: Run, held: Sequence[_Held]) -> dict[str, _Held]:
    """By id, the checkpoints in memory that are of another history than the run in storage has: it was restored from an
    older copy, or begun anew.

    They are of another run, or of an epoch that storage has opened otherwise, or were committed, which storage does not
    know; or they come after such ones in their epoch.
    """
    by_id = {each.checkpoint_id: each for each in sorted(held, key=lambda each: each.is_committed)}
    foreign = {each.checkpoint_id: each for each in by_id.values() if not _is_of(run, each)}
    first: dict[int, Place] = {}
    for each in foreign.values():
        first[each.place.epoch] = min(each.place, first.get(each.place.epoch, each.place))
    for each in by_id.values():
        if not each.is_committed and each.place > first.get(each.place.epoch, each.place):
            foreign[each.checkpoint_id] = each
    return foreign


def _is_of(run: Run, held: _Held) -> bool:
    """Whether a checkpoint in memory is of the history that `run` has in storage."""
    if held.run_id != run.run_id:
        return False
    try:
        if held.incarnation:
            run.check_incarnation(held.place.epoch, held.incarnation)
        return not held.is_committed or run.commit(held.place).checkpoint_id == held.checkpoint_id
    except FencedError:
        return False
    except NotFoundError:
        return run.is_removed(held.place)


def _warn_of(run: Run, foreign: Iterable[_Held]) -> None:
    lost = sorted((each.step, str(each.place)) for each in foreign)
    if lost:
        _log.warning(
            "steps %s (places %s) in memory belong to another history than '%s' in storage, which somebody restored "
            "from an older copy, or began anew: holdfast lets them go",
            ", ".join(str(step) for step, _ in lost),
            ", ".join(place for _, place in lost),
            run.storage.uri,
        )


def _let_go(folder: NodeFolder, slots: Sequence[Slot], checkpoint_ids: Collection[str]) -> None:
    """Remove the slots of checkpoints that are of another history; have the keeper free those that it cares for."""
    for slot in slots:
        contents = slot.record.contents
        if contents is not None and contents.checkpoint_id in checkpoint_ids:
            if slot.state in (State.STAGED, State.SEALED):
                give_up_generation(folder, contents.checkpoint_id)
            else:
                slot.remove()  # the other ranks of this node do the same


def _whole(
    run: Run, folder: NodeFolder, inventories: Sequence[_Inventory], checkpoint_id: str
) -> tuple[Stored, list[dict[str, FileSeal]]] | None:
    """A checkpoint that all nodes together hold, whole, and who holds each of its files; None where they do not."""
    with suppress(FileNotFoundError, CorruptError):
        generation = read_generation(folder, checkpoint_id)
        manifest = fmt.decode(generation.manifest, path=generation.folder)
        files = _files(inventories, checkpoint_id, manifest.body.num_files)
        if files is not None and manifest.body.run_id == run.run_id:
            return Stored(generation.folder, generation.manifest, manifest), files
    return None


def _is_committed(inventories: Sequence[_Inventory], checkpoint_id: str) -> bool:
    held = (each for inventory in inventories for each in inventory.held)
    return any(each.is_committed for each in held if each.checkpoint_id == checkpoint_id)


def _files(inventories: Sequence[_Inventory], checkpoint_id: str, num_files: int) -> list[dict[str, FileSeal]] | None:
    """Of each data file, the nodes that hold it, with what its seal says; None where one is nowhere."""
    files: list[dict[str, FileSeal]] = [{} for _ in range(num_files)]
    for inventory in inventories:
        for each in inventory.held:
            if each.checkpoint_id == checkpoint_id:
                files[each.file][inventory.node] = FileSeal(fmt.file_name(each.file), each.nbytes, each.digest)
    return files if all(files) else None


def _owners(inventories: Sequence[_Inventory], files: Sequence[Mapping[str, FileSeal]]) -> tuple[int, ...]:
    """A rank that can read each file, in turn among those of a node; empty where all nodes have all files."""
    nodes: dict[str, list[int]] = {}
    for number, inventory in enumerate(inventories):
        nodes.setdefault(inventory.node, []).append(number)
    if all(nodes.keys() <= holders.keys() for holders in files):
        return ()
    owners = []
    for index, holders in enumerate(files):
        ranks = nodes[next(iter(holders))]
        owners.append(ranks[index % len(ranks)])
    return tuple(owners)


def _memory(folder: NodeFolder, slots: Sequence[Slot], seal: Seal, name: str) -> MemoryStorage:
    """What this node holds of a checkpoint, as a storage."""
    storage = MemoryStorage(str(folder.path))
    files = {fmt.NAME: np.frombuffer(read_generation(folder, seal.checkpoint_id).manifest, np.uint8)}
    for slot in slots:
        contents = slot.record.contents
        if contents is not None and contents.checkpoint_id == seal.checkpoint_id and slot.record.state in WHOLE:
            files[fmt.file_name(contents.file)] = data_file(slot)
    for file, data in files.items():
        key = f"{records.CHECKPOINTS}/{name}/{file}"
        storage.add(key, MemoryFile(data, path=storage.path(key)))
    return storage
