"""While a save begins to refer to a still file, another process removes the checkpoints that lead to it: in whatever
order their requests come, a committed checkpoint has all its bytes.

Two threads make their requests in turns, as in `test_removal_races`: one does a save, the other removes. The save is
the real one from the choice of its candidates to its commit; only the state and the other ranks are missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest

from holdfast.checkpoint.stored_checkpoint import Checkpoint, pack_values
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import FileLayout, Files
from holdfast.format.records import Place
from holdfast.format.tombstones import Removed, removed_key
from holdfast.format.values import Plain
from holdfast.io.digest import digest_blocks
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate, RankMessage, RankValues, plan_save
from holdfast.run.compaction import compact_checkpoint
from holdfast.run.complete import complete, sealed_file
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.holds import create_lease
from holdfast.run.references import candidates_for
from holdfast.run.removal import remove_checkpoint, remove_place
from holdfast.run.still_files import StoredFile
from holdfast.store.timed import TimedStore
from holdfast.testing.memory_store import MemoryStore
from tests.run.test_removal_races import counted, raced
from tests.support.checkpoints import begin
from tests.support.faulty_storage import FaultyStore

NUMEL = 1 << 17  # of float64: one MiB, the least that is worth a still file
VALUES = RankValues(0, 64, ("step",))
#: The holder of the bytes, the head that refers to it, a newer one that was under way, and the save of the tests.
HOLDER, HEAD, NEWER, SAVED = Place(1, 1), Place(1, 2), Place(1, 8), Place(1, 9)


@cache
def template() -> ManifestTemplate:
    layout = RankLayout.of([TensorLayout("w", "float64", (NUMEL,), Whole("split"))], {}, {"w"})
    plan = plan_save([RankMessage(layout.digest, layout.columns)], {layout.digest: layout.body})
    return ManifestTemplate.of(plan, [VALUES])


def section(layout: FileLayout, step: int) -> bytes:
    """The data of a file: zeros, which never change, and the values, which do."""
    if layout.values is not None:
        return pack_values({"step": Plain(step)}, capacity=layout.values.capacity)
    return bytes(layout.data_nbytes)


def write(run: Run, place: Place) -> str:
    """All of a save up to its seal."""
    step = place.seq
    identity = CheckpointIdentity(f"{step:016x}", run.run_id, place, step, 1.5, {})
    folder = records.folder_name(step, identity.checkpoint_id)
    references = candidates_for(run, template().still_files, place=place, folder=folder)
    data = template().encode(identity, (), references)
    run.storage.create(records.checkpoint_key(folder, fmt.NAME), data)
    manifest = fmt.decode(data, path=folder)
    with TimedStore(run.storage, timeout_s=60) as storage:
        for index in range(manifest.body.num_files):
            layout = Files(manifest).layout(index)
            held = section(layout, step)
            table = digest_blocks(np.frombuffer(held, np.uint8))
            target = StoredFile(storage, manifest, folder, layout)
            if target.candidate is None or not target.marked(sealed_file(manifest, layout, table)):
                storage.create(target.key, container.header(manifest, layout, table) + held)
    return folder


def save(run: Run) -> None:
    complete(run, write(run, SAVED), deep=False)


def remove_both(run: Run) -> None:
    """Commit a newer checkpoint, so that the head is the head no longer; then remove what leads to the bytes."""
    complete(run, records.folder_name(NEWER.seq, f"{NEWER.seq:016x}"), deep=False)
    remove_checkpoint(run, run.commit(HEAD))
    remove_checkpoint(run, run.commit(HOLDER))


def remove_head_last(run: Run) -> None:
    complete(run, records.folder_name(NEWER.seq, f"{NEWER.seq:016x}"), deep=False)
    holder = run.commit(HOLDER)
    remove_checkpoint(run, holder)
    remove_checkpoint(run, run.commit(HEAD))
    remove_place(run, HOLDER, holder.checkpoint)


def compact_and_remove(run: Run) -> None:
    compact_checkpoint(run, run.commit(HEAD))
    remove_checkpoint(run, run.commit(HOLDER))


def remove_holder(run: Run) -> None:
    """As `remove_both`, where the head itself holds the bytes."""
    complete(run, records.folder_name(NEWER.seq, f"{NEWER.seq:016x}"), deep=False)
    remove_checkpoint(run, run.commit(HOLDER))


REMOVALS: list[Callable[[Run], None]] = [remove_both, remove_head_last, compact_and_remove, remove_holder]


@cache
def saved_run() -> Run:
    run = Run.create(MemoryStore())
    begin(run)
    complete(run, write(run, HOLDER), deep=False)
    complete(run, write(run, HEAD), deep=False)
    # The newer one has bytes of its own, and is not committed yet.
    folder = records.folder_name(NEWER.seq, f"{NEWER.seq:016x}")
    identity = CheckpointIdentity(f"{NEWER.seq:016x}", run.run_id, NEWER, NEWER.seq, 1.5, {})
    manifest = fmt.decode(template().encode(identity), path=folder)
    run.storage.create(records.checkpoint_key(folder, fmt.NAME), template().encode(identity))
    for index in range(manifest.body.num_files):
        layout = Files(manifest).layout(index)
        held = section(layout, NEWER.seq)
        header = container.header(manifest, layout, digest_blocks(np.frombuffer(held, np.uint8)))
        run.storage.create(records.checkpoint_key(folder, manifest.file_name(index)), header + held)
    return run


def new_run(removal: Callable[[Run], None] = remove_both) -> Run:
    """The run before `removal`."""
    saved = saved_run()
    storage = MemoryStore()
    assert isinstance(saved.storage, MemoryStore)
    folder = saved.commit(HEAD).checkpoint
    gone = (folder, records.commit_name(HEAD).removesuffix(".json")) if removal is remove_holder else ()
    objects = saved.storage.objects.items()
    storage.objects = {key: held for key, held in objects if not any(each in key for each in gone)}
    return Run(storage, saved.marker)


def orders(removal: Callable[[Run], None], *, every: bool) -> Iterator[tuple[int, ...]]:
    """Orders of the requests of a save among those of a removal: those in which the removal makes its first requests
    between two of the save, and the rest after it; and some of the others. Unless `every` one is wanted, only those in
    which it begins right before the save creates its record, where it can do most harm."""
    num_ours, num_theirs = counted(save, new_run(removal)), counted(removal, new_run(removal))
    first = num_before_record(new_run(removal))
    for i in range(num_ours) if every else (first,):
        for j in range(1, num_theirs + 1):
            yield (*(0,) * i, *(j,) * (num_ours - i))
    chance = random.Random(0)
    for _ in range(200 if every else 10):
        yield tuple(sorted(chance.choices(range(num_theirs + 1), k=num_ours)))


def num_before_record(run: Run) -> int:
    """The number of requests that a save makes before it creates its record."""
    asked: list[str] = []
    save(Run(FaultyStore(run.storage, lambda _, when, name, path: asked.append(f"{when} {name} {path}")), run.marker))
    before = [each for each in asked if each.startswith("before")]
    return next(number for number, each in enumerate(before) if "create" in each and "/references/" in each)


def test_the_head_of_the_tests_refers_to_the_holder() -> None:
    run = new_run()
    assert run.head_place() == HEAD
    (file,) = run.locate(run.commit(HEAD)).seal.referenced
    assert file.checkpoint == run.commit(HOLDER).checkpoint
    assert run.commit(HEAD).num_referenced_bytes == file.nbytes


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_committed_checkpoint_ever_lacks_bytes(removal: Callable[[Run], None], *, every: bool) -> None:
    num_referring = 0
    for before in orders(removal, every=every):
        run = new_run(removal)
        refused, failed = raced(run, save, before, removal)
        assert refused is None, before
        assert failed is None, before
        assert_whole(run)
        assert run.head_place() == SAVED
        num_referring += bool(run.locate(run.commit(SAVED)).seal.referenced)
    assert num_referring  # and some of them did refer


def assert_whole(run: Run) -> None:
    for place in run.places():
        checkpoint = Checkpoint(run.locate(run.commit(place)))
        assert verify_checkpoint(checkpoint, deep=True) == [], place


def test_a_second_removal_amid_the_first_one_changes_nothing() -> None:
    """Between any two requests of the removal of the holder, a save comes to it through the head, which is removed."""
    holder = new_run().commit(HOLDER)
    num_requests = counted(lambda run: remove_checkpoint(run, holder), new_run())
    for number in range(num_requests):
        run, is_done = new_run(), False

        def interrupt(now: int, when: str, name: str, path: str, run: Run = run, number: int = number) -> None:
            nonlocal is_done
            if now == number and when == "before" and not is_done:
                is_done = True
                save(run)
                remove_checkpoint(run, run.commit(HEAD))

        remove_checkpoint(Run(FaultyStore(run.storage, interrupt), run.marker), holder)
        assert is_done
        assert_whole(run)


def test_a_reader_keeps_the_files_of_others_that_his_checkpoint_needs() -> None:
    run = new_run()
    complete(run, records.folder_name(NEWER.seq, f"{NEWER.seq:016x}"), deep=False)
    read, holder = run.commit(HEAD), run.commit(HOLDER)
    checkpoint, lease = Checkpoint(run.locate(read)), create_lease(run.storage, HEAD, lasting_s=60.0)
    # A removal that had looked for leases before has got as far as its tombstone.
    run.storage.create(removed_key(HEAD), records.encode(Removed(place=HEAD, checkpoint=read.checkpoint)))
    assert not remove_checkpoint(run, holder)
    assert verify_checkpoint(checkpoint, deep=True) == []
    run.storage.delete(lease)
    assert remove_checkpoint(run, holder)
    assert remove_checkpoint(run, read)
    assert examine(run) == []


def test_after_the_last_removal_nothing_is_left() -> None:
    run = new_run()
    save(run)
    remove_both(run)
    kept = run.storage.list(f"{records.CHECKPOINTS}/{records.folder_name(1, f'{1:016x}')}")
    assert kept == ["manifest.hfm", "still-00001.safetensors"]
    assert examine(run) == []
    complete(run, write(run, Place(1, 10)), deep=False)
    for place in (SAVED, NEWER):
        remove_checkpoint(run, run.commit(place))
    assert verify_checkpoint(Checkpoint(run.locate(run.commit(Place(1, 10)))), deep=True) == []
