"""Whole jobs on a run in an object store: saved, killed, resharded, looked after by the command line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.format.records import Place
from holdfast.run.committed_places import FIRST_NAMES
from holdfast.run.history import Run
from holdfast.store.base import Bytes
from holdfast.store.object_writer import StreamedObjectWriter
from holdfast.store.urls import location_of, open_store
from holdfast.testing.memory_store import MemoryStore
from tests.jobs.test_resharding import load, save
from tests.project.test_guides import example, run_as_started
from tests.run.test_history import new_run, open_epoch
from tests.run.test_history import save as save_record
from tests.support.command_line import holdfast_command
from tests.support.models import filled, start_new_job
from tests.support.nursery import until
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.s3 import Bucket

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


@pytest.fixture
def run(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    return f"{bucket.url}/runs/a?endpoint={bucket.endpoint}&allow_http=true&unsigned_payload=true"


def in_environment(environment: dict[str, str], function: Callable[[*Ts], R], *arguments: *Ts) -> R:
    os.environ.update(environment)
    return function(*arguments)


@pytest.fixture
def secrets(bucket: Bucket) -> dict[str, str]:
    return {name: value for name, value in bucket.environment.items() if "KEY" in name}


def save_in_background_and_die(run: str, node_dir: Path, seed: int) -> None:
    start_new_job()
    job = filled("fsdp", seed)
    own = Checkpointer(run, job.state, memory=Memory(node_dir=node_dir))
    own.restore()
    own.save(30).staged.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_two_ranks_saved_three_load(run: str, secrets: dict[str, str]) -> None:
    run_ranks(2, in_environment, secrets, save, "fsdp", run, 5, 30)
    for differing_names, unloaded, held, needed in run_ranks(3, in_environment, secrets, load, "fsdp", run, 5, 1):
        assert (differing_names, unloaded) == ([], set())
        assert needed == held


def test_the_keeper_uploads_what_killed_ranks_had_in_memory(run: str, secrets: dict[str, str], node_dir: Path) -> None:
    with pytest.raises(RanksFailedError) as killed:
        run_ranks(2, in_environment, secrets, save_in_background_and_die, run, node_dir, 6)
    assert all(isinstance(error, RankDiedError) for error in killed.value.exceptions)
    until(lambda: any(each.step == 30 for each in committed(run)), timeout_s=60)
    for differing_names, unloaded, _, _ in run_ranks(3, in_environment, secrets, load, "fsdp", run, 6, 1):
        assert (differing_names, unloaded) == ([], set())


def committed(run: str) -> list[holdfast.ListedCheckpoint]:
    try:
        return list(holdfast.ls(run))
    except holdfast.NotFoundError:
        return []


def test_a_tensor_that_is_changed_and_changed_back_while_it_is_uploaded_is_an_error(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_new_job()
    weight = torch.arange(5 << 20)
    write_at = StreamedObjectWriter.write_at

    def change_after(writer: StreamedObjectWriter, offset: int, *data: Bytes) -> None:
        write_at(writer, offset, *data)
        weight.add_(1).sub_(1)

    monkeypatch.setattr(StreamedObjectWriter, "write_at", change_after)
    with pytest.raises(holdfast.StateError) as caught:
        holdfast.save(run, {"w": weight}, 1)
    assert caught.value.code == "state.changed"
    assert committed(run) == []


def test_a_rank_that_reads_alone_takes_large_requests_and_verifies_all_that_they_bring(
    run: str, bucket: Bucket, proxy: FaultProxy
) -> None:
    start_new_job()
    weight = torch.arange(5 << 20)
    holdfast.save(run, {"w": weight}, 1)
    url = f"{bucket.url}/runs/a?endpoint={proxy.endpoint}&allow_http=true"
    found = {"w": torch.zeros_like(weight)}
    holdfast.load(url, into=found)
    assert torch.equal(found["w"], weight)
    # One for the digests, one for the values, and three of at most 16 MiB.
    assert proxy.count("GET", "*.safetensors*") == 5
    # A plan counted requests of 2 MiB, whatever the store.
    planned = {
        on: holdfast_command("plan", run, "--on", str(on), "--nodes", str(nodes), "--json").json["files"]
        for on, nodes in ((1, 1), (2, 2), (4, 2))
    }
    assert [sum(file["num_requests"] for file in files) for files in planned.values()] == [3, 4, 4]
    store = open_store(location_of(run))
    (folder,) = store.list("checkpoints")
    (name,) = (name for name in store.list(f"checkpoints/{folder}") if name.endswith(".safetensors"))
    key = f"checkpoints/{folder}/{name}"
    data = bytearray(store.read(key))
    data[-(3 << 20)] ^= 1
    store.delete(key)
    writer = store.writer(key, nbytes=len(data))
    writer.write_at(0, np.frombuffer(data, np.uint8))
    writer.publish(len(data))
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.load(run, into=found)
    assert caught.value.code == "corrupt.file"
    assert "it holds w" in caught.value.message


def load_replicas(url: str) -> bool:
    """Load on all ranks what each of them holds whole."""
    start_new_job()
    found = {"w": torch.zeros(5 << 20, dtype=torch.int64)}
    holdfast.load(url, into=found)
    return torch.equal(found["w"], torch.arange(5 << 20))


def test_ranks_that_read_for_each_other_take_requests_of_several_buffers(
    run: str, bucket: Bucket, secrets: dict[str, str], proxy: FaultProxy
) -> None:
    start_new_job()
    holdfast.save(run, {"w": torch.arange(5 << 20)}, 1)
    url = f"{bucket.url}/runs/a?endpoint={proxy.endpoint}&allow_http=true"
    assert run_ranks(2, in_environment, secrets, load_replicas, url) == [True, True]
    # On each rank one for the digests, one for the values, and at most five of the ten of 4 MiB: as many as make two
    # ranks read the same, in requests as large as that allows. They were twenty of 2 MiB.
    assert proxy.count("GET", "*.safetensors*") <= 2 * (1 + 1 + 5)


def test_the_commands_work_on_it(run: str, bucket: Bucket) -> None:
    start_new_job()
    state = {"w": torch.arange(1000)}
    for step in (1, 2, 3):
        holdfast.save(run, state, step)
    for command in (("ls", run), ("verify", run), ("doctor", run), ("prune", run, "--keep-last", "1", "--yes")):
        done = holdfast_command(*command)
        assert done.status in (None, 0), done
        assert ("AbortIncompleteMultipartUpload" in done.out) == (command[0] == "doctor")
    assert [each.step for each in holdfast.ls(run)] == [3]
    assert holdfast.open(f"{run}@step=3")["w"].numpy().tolist() == list(range(1000))


def test_an_export_and_its_import_are_the_same_state_and_what_needs_any_order_is_refused(run: str) -> None:
    start_new_job()
    state = {"w": torch.arange(1 << 20), "b": torch.randn(7)}
    holdfast.save(run, state, 1)
    exported, imported, refused = (run.replace("/runs/a", f"/{name}") for name in ("hf", "again", "dcp"))
    holdfast.export(run, exported, "hf")
    holdfast.import_checkpoint(exported, imported, 1)
    view = holdfast.open(imported)
    assert all(torch.equal(view[name][...], tensor) for name, tensor in state.items())
    with pytest.raises(holdfast.ConfigurationError, match="in order"):
        holdfast.export(run, refused, "dcp")
    assert open_store(location_of(refused)).list("") == []


def test_the_head_takes_a_number_of_requests_that_does_not_depend_on_the_history(
    run: str, bucket: Bucket, proxy: FaultProxy
) -> None:
    numbers = []
    for num_commits in (3, 2 * FIRST_NAMES):
        url = f"{bucket.url}/{num_commits}?endpoint={proxy.endpoint}&allow_http=true"
        stored = open_store(location_of(url))
        history = MemoryStore()
        begun = new_run(history)
        open_epoch(begun)
        for number in range(1, num_commits + 1):
            save_record(begun, Place(1, number), step=number)
        records = [(key, data) for key, data in history.objects.items() if not key.startswith("checkpoints/")]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda record: stored.create(*record), records))  # noqa: B023 - it is called at once
        before = len(proxy.requests)
        head = Run.open(stored).head()
        assert head is not None
        assert head.step == num_commits
        numbers.append(len(proxy.requests) - before)
    assert numbers[0] == numbers[1] <= 6


@pytest.mark.slow
def test_the_example_of_the_guide_goes_on_as_it_says(
    run: str, secrets: dict[str, str], node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    script, calls = example(Path(__file__).parents[2] / "docs/guides/object_storage.md")
    policy = "save=holdfast.EverySteps(10)"
    assert policy in script
    memory = f"memory=holdfast.Memory(node_dir={str(node_dir)!r})"  # its keepers end with the test
    (tmp_path / "train.py").write_text(script.replace(policy, f"{policy}, {memory}"))
    for call in calls:
        assert run_as_started(tmp_path, call._replace(arguments=[run, *call.arguments[1:]])) == call.output


def test_still_files_are_referred_to_kept_and_compacted(run: str) -> None:
    start_new_job()
    table, weights = torch.arange(1 << 18), torch.zeros(3)
    for step in (1, 2, 3):
        report = holdfast.save(run, {"table": holdfast.Still(table), "w": weights.fill_(step)}, step)
        assert (report.referenced_nbytes > table.nbytes) == (step > 1)
    holdfast.remove(f"{run}@step=1")
    folder = next(each.folder for each in holdfast.ls(run) if each.step == 2)
    names = open_store(location_of(run)).list(f"checkpoints/{folder}")
    assert [name for name in names if name.startswith("still-")] == ["still-00001.same.json"]
    alone = holdfast.open(f"{run.partition('?')[0]}/checkpoints/{folder}?{run.partition('?')[2]}")
    assert torch.equal(alone["table"][...], table)
    assert holdfast.compact(f"{run}@step=2") > table.nbytes
    for step in (2, 3):
        view = holdfast.open(f"{run}@step={step}")
        assert torch.equal(view["table"][...], table)
        assert view["w"][...].tolist() == [step] * 3
