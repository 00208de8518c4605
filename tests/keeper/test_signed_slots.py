"""The keeper of a signed checkpoint signs the bytes that it has in memory, and not what somebody put into storage."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.errors import CorruptError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import Files
from holdfast.format.manifest import Candidate, file_name
from holdfast.format.records import SEAL_NAME, Place, Seal
from holdfast.keeper.persist import Sealing, data_file
from holdfast.keeper.writing import StagedFiles, Writing
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotRecord, SlotState
from holdfast.plan.save import CheckpointIdentity
from holdfast.run.history import Run
from holdfast.signing import KEYS, SIGNED
from tests.keeper.test_persist import Saved, assert_loads, folders, run
from tests.run.test_reference_races import section, template
from tests.support.nursery import until

__all__ = ["folders", "run"]


@pytest.fixture
def saved(run: Run, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch) -> Iterator[Saved]:
    monkeypatch.setenv(KEYS, "ab" * 32)
    with ExitStack() as stack:
        yield Saved(run, folders, stack, features=(SIGNED,))


def write(sealing: Sealing, saved: Saved) -> None:
    for slot in saved.slots:
        sealing.seal(slot)
    with ThreadPoolExecutor(2) as pool:
        writing = Writing(sealing, pool)
        for slot in saved.slots:
            writing.join(StagedFiles(slot))
        until(writing.is_over)
        assert writing.outcome()
        writing.close()


def test_slots_become_a_signed_checkpoint(run: Run, saved: Saved) -> None:
    write(Sealing(saved.generation), saved)
    assert_loads(run, saved)


def test_a_file_that_somebody_created_first_is_not_signed(run: Run, saved: Saved) -> None:
    """It has other weights, and every digest right, so its own header says that it is sound."""
    sealing, slot = Sealing(saved.generation), saved.slots[1]
    contents = slot.record.contents
    assert contents is not None
    slot.data[contents.data_start] ^= 1
    sealing.seal(slot)
    path = Path(run.storage.path(sealing.stored.key(file_name(contents.file))))
    path.parent.mkdir(parents=True)
    path.write_bytes(data_file(slot, contents.files[0]).tobytes())
    (forged,) = sealing.file_seals(slot)
    slot.data[contents.data_start] ^= 1
    write(sealing, saved)
    head = run.head()
    assert head is not None
    key = records.checkpoint_key(head.checkpoint, SEAL_NAME)
    seal = records.decode(run.storage.read(key), Seal, path=key)
    (sealed,) = sealing.file_seals(slot)
    assert seal.files[1] == sealed != forged
    with pytest.raises(CorruptError) as error:
        assert_loads(run, saved)
    assert error.value.code == "corrupt.file"


def test_a_mark_that_somebody_created_first_is_not_believed(
    run: Run, folders: list[NodeFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that an earlier checkpoint has the still file, and what is here differs from that one."""
    monkeypatch.setenv(KEYS, "ab" * 32)
    epoch = run.open_epoch(after=0, opened_from=None, why="start", world_size=1, incarnation="0" * 32)
    identity = CheckpointIdentity("00112233445566aa", run.run_id, Place(epoch.epoch, 1), 7, 123.5, {})
    folder = records.folder_name(identity.step, identity.checkpoint_id)
    other = records.folder_name(6, "0" * 16)
    data = template(SIGNED).encode(identity, (), (Candidate(1, other, "ab" * 32),))
    first, second = map(Files(fmt.decode(data, path="")).layout, (0, 1))
    start = -(-first.nbytes // 4096) * 4096
    with Slot.create(folders[0], rank=0, nbytes=start + second.nbytes) as slot:
        still = SlotFile(1, start, second.data_start, second.nbytes)
        contents = Contents(
            run.run_id, identity.checkpoint_id, identity.place, 7, 0, first.data_start, first.nbytes, second=still
        )
        assert slot.take()
        slot.advance(SlotRecord(SlotState.WRITING, contents))
        slot.data[first.data_start : first.nbytes] = np.frombuffer(section(first, 7), np.uint8)
        slot.data[start + second.data_start : still.stop] = np.frombuffer(section(second, 7), np.uint8)
        slot.advance(SlotRecord(SlotState.STAGED, contents))
        generation = Generation(run.storage.location.url, folder, identity.checkpoint_id, identity.place, 7, data)
        sealing = Sealing(generation)
        sealing.seal(slot)
        run.storage.create(sealing.stored.key(fmt.mark_name(1)), b"")
        run.storage.create(records.checkpoint_key(other, second_name := file_name(1, still=True)), bytes(second.nbytes))
        with ThreadPoolExecutor(4) as pool:
            writing = Writing(sealing, pool)
            writing.join(StagedFiles(slot))
            until(writing.is_over)
            assert writing.outcome()
            writing.close()
        assert run.storage.read(sealing.stored.key(second_name)) == data_file(slot, still).tobytes()
    head = run.head()
    assert head is not None
    assert verify_checkpoint(Checkpoint(run.locate(head)), deep=True) == []


def test_a_manifest_whose_references_have_digests_of_the_other_kind_is_damaged(run: Run) -> None:
    identity = CheckpointIdentity("00112233445566aa", run.run_id, Place(1, 1), 7, 123.5, {})
    for features, content in (((SIGNED,), "ab" * 16), ((), "ab" * 32)):
        data = template(*features).encode(identity, (), (Candidate(1, records.folder_name(6, "0" * 16), content),))
        with pytest.raises(CorruptError, match="digest of another kind"):
            fmt.decode(data, path="manifest")
