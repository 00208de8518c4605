"""Runs in a bucket whose server or network fails: what was committed stays, and each failure says what to do."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import HoldfastError, StorageError
from tests.store.test_object_store import uploads_under_way
from tests.support.models import start_new_job
from tests.support.nursery import Process, start, until
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import Fault, on
from tests.support.servers.gcs_dialect import SIGNATURE
from tests.support.servers.s3 import Bucket

#: More than one part, so that data files are uploads of several requests.
NUM_ELEMENTS = 5 << 20
TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    start_new_job()


@pytest.fixture
def run(bucket: Bucket) -> str:
    """The run, without the proxy."""
    return f"{bucket.url}/runs/a"


@pytest.fixture
def far_run(bucket: Bucket, proxy: FaultProxy) -> str:
    """The same run, behind the proxy."""
    return f"{bucket.url}/runs/a?endpoint={proxy.endpoint}"


def state_of(step: int, num_elements: int = 1000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((num_elements,), float(step))}


def saved(run: str, step: int, *, num_elements: int = 1000, takeover: bool = False) -> None:
    holdfast.save(run, state_of(step, num_elements), step, takeover=takeover, timeout_s=TIMEOUT_S)


def head_of(run: str) -> int:
    """The step of the head, whose content belongs to it."""
    start_new_job()
    view = holdfast.open(run)
    assert set(view["w"].numpy().tolist()) == {float(view.step)}
    return view.step


def steps_of(run: str) -> list[int]:
    return sorted(checkpoint.step for checkpoint in holdfast.ls(run))


@pytest.mark.parametrize(
    "fault",
    [
        on("PUT", "*/history/*").once().loses_the_answer(),
        on("PUT", "*/history/*").once().answers(409),
        on("PUT", "*/history/*").once().breaks_the_connection(),
        on("PUT").after(2).times(3).answers(503),
        on("GET").times(3).answers(503),
        on("PUT", "*/epochs/*").once().loses_the_answer(),
        on("PUT", "*manifest*").once().loses_the_answer(),
        on("PUT", "*seal*").once().loses_the_answer(),
    ],
    ids=[
        "answer to a commit lost",
        "commit refused for a moment",
        "commit cut off",
        "burst of refused writes",
        "burst of refused reads",
        "answer to an epoch lost",
        "answer to a manifest lost",
        "answer to a seal lost",
    ],
)
@pytest.mark.few(4)
def test_a_save_survives_a_passing_failure_and_commits_once(
    run: str, far_run: str, proxy: FaultProxy, fault: Fault
) -> None:
    saved(far_run, 1)
    with proxy.faults(fault):
        saved(far_run, 2)
        assert proxy.count(fault.method, fault.target) > 0
    assert (head_of(run), steps_of(run)) == (2, [1, 2])


@pytest.mark.parametrize(
    ("target", "code"),
    [("*partNumber=2*", "XAmzContentSHA256Mismatch"), ("*uploadId=*", "InvalidPart"), ("*/history/*", "BadDigest")],
)
def test_bytes_that_change_on_their_way_are_sent_again_when_the_store_refuses_them(
    run: str, far_run: str, proxy: FaultProxy, target: str, code: str
) -> None:
    method = "POST" if code == "InvalidPart" else "PUT"
    with proxy.faults(on(method, target).once().answers(400, code=code)):
        saved(far_run, 1, num_elements=NUM_ELEMENTS)
        assert proxy.count(method, target) > 1
    assert (head_of(run), steps_of(run)) == (1, [1])


@pytest.mark.slow
def test_a_part_that_fails_for_ever_fails_the_save_and_the_head_stays(
    run: str, far_run: str, proxy: FaultProxy
) -> None:
    saved(far_run, 1)
    with proxy.faults(on("PUT", "*partNumber=2*").answers(500)), pytest.raises(StorageError) as caught:
        holdfast.save(far_run, state_of(2, NUM_ELEMENTS), 2, timeout_s=5)
    assert caught.value.retryable
    assert steps_of(run) == [1]
    saved(far_run, 3, num_elements=NUM_ELEMENTS)
    assert (head_of(run), steps_of(run)) == (3, [1, 3])


def save_large(environment: dict[str, str], run: str) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had the tests ignore it
    holdfast.save(run, state_of(1, NUM_ELEMENTS), 1, timeout_s=60)


@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGINT, 0), pytest.param(signal.SIGKILL, 1, marks=pytest.mark.slow)]
)
def test_an_interrupted_save_tells_the_server_to_forget_its_upload_and_a_killed_one_cannot(
    far_run: str, proxy: FaultProxy, bucket: Bucket, tmp_path: Path, number: int, left: int
) -> None:
    gate = threading.Event()
    with proxy.faults(on("PUT", "*partNumber=2*").once().waits_for(gate)):
        process = start(save_large, dict(bucket.environment), far_run, err=tmp_path / "err")
        until(lambda: proxy.count("PUT", "*partNumber=2*") == 1)
        assert uploads_under_way(bucket) == 1
        process.send(number)
        gate.set()
        assert process.wait() != 0
    assert uploads_under_way(bucket) == left
    assert holdfast.ls(far_run) == []


@pytest.mark.parametrize(
    ("code", "number"), [("AccessDenied", "storage.denied"), ("ExpiredToken", "storage.credentials")]
)
@pytest.mark.few(1)
def test_credentials_that_expire_in_the_middle_fail_the_save_at_once_and_the_head_stays(
    run: str, far_run: str, proxy: FaultProxy, code: str, number: str
) -> None:
    saved(far_run, 1)
    with proxy.faults(on("PUT").after(1).answers(403, code=code)), pytest.raises(HoldfastError) as caught:
        saved(far_run, 2)
    assert caught.value.code == number
    assert proxy.count("PUT", "*/history/*") == 1
    assert steps_of(run) == [1]
    saved(far_run, 3)
    assert (head_of(run), steps_of(run)) == (3, [1, 3])


def test_a_bucket_that_is_missing_is_named_before_anything_is_written(bucket: Bucket) -> None:
    with pytest.raises(HoldfastError, match="no-such-bucket"):
        saved("s3://no-such-bucket/runs/a", 1)


def test_without_permission_to_delete_checkpoints_stay_readable(run: str, far_run: str, proxy: FaultProxy) -> None:
    for step in (1, 2, 3):
        saved(far_run, step)
    with (
        proxy.faults(on("DELETE").answers(403), on("POST", "*delete*").answers(403)),
        pytest.raises(StorageError) as caught,
    ):
        holdfast.remove(f"{far_run}@step=1")
    assert caught.value.code == "storage.denied"
    assert head_of(run) == 3


def test_a_listing_that_lags_behind_leads_to_an_older_checkpoint_and_a_save_after_it_replaces_nothing(
    run: str, far_run: str, proxy: FaultProxy, bucket: Bucket
) -> None:
    saved(run, 1)
    stale = listing(bucket, "runs/a/history/")
    saved(run, 2)
    start_new_job()
    state = state_of(0)
    lagging = on("GET", "*list-type=2*history*").answers(200, body=stale)
    with proxy.faults(lagging):
        assert holdfast.load(far_run, state).step == 1
    assert set(state["w"].tolist()) == {1.0}
    state["w"].fill_(3)
    holdfast.save(far_run, state, 3, timeout_s=TIMEOUT_S)
    assert (head_of(run), steps_of(run)) == (3, [1, 2, 3])
    assert head_of(f"{run}@1.2") == 2


def test_a_job_with_listings_that_lag_behind_takes_no_epoch_of_another_job(
    run: str, far_run: str, proxy: FaultProxy, bucket: Bucket, tmp_path: Path
) -> None:
    saved(run, 1)
    stale = [
        on("GET", f"*list-type=2*{folder}*").answers(200, body=listing(bucket, f"runs/a/{folder}/"))
        for folder in ("epochs", "history")
    ]
    start_new_job()
    mine = state_of(0)
    holdfast.load(far_run, mine)
    rival = Rival(bucket, run, tmp_path / "rival", 2)
    rival.save(2)
    assert rival.outcome(2) == "saved", rival.process.err
    with proxy.faults(*stale), pytest.raises(HoldfastError) as caught:
        holdfast.save(far_run, mine, 5, timeout_s=5)
    assert caught.value.code == "fenced.lost_race"
    assert (head_of(run), steps_of(run)) == (2, [1, 2])


def listing(bucket: Bucket, prefix: str) -> bytes:
    """The answer of the server to a listing, as of now."""
    url = f"{bucket.endpoint}/{bucket.name}?list-type=2&delimiter=%2F&prefix={prefix}"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": SIGNATURE})) as answer:
        data: bytes = answer.read()
    return data


# Two incarnations of a job.


def incarnation(environment: dict[str, str], run: str, steps: list[int], folder: Path) -> None:
    """Load the head, and save `steps`, each when its file in `folder` is there. The outcomes are files, too."""
    os.environ.update(environment)
    state = state_of(0)
    holdfast.load(run, state)
    for step in steps:
        until(lambda step=step: (folder / f"go-{step}").exists())  # type: ignore[misc]
        state["w"].fill_(step)
        try:
            holdfast.save(run, state, step, timeout_s=5)
            outcome = "saved"
        except HoldfastError as error:
            outcome = error.code
        (folder / f"{step}.new").write_text(outcome)
        (folder / f"{step}.new").rename(folder / f"{step}")


class Rival:
    """Another incarnation of the job, in a process of its own, behind the proxy."""

    def __init__(self, bucket: Bucket, run: str, folder: Path, *steps: int) -> None:
        folder.mkdir()
        self._folder = folder
        arguments = (dict(bucket.environment), run, list(steps), folder)
        self.process: Process = start(incarnation, *arguments, err=folder / "err")

    def save(self, step: int) -> None:
        """Have it save, and return at once."""
        (self._folder / f"go-{step}").touch()

    def outcome(self, step: int) -> str:
        """Wait for a save, and return "saved" or the code of its error."""
        until(lambda: (self._folder / f"{step}").exists() or not self.process.is_running, timeout_s=60)
        return (self._folder / f"{step}").read_text()


def test_a_commit_that_was_under_way_when_another_incarnation_took_over_never_becomes_the_head(
    run: str, far_run: str, proxy: FaultProxy, bucket: Bucket, tmp_path: Path
) -> None:
    saved(run, 1)
    old = Rival(bucket, far_run, tmp_path / "old", 2, 4)
    gate = threading.Event()
    with proxy.faults(on("PUT", "*/history/*").once().waits_for(gate)):
        old.save(2)
        until(lambda: proxy.count("PUT", "*/history/*") == 1)
        start_new_job()
        mine = state_of(0)
        assert holdfast.load(run, mine).step == 1
        mine["w"].fill_(3)
        holdfast.save(run, mine, 3, timeout_s=TIMEOUT_S)
        gate.set()
        old.outcome(2)
    old.save(4)
    assert old.outcome(4).startswith("fenced.")
    assert (head_of(run), 4 in steps_of(run)) == (3, False)


def test_an_incarnation_that_returns_after_a_partition_is_fenced(
    run: str, far_run: str, proxy: FaultProxy, bucket: Bucket, tmp_path: Path
) -> None:
    saved(run, 1)
    old = Rival(bucket, far_run, tmp_path / "old", 2, 3, 5)
    old.save(2)
    assert old.outcome(2) == "saved", old.process.err
    with proxy.faults(on().breaks_the_connection()):
        old.save(3)
        assert old.outcome(3).startswith("storage.")
        start_new_job()
        mine = state_of(0)
        assert holdfast.load(run, mine).step == 2
        mine["w"].fill_(4)
        holdfast.save(run, mine, 4, timeout_s=TIMEOUT_S)
    old.save(5)
    assert old.outcome(5).startswith("fenced.")
    assert (head_of(run), steps_of(run)) == (4, [1, 2, 4])
