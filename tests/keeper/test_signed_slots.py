"""The keeper of a signed checkpoint signs the bytes that it has in memory, and not what somebody put into storage."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.errors import CorruptError
from holdfast.format import records
from holdfast.format.manifest import file_name
from holdfast.format.records import SEAL_NAME, Seal
from holdfast.keeper.persist import Sealing, data_file, file_seal
from holdfast.keeper.writing import Writing
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.run.history import Run
from holdfast.signing import KEYS, SIGNED
from tests.keeper.test_persist import Saved, assert_loads, folders, run
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
            writing.join(slot, None)
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
    path.write_bytes(data_file(slot).tobytes())
    forged = file_seal(slot)
    slot.data[contents.data_start] ^= 1
    write(sealing, saved)
    head = run.head()
    assert head is not None
    key = records.checkpoint_key(head.checkpoint, SEAL_NAME)
    seal = records.decode(run.storage.read(key), Seal, path=key)
    assert seal.files[1] == file_seal(slot) != forged
    with pytest.raises(CorruptError) as error:
        assert_loads(run, saved)
    assert error.value.code == "corrupt.file"
