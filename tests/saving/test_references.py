"""Tensors that training leaves alone are written once: later checkpoints refer to them, and lose nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.checkpoint.file_copy import write_copy
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import ConfigurationError, CorruptError, IncompatibleError, NotFoundError, StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import Commit, FileSeal, Place
from holdfast.io.meter import Meter
from holdfast.io.sources import Source
from holdfast.run import compaction
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.holds import Holds
from holdfast.run.leases import await_ended_reads, want_leases
from holdfast.run.still_files import StoredFile
from holdfast.saving import save_to_storage, shares
from holdfast.state.marks import Versions
from holdfast.store.base import Location
from holdfast.store.posix import PosixStore
from tests.support.command_line import holdfast_command
from tests.support.faulty_storage import watched_store
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

#: A frozen base of 2.25 MiB, and beside it a low-rank adapter, trained with AdamW.
WIDTH, RANK = 768, 8


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.lora_a = nn.Linear(WIDTH, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


class Job:
    """A training of an `Adapted`."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Adapted()
        self.optimizer = torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad])
        self.state: dict[str, object] = {"model": self.model, "optimizer": self.optimizer, "step": 0}

    def train(self) -> None:
        self.model(torch.randn(2, WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, run: str, step: int) -> holdfast.SaveReport:
        self.train()
        self.state["step"] = step
        return holdfast.save(run, self.state, step)

    def bits(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def nbytes_in(folder: str | Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def opened(run: str) -> Run:
    return Run.open(PosixStore(run))


def loaded(path: str) -> dict[str, torch.Tensor]:
    other = Job(seed=1)
    other.train()
    holdfast.load(path, other.state, continues=False)
    return other.bits()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def folder_of(run: str, step: int) -> Path:
    return next(Path(run, "checkpoints").glob(f"step-{step:010d}-*"))


def still_in(run: str, step: int) -> list[str]:
    return sorted(path.name for path in folder_of(run, step).glob("still-*"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    start_new_job()
    yield str(tmp_path / "run")
    start_new_job()


def test_a_save_with_nine_tenths_unchanged_writes_a_ninth_of_the_bytes_at_most(run: str) -> None:
    table, weights = torch.randn(9 << 18), torch.randn(1 << 18)  # 9 MiB and 1 MiB
    state = {"table": holdfast.Still(table), "weights": weights}
    whole = nbytes_in(holdfast.save(run, state, 1).path)
    weights.add_(1)
    before = nbytes_in(run)
    report = holdfast.save(run, state, 2)
    assert nbytes_in(run) - before <= 0.11 * whole
    assert report.written_nbytes <= 0.11 * whole < 0.89 * whole <= report.referenced_nbytes
    assert "left 9.0 MiB to earlier checkpoints" in repr(report)
    view = holdfast.open(run)
    assert torch.equal(view["table"][...], table)
    assert torch.equal(view["weights"][...], weights)


def test_the_frozen_base_of_an_adapter_is_found_without_a_word(run: str) -> None:
    job = Job()
    job.save(run, 1)
    reports = [job.save(run, step) for step in (2, 3)]
    base = job.model.base.weight.nbytes
    assert all(report.referenced_nbytes >= base for report in reports)
    assert [still_in(run, step) for step in (1, 2, 3)] == [
        ["still-00001.safetensors"],
        ["still-00001.same.json"],
        ["still-00001.same.json"],
    ]
    # One step: the third checkpoint names the folder that has the bytes, not that of the second.
    for step in (2, 3):
        (seal,) = json.loads((folder_of(run, step) / "seal.json").read_text())["files"][1:]
        assert seal["checkpoint"] == folder_of(run, 1).name
    assert_equal(loaded(run), job.bits())
    assert examine(opened(run)) == []


@pytest.mark.parametrize("how", ["in place", "by .data"])
def test_a_base_that_is_changed_secretly_is_written_again(run: str, how: str) -> None:
    job = Job()
    job.save(run, 1)
    old = job.bits()
    with torch.no_grad():
        (job.model.base.weight if how == "in place" else job.model.base.weight.data)[3, 5] += 1
    assert job.save(run, 2).referenced_nbytes == 0
    new = job.bits()
    assert job.save(run, 3).referenced_nbytes > 0
    assert still_in(run, 2) == ["still-00001.safetensors"]
    assert torch.equal(loaded(f"{run}@step=1")["base.weight"], old["base.weight"])
    assert_equal(loaded(f"{run}@step=2"), new)
    assert_equal(loaded(run), job.bits())


def test_a_base_that_thaws_moves_with_the_others(run: str) -> None:
    job = Job()
    job.save(run, 1)
    job.model.base.requires_grad_(True)
    job.optimizer.add_param_group({"params": [job.model.base.weight]})
    assert job.save(run, 2).referenced_nbytes == 0
    assert still_in(run, 2) == []
    assert torch.equal(holdfast.open(run)["model/base.weight"][...], job.model.base.weight)


def test_small_frozen_tensors_get_no_file_of_their_own(run: str) -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    holdfast.save(run, {"model": model}, 1)
    assert still_in(run, 1) == []
    manifest = fmt.decode((folder_of(run, 1) / fmt.NAME).read_bytes(), path="")
    assert manifest.body.reader_features == (fmt.SMALL_LAST,)


def test_old_readers_refuse_by_name(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "KNOWN_FEATURES", frozenset({fmt.SMALL_LAST}))
        with pytest.raises(IncompatibleError, match="still-files"):
            holdfast.open(f"{run}@step=1")
    monkeypatch.setattr(records, "READER_FEATURES", frozenset())
    with pytest.raises(IncompatibleError, match="'references'"):
        holdfast.open(run)


def test_a_declared_part_may_be_loaded_without_the_mark_and_the_other_way_round(run: str) -> None:
    table = torch.arange(300_000)
    holdfast.save(run, {"table": holdfast.Still({"a": table, "b": [torch.ones(3)]})}, 1)
    inside = {"a": torch.zeros_like(table), "b": [torch.zeros(3)]}
    holdfast.load(run, {"table": inside}, continues=False)
    marked = holdfast.Still({"a": torch.zeros_like(table), "b": [torch.zeros(3)]})
    report = holdfast.load(run, {"table": marked}, continues=False)
    assert isinstance(report.state, dict)
    assert report.state["table"] is marked
    for found in (inside["a"], marked.value["a"]):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, table)


def test_a_resumed_job_refers_to_what_it_restored(run: str) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    start_new_job()
    other = Job(seed=5)
    other.train()
    holdfast.load(run, other.state)
    assert other.save(run, 3).referenced_nbytes > 0
    start_new_job()
    back = Job(seed=6)
    back.train()
    holdfast.load(f"{run}@step=1", back.state, continues=True)
    assert back.save(run, 2).referenced_nbytes > 0  # a rollback
    assert_equal(loaded(run), back.bits())


def test_another_run_gets_all_bytes(run: str, tmp_path: Path) -> None:
    job = Job()
    job.save(run, 1)
    other = str(tmp_path / "other")
    assert job.save(other, 2).referenced_nbytes == 0
    shutil.rmtree(run)
    assert_equal(loaded(other), job.bits())


def test_a_parent_in_quarantine_is_not_referred_to(run: str) -> None:
    job = Job()
    job.save(run, 1)
    from holdfast.run.quarantine import quarantine

    quarantine(opened(run), Place(1, 1), "somebody found it damaged")
    assert job.save(run, 2).referenced_nbytes == 0


@pytest.mark.parametrize(
    "what", ["*/history/*.json", "*/seal.json", "*/references", "*/quarantine", "*/still-00001.safetensors"]
)
def test_a_save_is_written_whole_where_the_disk_cannot_read_the_checkpoint_before(
    run: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.save(run, 1)
    before = folder_of(run, 1)

    def watch(_: int, when: str, name: str, path: str) -> None:
        is_old = f"/{before.name}/" in path or "/checkpoints/" not in path
        if when == "before" and name in ("read", "list", "nbytes") and is_old and fnmatch(path, what):
            raise StorageError(f"cannot {name} {path}: broken.", code="storage.io", action="Repair it.", path=path)

    with watched_store(watch):
        job.save(run, 2)
    assert still_in(run, 2) == ["still-00001.safetensors"]
    assert "written whole" in caplog.text
    shutil.rmtree(before)
    assert_equal(loaded(run), job.bits())


def test_a_file_that_was_lost_is_written_again(run: str) -> None:
    job = Job()
    job.save(run, 1)
    (folder_of(run, 1) / "still-00001.safetensors").unlink()
    job.save(run, 2)
    assert still_in(run, 2) == ["still-00001.safetensors"]
    assert_equal(loaded(run), job.bits())


class OnceMoreRoom:
    """Finds room for each save that finds no space."""

    def made(self, error: StorageError, channel: Channel, deadline: Deadline) -> bool:
        return error.code == "storage.full"


def test_a_rank_that_finds_no_space_for_its_second_file_writes_both_again(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, tries = shares._written, []

    def full_once(
        target: StoredFile, sources: Sequence[Source], versions: Versions, meter: Meter, during: shares.During
    ) -> FileSeal:
        tries.append(target.layout.index)
        if len(tries) == 2:
            raise StorageError("no space", code="storage.full", action="Make some.")
        return written(target, sources, versions, meter, during)

    monkeypatch.setattr(shares, "_written", full_once)
    job = Job()
    save_to_storage(
        Location(run),
        job.state,
        1,
        numbers={},
        select=None,
        group=None,
        takeover=False,
        room=OnceMoreRoom(),
        timeout_s=60.0,
    )
    assert tries == [0, 1, 0, 1]
    assert torch.equal(holdfast.open(run)["model/base.weight"][...], job.model.base.weight)


# Removal.


def test_the_still_files_of_a_removed_checkpoint_stay_as_long_as_others_need_them(run: str) -> None:
    job = Job()
    for step in (1, 2, 3):
        job.save(run, step)
    holdfast.remove(f"{run}@step=1")
    assert sorted(path.name for path in folder_of(run, 1).iterdir()) == ["manifest.hfm", "still-00001.safetensors"]
    assert [row.step for row in holdfast.ls(run)] == [3, 2]
    assert_equal(loaded(run), job.bits())
    assert examine(opened(run)) == []
    await_ended_reads()
    assert job.save(run, 4).referenced_nbytes > 0  # through the head, to the folder that is removed otherwise
    for step in (2, 3):
        holdfast.remove(f"{run}@step={step}")
    assert sorted(folder.name[:15] for folder in folders(run)) == ["step-0000000001", "step-0000000004"]
    assert_equal(loaded(run), job.bits())
    assert still_in(run, 1) == ["still-00001.safetensors"]


def test_a_policy_deletes_a_still_file_once_nobody_needs_it(run: str) -> None:
    from holdfast.policy.keep import KeepLast
    from holdfast.run.retention import Retention

    job, retention = Job(), Retention(KeepLast(1))

    def prune() -> None:
        await_ended_reads()
        retention.apply(opened(run), retention.survey(opened(run)))

    for step in (1, 2, 3):
        job.save(run, step)
    prune()
    assert still_in(run, 1) == ["still-00001.safetensors"]
    with torch.no_grad():
        job.model.base.weight.add_(1)
    job.save(run, 4)
    prune()  # deletes step 3, the last one that needs the file of step 1
    assert [folder.name[:15] for folder in folders(run)] == ["step-0000000004"]
    assert not list(Path(run, "references").iterdir())
    assert_equal(loaded(run), job.bits())
    # Another process, which knows nothing of these rounds, finds nothing left.
    assert Retention(KeepLast(1)).remains(opened(run), retention.survey(opened(run))).kept == []
    assert examine(opened(run)) == []


def folders(run: str) -> list[Path]:
    return list(Path(run, "checkpoints").iterdir())


# Tools.


def commit_of(run: str, step: int) -> Commit:
    return opened(run).find(step=step)


def test_verification_reads_the_bytes_that_a_checkpoint_shares(run: str) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    checkpoint = Checkpoint(opened(run).locate(commit_of(run, 2)))
    assert verify_checkpoint(checkpoint, deep=True) == []
    with (folder_of(run, 1) / "still-00001.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"?")
    (fault,) = verify_checkpoint(checkpoint, deep=True)
    assert fault.code == "corrupt.file"
    assert folder_of(run, 1).name in fault.path


def test_a_folder_alone_finds_its_neighbour_or_says_which_one_it_needs(run: str, tmp_path: Path) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    view = holdfast.open(str(folder_of(run, 2)))
    assert torch.equal(view["model/base.weight"][...], job.model.base.weight)
    alone = tmp_path / "alone" / folder_of(run, 2).name
    shutil.copytree(folder_of(run, 2), alone)
    with pytest.raises(CorruptError, match=folder_of(run, 1).name) as caught:
        holdfast.open(str(alone))["model/base.weight"][...]
    assert caught.value.code == "corrupt.incomplete"
    assert "compact" in caught.value.action


def test_a_compacted_checkpoint_needs_no_other_one(run: str, tmp_path: Path) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    seal = (folder_of(run, 2) / "seal.json").read_bytes()
    assert holdfast.compact(run) == (folder_of(run, 1) / "still-00001.safetensors").stat().st_size
    assert holdfast.compact(run) == 0
    assert (folder_of(run, 2) / "seal.json").read_bytes() == seal
    assert verify_checkpoint(Checkpoint(opened(run).locate(commit_of(run, 2))), deep=True) == []
    assert job.save(run, 3).referenced_nbytes > 0
    holdfast.remove(f"{run}@step=1")
    assert len(folders(run)) == 2
    for step in (2, 3):
        assert loaded(f"{run}@step={step}")["base.weight"].equal(job.model.base.weight)
    alone = tmp_path / folder_of(run, 2).name
    shutil.copytree(folder_of(run, 2), alone)
    assert torch.equal(holdfast.open(str(alone))["model/base.weight"][...], job.model.base.weight)


def test_no_policy_deletes_a_checkpoint_that_is_being_compacted(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    for step in (1, 2, 3):
        job.save(run, step)
    want_leases(PosixStore(run))
    write, refused = write_copy, list[str]()

    def meanwhile(*args: Any, **options: Any) -> None:
        until(lambda: [lease.place for lease in Holds.of(PosixStore(run)).leases] == [Place(1, 2)])
        with pytest.raises(ConfigurationError) as caught:
            holdfast.remove(f"{run}@step=2")
        refused.append(caught.value.code)
        write(*args, **options)

    monkeypatch.setattr(compaction, "write_copy", meanwhile)
    assert holdfast.compact(f"{run}@step=2") > 0
    assert refused == ["config.in_use"]
    await_ended_reads()
    holdfast.remove(f"{run}@step=2")


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_checkpoint_that_is_deleted_while_it_is_compacted_leaves_nothing_and_says_so(
    run: str, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    job = Job()
    for step in (1, 2, 3):
        job.save(run, step)
    folder, write = folder_of(run, 2), write_copy

    def meanwhile(*args: Any, **options: Any) -> None:
        if is_copied:
            write(*args, **options)
        copies = {path: path.read_bytes() for path in folder.glob("still-*.safetensors")}
        holdfast.remove(f"{run}@step=2")
        if not is_copied:
            write(*args, **options)
        for path, data in copies.items():  # as in a bucket, where a deletion may have listed the names before
            folder.mkdir(exist_ok=True)
            path.write_bytes(data)

    monkeypatch.setattr(compaction, "write_copy", meanwhile)
    with pytest.raises(NotFoundError, match="was deleted while its files were copied") as caught:
        holdfast.compact(f"{run}@step=2")
    assert caught.value.code == "not_found.commit"
    assert not folder.exists() or not list(folder.iterdir())


def test_after_compact_a_checkpoint_counts_as_one_that_has_all_its_bytes(run: str) -> None:
    """`ls`, `prune` and `plan` went on to subtract what the save had left to earlier checkpoints."""
    job = Job()
    for step in (1, 2, 3):
        job.save(run, step)
    holdfast.compact(f"{run}@step=2")
    rows = {row.step: row for row in holdfast.ls(run)}
    assert [rows[step].referenced_nbytes > 0 for step in (1, 2, 3)] == [False, False, True]
    own = {step: sum(file.stat().st_size for file in folder_of(run, step).glob("*.safetensors")) for step in rows}
    assert {step: row.nbytes - row.referenced_nbytes for step, row in rows.items()} == own
    planned = {
        step: holdfast_command("plan", f"{run}@step={step}", "--on", "2", "--json").json["referenced_nbytes"] > 0
        for step in (2, 3)
    }
    assert planned == {2: False, 3: True}
    done = holdfast_command("prune", run, "--keep-last", "1", "--dry-run", "--json").json
    assert {row["step"]: row["nbytes"] for row in [*done["deleted"], *done["kept"]]} == own
    before = disk_usage(run)
    pruned = holdfast_command("prune", run, "--keep-last", "1", "--yes", "--json").json
    assert pruned["deleted_nbytes"] == done["deleted_nbytes"] == before - disk_usage(run)
    assert torch.equal(loaded(run)["base.weight"], job.model.base.weight)


def disk_usage(run: str) -> int:
    return sum(file.stat().st_size for file in Path(run).rglob("*.safetensors"))


def test_a_damaged_file_is_not_copied(run: str) -> None:
    job = Job()
    job.save(run, 1)
    job.save(run, 2)
    with (folder_of(run, 1) / "still-00001.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"?")
    with pytest.raises(CorruptError, match="does not match its digest"):
        holdfast.compact(run)
    assert still_in(run, 2) == ["still-00001.same.json"]


# Several ranks.


def sharded(seed: int) -> Job:
    job = Job(seed)
    fully_shard(job.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    job.optimizer = torch.optim.AdamW([each for each in job.model.parameters() if each.requires_grad])
    job.state["optimizer"] = job.optimizer
    return job


def save_twice(run: str) -> tuple[list[int], dict[str, torch.Tensor]]:
    start_new_job()
    job = sharded(0)
    referenced = [job.save(run, step).referenced_nbytes for step in (1, 2)]
    whole = {name: tensor.full_tensor() for name, tensor in job.model.state_dict().items()}
    return referenced, whole


def load_and_save(run: str, step: int = 3) -> tuple[dict[str, torch.Tensor], int]:
    start_new_job()
    job = sharded(3)
    job.train()
    holdfast.load(run, job.state)
    found = {}
    for name, tensor in job.model.state_dict().items():
        assert isinstance(tensor, DTensor)
        found[name] = tensor.full_tensor()
    return found, job.save(run, step).referenced_nbytes


def test_another_number_of_ranks_loads_the_same_bits_and_writes_all_again(run: str) -> None:
    saved = run_ranks(2, save_twice, run)
    assert all(first == 0 and second > 0 for (first, second), _ in saved)
    expected = saved[0][1]
    for found, referenced in run_ranks(3, load_and_save, run):
        assert_equal(found, expected)
        assert referenced == 0  # other pieces, so other files
    view = holdfast.open(f"{run}@step=2")
    assert torch.equal(view["model/base.weight"][...], expected["base.weight"])
    assert torch.equal(holdfast.open(run)["model/base.weight"][...], expected["base.weight"])
