"""From staged slots to a committed checkpoint, on one node and on several, however often a keeper starts again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.errors import CorruptError, FencedError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Place
from holdfast.format.values import Plain
from holdfast.keeper.persist import Sealing, commit, data_file, persist, publish_manifest
from holdfast.node_memory.generations import (
    Generation,
    generation_ids,
    read_generation,
    remove_generation,
    write_generation,
)
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState
from holdfast.plan.layout import Mesh, Placed, Shard, TensorLayout, Whole
from holdfast.plan.save import CheckpointIdentity, ManifestTemplate, RankValues, plan_save
from holdfast.run.history import Run
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.support.worlds import World, data_sections

CHECKPOINT = "00112233445566aa"
SHAPE = (1000, 301)


def world() -> World:
    rng = np.random.default_rng(7)
    layouts = [
        TensorLayout("model/w", "float32", SHAPE, Placed(Mesh((2,), (0, 1)), (Shard(0),))),
        TensorLayout("model/x", "int64", (7,), Whole("first")),
    ]
    full = {
        name: rng.integers(0, 256, (*shape, size), np.uint8)
        for name, shape, size in [
            ("model/w", SHAPE, 4),
            ("model/x", (7,), 8),
        ]
    }
    return World([layouts, layouts], full)


class Saved:
    """A checkpoint of two ranks whose data files are staged in slots, in the folders of their nodes."""

    def __init__(
        self,
        run: Run,
        folders: list[NodeFolder],
        stack: ExitStack,
        *,
        memory_only: bool = False,
        boot: str = "",
        features: tuple[str, ...] = (),
        disk: str = "",
    ) -> None:
        self.world = world()
        epoch = run.open_epoch(after=0, opened_from=None, why="start", world_size=2, incarnation="0" * 32)
        place = Place(epoch.epoch, 1)
        identity = CheckpointIdentity(CHECKPOINT, run.run_id, place, 7, 123.5, {})
        messages, bodies = self.world.sent()
        template = ManifestTemplate.of(plan_save(messages, bodies), [RankValues(0, 100, ("a",))], features)
        manifest = template.encode(identity, ())
        folder = records.folder_name(7, CHECKPOINT)
        self.generation = Generation(run.storage.location.url, folder, CHECKPOINT, place, 7, manifest, disk=disk)
        self.slots: list[Slot] = []
        files = Files(fmt.decode(manifest, path="manifest"))
        for rank, section in enumerate(data_sections(self.world, files)):
            layout = files.layout(rank)
            if layout.values is not None:
                section[layout.values_offset :] = pack_values({"a": Plain(5)}, capacity=layout.values.capacity)
            nbytes = layout.data_start + layout.data_nbytes
            slot = stack.enter_context(Slot.create(folders[rank], rank=rank, nbytes=nbytes))
            slot.data[:] = 0xAB  # the old content of the slot
            contents = Contents(run.run_id, CHECKPOINT, place, 7, rank, layout.data_start, nbytes, memory_only, boot)
            assert slot.take()
            slot.advance(SlotRecord(SlotState.WRITING, contents))
            slot.data[layout.data_start : nbytes] = np.frombuffer(bytes(section), np.uint8)
            slot.advance(SlotRecord(SlotState.STAGED, contents))
            self.slots.append(slot)
            write_generation(folders[rank], self.generation)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(PosixStore(str(tmp_path / "run")))


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[NodeFolder]]:
    """Two nodes."""
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
    with (
        NodeFolder("run", node_dir=tmp_path / "node0") as first,
        NodeFolder("run", node_dir=tmp_path / "node1") as second,
    ):
        yield [first, second]


@pytest.fixture
def saved(run: Run, folders: list[NodeFolder]) -> Iterator[Saved]:
    with ExitStack() as stack:
        yield Saved(run, folders, stack)


def persist_in(run: Run, sealing: Sealing, slot: Slot) -> None:
    with TimedStore(run.storage, timeout_s=60) as storage:
        publish_manifest(storage, sealing)
        persist(storage, sealing, slot)


def contents_of(slot: Slot) -> Contents:
    assert slot.record.contents is not None
    return slot.record.contents


def first_file(slot: Slot) -> Bytes:
    return data_file(slot, contents_of(slot).files[0])


def assert_loads(run: Run, saved: Saved) -> None:
    view = holdfast.open(run.storage.location.url)
    assert view.step == 7
    assert view.names() == ["model/w", "model/x"]
    for name in view.names():
        assert view[name].numpy().tobytes() == saved.world.full[name].tobytes()


def test_a_sealed_slot_is_a_data_file_that_any_reader_takes(saved: Saved, tmp_path: Path) -> None:
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
        assert slot.record.state == SlotState.SEALED
    (tmp_path / "file.safetensors").write_bytes(first_file(saved.slots[0]).tobytes())
    found = load_file(tmp_path / "file.safetensors")
    assert found["model/w@0:500,0:301"].tobytes() == saved.world.full["model/w"][:500].tobytes()


def test_what_is_staged_becomes_a_checkpoint(run: Run, saved: Saved) -> None:
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
        persist_in(run, sealing, slot)
    found = commit(run, sealing, [])
    assert found is not None
    assert found.place == saved.generation.place
    assert_loads(run, saved)


def test_a_file_is_on_its_way_to_storage_while_it_is_hashed(run: Run, saved: Saved) -> None:
    sealing = Sealing(saved.generation)
    with TimedStore(run.storage, timeout_s=60) as storage, ThreadPoolExecutor() as pool:
        publish_manifest(storage, sealing)
        seals: list[FileSeal] = []
        for slot in saved.slots:
            begin = Event()

            def seal(slot: Slot = slot, begin: Event = begin) -> None:
                begin.wait()
                sealing.seal(slot)

            sealed = pool.submit(seal)

            def await_seal(sealed: Future[None] = sealed, begin: Event = begin) -> None:
                begin.set()
                sealed.result()

            seals += persist(storage, sealing, slot, await_seal=await_seal)
    assert commit(run, sealing, seals) is not None
    assert_loads(run, saved)


def test_nodes_that_know_nothing_of_each_other_commit_when_all_files_are_there(
    run: Run, saved: Saved, folders: list[NodeFolder]
) -> None:
    for number in (1, 0):
        # A keeper that was started later, from what it finds.
        sealing = Sealing(read_generation(folders[number], *generation_ids(folders[number])))
        with Slot(folders[number], saved.slots[number].name) as slot:
            sealing.seal(slot)
            persist_in(run, sealing, slot)
        assert (commit(run, sealing, []) is None) == (number == 1)
    assert_loads(run, saved)


def test_all_of_it_may_be_done_again(run: Run, saved: Saved) -> None:
    for _ in range(2):
        sealing = Sealing(saved.generation)
        for slot in saved.slots:
            if slot.state == SlotState.STAGED:
                sealing.seal(slot)
            persist_in(run, sealing, slot)
        seals = [sealing.file_seal(slot, each) for slot in saved.slots for each in contents_of(slot).files]
        first, second = commit(run, sealing, []), commit(run, sealing, seals)
        assert first == second
        assert first is not None
    assert_loads(run, saved)


def test_a_job_that_is_fenced_commits_nothing(run: Run, saved: Saved) -> None:
    run.open_epoch(after=1, opened_from=None, why="start", world_size=2, incarnation="1" * 32)
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
        persist_in(run, sealing, slot)
    with pytest.raises(FencedError):
        commit(run, sealing, [])
    assert run.head() is None


def test_a_checkpoint_that_was_committed_before_a_newer_epoch_is_not_given_up(run: Run, saved: Saved) -> None:
    """A keeper that looked again after another one had committed gave its part up, and the copies that it held: the
    next restore read storage, although the nodes had all of the checkpoint."""
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
        persist_in(run, sealing, slot)
    committed = commit(run, sealing, [])
    run.open_epoch(after=1, opened_from=saved.generation.place, why="resume", world_size=2, incarnation="1" * 32)
    assert commit(run, sealing, []) == committed


def test_a_generation_is_there_once_and_whole(saved: Saved, folders: list[NodeFolder]) -> None:
    write_generation(folders[0], saved.generation)
    assert generation_ids(folders[0]) == [CHECKPOINT]
    assert read_generation(folders[0], CHECKPOINT) == saved.generation
    remove_generation(folders[0], CHECKPOINT)
    remove_generation(folders[0], CHECKPOINT)
    with pytest.raises(FileNotFoundError):
        read_generation(folders[0], CHECKPOINT)


@pytest.mark.parametrize("at", [0, 10, 30, -1])
def test_a_damaged_generation_is_an_error_that_names_it(saved: Saved, folders: list[NodeFolder], at: int) -> None:
    path = folders[0].path / f"generation-{CHECKPOINT}"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="generation-0011") as caught:
        read_generation(folders[0], CHECKPOINT)
    assert caught.value.code == "corrupt.generation"
