"""Object stores: the conformance tests on an S3 server, and what only they promise."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, NotFoundError, StorageError
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.store import object_client
from holdfast.store.base import Bytes, Location, Store, StreamingReader
from holdfast.store.object_writer import UploadAbortedError
from holdfast.store.objects import ObjectStore
from holdfast.store.retry_budget import RetryBudget
from holdfast.store.timed import TimedStore
from holdfast.store.urls import location_of, open_store, text_of
from holdfast.testing import StoreConformance
from tests.store.test_fault_proxy import SIGNED
from tests.store.test_posix_storage import random_bytes
from tests.support.nursery import until
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import Fault, on
from tests.support.servers.s3 import Bucket

#: The smallest part that S3 takes.
PART = 5 << 20


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(bucket: Bucket) -> ObjectStore:
    return ObjectStore(location_of(f"{bucket.url}/run"), part_nbytes=PART)


@pytest.fixture
def broken(bucket: Bucket, proxy: FaultProxy) -> ObjectStore:
    """The same store, behind the proxy."""
    return ObjectStore(location_of(f"{bucket.url}/run?endpoint={proxy.endpoint}"), part_nbytes=PART)


class TestObjectStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _url(self, bucket: Bucket) -> None:
        self.url = f"{bucket.url}/runs/a run"

    def make_store(self, tmp_path: Path) -> Store:
        return open_store(location_of(self.url))


class TestObjectStoreInParts(TestObjectStore):
    def make_store(self, tmp_path: Path) -> Store:
        return ObjectStore(location_of(self.url), part_nbytes=PART)


# Messages about runs in a bucket.


def test_a_slip_in_the_url_of_a_run_is_guessed(bucket: Bucket) -> None:
    Run.create(open_store(location_of(f"{bucket.url}/slips/gpt")))
    with pytest.raises(NotFoundError, match=r"Did you mean 'gpt', beside it\?"):
        open_run(f"{bucket.url}/slips/gtp")


def test_the_url_of_a_checkpoint_in_place_of_a_run_names_the_url_of_the_run(bucket: Bucket) -> None:
    folder = open_store(location_of(f"{bucket.url}/run/checkpoints/step-1"))
    assert folder.create("seal.json", b"{}")
    with pytest.raises(ConfigurationError, match="is one checkpoint, but a whole run") as caught:
        open_run(f"{bucket.url}/run/checkpoints/step-1")
    assert caught.value.action == f"Name {bucket.url}/run."


# Creation: one of several wins, and a lost answer is no lost race.


def test_a_creation_whose_answer_was_lost_was_made_by_its_caller(broken: ObjectStore, proxy: FaultProxy) -> None:
    with proxy.faults(on("PUT").once().loses_the_answer()):
        assert broken.create("record", b"mine")
    assert not broken.create("record", b"mine"), "a second one has found it"


def test_a_creation_whose_answer_was_lost_after_another_has_won_was_not_made(
    broken: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    store.create("record", b"theirs")
    with proxy.faults(on("PUT").once().loses_the_answer()):
        assert not broken.create("record", b"mine")


@pytest.mark.parametrize("status", [409, 503])
def test_a_creation_that_the_server_refused_for_a_moment_is_made_again(
    broken: ObjectStore, proxy: FaultProxy, status: int
) -> None:
    with proxy.faults(on("PUT").times(2).answers(status)):
        assert broken.create("record", b"mine")
    assert broken.read("record") == b"mine"


def test_a_small_file_whose_answer_was_lost_is_published(broken: ObjectStore, proxy: FaultProxy) -> None:
    writer = broken.writer("file", nbytes=3)
    writer.write_at(0, random_bytes(3))
    with proxy.faults(on("PUT").once().loses_the_answer()):
        writer.publish(3)
    assert broken.nbytes("file") == 3


# Reads of which several are answered by one request.


def test_reads_that_were_expected_are_answered_by_one_request(
    broken: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    content = random_bytes((3 << 20) + 5)
    store.create("file", content.tobytes())
    reader = broken.reader("file")
    assert isinstance(reader, StreamingReader)
    begun = proxy.count("GET", "*file*")
    reader.expect(1000, len(content))
    for start, stop in pairwise((1000, 1001, 1 << 20, len(content) - 1, len(content))):
        out = np.zeros(stop - start, np.uint8)
        reader.read_at(start, out)
        assert np.array_equal(out, content[start:stop])
    assert proxy.count("GET", "*file*") == begun + 1


def test_reads_elsewhere_and_of_other_threads_have_requests_of_their_own(
    broken: ObjectStore, store: ObjectStore, proxy: FaultProxy
) -> None:
    content = random_bytes(2 << 20)
    store.create("file", content.tobytes())
    reader = broken.reader("file")
    assert isinstance(reader, StreamingReader)
    begun = proxy.count("GET", "*file*")
    reader.expect(0, 1 << 20)
    out = np.zeros(100, np.uint8)
    reader.read_at(500, out)
    assert np.array_equal(out, content[500:600])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(reader.read_at, 0, out).result()
    assert np.array_equal(out, content[:100])
    assert proxy.count("GET", "*file*") == begun + 3
    with pytest.raises(CorruptError) as caught:
        reader.read_at(len(content) - 1, out)
    assert caught.value.code == "corrupt.short"


# Uploads in parts.


def test_memory_may_change_as_soon_as_it_was_written(store: ObjectStore) -> None:
    content = random_bytes(3 * PART + 1000)
    memory = content.copy()
    writer = store.writer("file", nbytes=len(content))
    for start, stop in ((0, 1000), (1000, 2 * PART + 5), (2 * PART + 5, len(content))):
        writer.write_at(start, memory[start:stop])
        memory[start:stop] = 0
    writer.publish(len(content))
    assert store.read("file") == content.tobytes()


def test_an_upload_goes_on_after_a_part_was_cut_off(broken: ObjectStore, proxy: FaultProxy) -> None:
    content = random_bytes(2 * PART + 7)
    writer = broken.writer("file", nbytes=len(content))
    with proxy.faults(on("PUT", "*partNumber=2*").once().cuts_the_request(after=1 << 20)):
        writer.write_at(0, content)
        writer.publish(len(content))
    assert broken.read("file") == content.tobytes()
    assert proxy.count("PUT", "*partNumber=1&*") == 1, "the other part was sent once"


def test_an_upload_whose_last_answer_was_lost_is_published(broken: ObjectStore, proxy: FaultProxy) -> None:
    content = random_bytes(PART + 7)
    writer = broken.writer("file", nbytes=len(content))
    writer.write_at(0, content)
    with proxy.faults(
        on("POST", "*uploadId=*").once().loses_the_answer(), on("POST", "*uploadId=*").after(1).answers(404)
    ):
        writer.publish(len(content))
    assert broken.read("file") == content.tobytes()


def test_an_abort_wakes_writes_that_wait_for_others_and_leaves_nothing(store: ObjectStore, bucket: Bucket) -> None:
    writer = store.writer("file", nbytes=4 * PART)
    writer.write_at(0, random_bytes(PART))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.write_at, 2 * PART, random_bytes(PART))
        time.sleep(0.1)
        assert not waiting.done()
        writer.abort()
        with pytest.raises(UploadAbortedError):
            waiting.result()
    assert store.list("") == []
    assert uploads_under_way(bucket) == 0


def test_a_part_that_fails_for_good_fails_the_write_and_leaves_nothing(
    broken: ObjectStore, proxy: FaultProxy, bucket: Bucket
) -> None:
    writer = broken.writer("file", nbytes=3 * PART)

    def write() -> None:
        writer.write_at(0, random_bytes(3 * PART))
        writer.publish(3 * PART)

    with proxy.faults(on("PUT").answers(403)), pytest.raises(StorageError) as caught:
        write()
    writer.abort()
    assert (caught.value.code, caught.value.path) == ("storage.denied", broken.path("file"))
    assert uploads_under_way(bucket) == 0


def test_a_process_that_ends_in_the_middle_of_an_upload_ends_as_it_wants(bucket: Bucket) -> None:
    program = (
        "import sys, numpy\n"
        "from holdfast.store.urls import location_of\n"
        "from holdfast.store.objects import ObjectStore\n"
        f"writer = ObjectStore(location_of('{bucket.url}/run'), part_nbytes={PART}).writer('file', nbytes={4 * PART})\n"
        f"writer.write_at(0, numpy.zeros({PART}, numpy.uint8))\n"
        "sys.exit(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert uploads_under_way(bucket) == 0


def uploads_under_way(bucket: Bucket) -> int:
    answer = urlopen(Request(f"{bucket.endpoint}/{bucket.name}?uploads", headers=SIGNED), timeout=20).read()
    return int(answer.count(b"<UploadId>"))


# Reads.


def test_an_object_that_is_replaced_while_it_is_read_is_corruption(store: ObjectStore) -> None:
    store.create("file", b"first")
    reader = store.reader("file")
    out = np.zeros(5, np.uint8)
    reader.read_at(0, out)
    store.delete("file")
    store.create("file", b"other")
    with pytest.raises(CorruptError) as caught:
        reader.read_at(0, out)
    assert (caught.value.code, caught.value.path) == ("corrupt.changed", store.path("file"))


def test_an_answer_that_is_cut_off_is_read_again(broken: ObjectStore, proxy: FaultProxy) -> None:
    content = random_bytes(1 << 20)
    broken.create("file", content.tobytes())
    out = np.zeros(len(content), np.uint8)
    with proxy.faults(on("GET").once().cuts_the_answer(after=300_000)):
        broken.reader("file").read_at(0, out)
    assert np.array_equal(out, content)


def test_the_first_names_of_a_folder_take_one_request(broken: ObjectStore, proxy: FaultProxy) -> None:
    for name in ("c", "a", "b"):
        broken.create(f"folder/{name}", b"")
    before = len(proxy.requests)
    assert broken.list("folder", limit=2) == ["a", "b"]
    assert len(proxy.requests) == before + 1
    broken.create("folder/a-0/deep", b"")  # its key sorts before those of a folder "a"
    broken.create("folder/d/deep", b"")
    assert broken.list("folder", limit=2) == ["a", "a-0"]
    assert broken.list("folder", limit=9) == ["a", "a-0", "b", "c", "d"]


# Forks.


@pytest.mark.parametrize("ask", ["list", "open"])
def test_a_forked_child_is_told_and_does_not_hang(store: ObjectStore, ask: str) -> None:
    store.create("record", b"x")
    number = os.fork()
    if number == 0:
        signal.alarm(20)
        try:
            store.list("") if ask == "list" else open_store(store.location)
        except ConfigurationError as error:
            os._exit(7 if error.code == "config.forked" else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 7


def test_a_child_that_was_forked_in_the_middle_of_an_upload_ends_in_order(bucket: Bucket) -> None:
    program = (
        "import gc, os, signal, sys, numpy\n"
        "from holdfast.store.urls import location_of\n"
        "from holdfast.store.objects import ObjectStore\n"
        f"store = ObjectStore(location_of('{bucket.url}/run'), part_nbytes={PART})\n"
        f"writer = store.writer('file', nbytes={4 * PART})\n"
        f"writer.write_at(0, numpy.zeros({PART}, numpy.uint8))\n"
        "number = os.fork()\n"
        "if number == 0:\n"
        "    signal.alarm(20)\n"
        "    del store, writer\n"
        "    gc.collect()\n"
        "    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))\n"
        "writer.abort()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("5\n", "", 0)


# URLs, options and errors.


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket/runs/a/", Location("s3://bucket/runs/a")),
        ("s3a://bucket//runs/a", Location("s3://bucket/runs/a")),
        ("S3://bucket", Location("s3://bucket")),
        ("gs://bucket/a", Location("gs://bucket/a")),
        ("azure://box/a", Location("az://box/a")),
        ("abfss://box@me.dfs.core.windows.net/a", Location("az://box/a", (("account_name", "me"),))),
        (
            "s3://b/a?region=eu-1&endpoint=https://x:9000",
            Location("s3://b/a", (("endpoint", "https://x:9000"), ("region", "eu-1"))),
        ),
    ],
)
def test_a_url_is_a_place_and_its_options(url: str, location: Location) -> None:
    assert location_of(url) == location
    assert location_of(text_of(location)) == location


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("s3://bucket/run?secret_access_key=s3cr3t", "config.store_option", "AWS_SECRET_ACCESS_KEY"),
        ("s3://key:s3cr3t@bucket/run", "config.store_option", "AWS_SECRET_ACCESS_KEY"),
        ("s3://key:s3/s3cr3t@bucket/run", "config.store_option", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/run?endpoint=http://me:s3cr3t@x", "config.store_option", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/run?endpoint=me:s3cr3t@x:9000", "config.store_option", "AWS_SECRET_ACCESS_KEY"),
        ("az://box/run?sas_token=x", "config.store_option", "AZURE_STORAGE_SAS_TOKEN"),
        ("s3://bucket/run?regoin=eu", "config.store_option", "region"),
        ("s3://", "config.path", "bucket"),
        ("s3://bu cket/run", "config.path", "bucket"),
        ("s3://bucket/a/../b", "config.path", "bucket"),
    ],
)
def test_a_url_with_a_secret_or_a_slip_is_refused(url: str, code: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        location_of(url)
    assert caught.value.code == code
    assert said in caught.value.action
    assert "s3cr3t" not in str(caught.value)


def test_a_server_without_encryption_is_used_only_if_that_is_allowed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(ConfigurationError, match="AWS_ALLOW_HTTP=true") as caught:
        open_store(location_of(f"{bucket.url}/run"))
    assert caught.value.code == "config.endpoint"
    assert open_store(location_of(f"{bucket.url}/run?allow_http=true")).list("") == []


@pytest.mark.parametrize("endpoint", ["", "nonsense", "x:9000", "ftp://x", "https://", "https://x y", "https://me@x"])
def test_an_endpoint_that_is_no_address_is_refused_before_obstore_panics_at_it(bucket: Bucket, endpoint: str) -> None:
    place = Location(f"{bucket.url}/run", (("endpoint", endpoint),))
    with pytest.raises(ConfigurationError, match="no address of a server") as caught:
        open_store(place)
    assert caught.value.code == "config.endpoint"


def test_a_bucket_that_is_not_there_is_named(bucket: Bucket) -> None:
    store = open_store(location_of("s3://no-such-bucket/run"))
    for ask in (lambda: store.read("a"), lambda: store.list(""), lambda: store.create("a", b"")):
        with pytest.raises(ConfigurationError, match="s3://no-such-bucket/run") as caught:
            ask()
        assert caught.value.code == "config.bucket"


ERRORS: list[tuple[Fault, str, bool]] = [
    (on().answers(403), "storage.denied", False),
    (on().answers(403, code="InvalidAccessKeyId"), "config.credentials", False),
    (on().answers(403, code="SignatureDoesNotMatch"), "config.credentials", False),
    (on().answers(400, code="ExpiredToken"), "storage.credentials", False),
    (on().answers(301, code="PermanentRedirect"), "config.region", False),
]


@pytest.mark.parametrize(("fault", "code", "retryable"), ERRORS)
def test_an_error_of_the_server_says_what_to_do(
    broken: ObjectStore, proxy: FaultProxy, fault: Fault, code: str, retryable: bool
) -> None:
    attempts: tuple[Callable[[], object], ...] = (
        lambda: broken.read("a"),
        lambda: broken.list(""),
        lambda: broken.create("a", b""),
    )
    with proxy.faults(fault):
        for attempt in attempts:
            before = len(proxy.requests)
            with pytest.raises(HoldfastError) as caught:
                attempt()
            assert (caught.value.code, caught.value.retryable) == (code, retryable), caught.value
            assert broken.location.url in str(caught.value)
            assert len(proxy.requests) == before + 1, "it is not repeated"


def test_a_burst_of_refusals_is_survived(broken: ObjectStore, proxy: FaultProxy) -> None:
    broken.create("a", b"x")
    with proxy.faults(on().times(3).answers(503)):
        assert broken.read("a") == b"x"


def test_throttling_for_longer_than_a_few_tries_slows_a_request_and_does_not_fail_it(
    broken: ObjectStore, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken.create("a", b"x")
    monkeypatch.setattr(object_client, "_BUDGET", RetryBudget(total_s=60, longest_s=0.05))
    with proxy.faults(on().times(30).answers(503)):
        assert broken.read("a") == b"x"


def test_a_request_that_fails_for_ever_ends_before_the_time_of_its_caller_with_the_answer_of_the_server(
    broken: ObjectStore, proxy: FaultProxy
) -> None:
    broken.create("a", b"x")
    attempts: tuple[Callable[[Store], object], ...] = (
        lambda store: store.read("a"),
        lambda store: store.list(""),
        lambda store: store.create("b", b""),
    )
    for attempt in attempts:
        with (
            TimedStore(broken, timeout_s=1.5) as store,
            proxy.faults(on().answers(503)),
            pytest.raises(StorageError) as caught,
        ):
            attempt(store)
        assert (caught.value.code, caught.value.retryable) == ("storage.throttled", True)


@pytest.mark.parametrize("by", [1, 300_000, -1000])
def test_an_answer_that_ends_too_early_as_if_it_were_whole_is_no_damage_of_the_object(
    broken: ObjectStore, proxy: FaultProxy, by: int
) -> None:
    content = np.random.default_rng(0).integers(0, 256, 500_000, np.uint8)
    assert broken.create("a", content.tobytes())
    reader, out = broken.reader("a"), np.zeros(400_000, np.uint8)
    cut = on("GET").once().shortens_the_answer(by=by)
    with proxy.faults(cut):
        assert broken.read("a") == content.tobytes()
    with proxy.faults(cut):
        assert broken.read("a", start=100_000) == content[100_000:].tobytes()
    with proxy.faults(cut):
        assert broken.read("a", start=5, nbytes=400_000) == content[5:400_005].tobytes()
    with proxy.faults(cut):
        reader.read_at(100_000, out)
    assert np.array_equal(out, content[100_000:])
    with proxy.faults(on("PUT").once().loses_the_answer(), cut):
        assert broken.create("b", content.tobytes())


@pytest.mark.parametrize(
    ("status", "headers"), [(200, []), (206, ["Content-Range: bytes 0--1/0"]), (206, ["Content-Range: bytes */0"])]
)
def test_an_empty_object_is_read_whatever_its_server_makes_of_a_range(
    broken: ObjectStore, proxy: FaultProxy, status: int, headers: list[str]
) -> None:
    assert broken.create("empty", b"")
    assert broken.create("full", b"full")
    answers = on("GET").answers(status, *headers, body=b"")
    with proxy.faults(answers):
        assert (broken.read("empty"), broken.read("empty", limit=9), broken.read("empty", start=3)) == (b"", b"", b"")
        for key, nbytes, code in (("empty", 3, "corrupt.short"), ("full", None, "storage.failed")):
            with pytest.raises(HoldfastError) as caught:
                broken.read(key, nbytes=nbytes)
            assert caught.value.code == code, caught.value
    with proxy.faults(on("PUT").once().loses_the_answer(), answers):
        assert broken.create("another", b"")


def test_a_small_file_that_a_proxy_sends_twice_is_published(broken: ObjectStore) -> None:
    content = np.arange(100, dtype=np.uint8)
    first, second = broken.writer("file", nbytes=100), broken.writer("file", nbytes=100)
    for writer in (first, second):
        writer.write_at(0, content)
        writer.publish(100)
    other = broken.writer("file", nbytes=100)
    with pytest.raises(StorageError) as caught:
        other.publish(100)
    assert caught.value.code == "storage.exists"


def uploading() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-upload"]


def write_within(store: ObjectStore, timeout_s: float, content: Bytes) -> None:
    """Write `content` as a save does."""
    with TimedStore(store, timeout_s=timeout_s) as timed:

        def write() -> None:
            writer = timed.limit.direct_writer(timed, "file", nbytes=len(content))
            try:
                writer.write_at(0, content)
                writer.publish(len(content))
            except BaseException:
                writer.abort()
                raise

        timed.limit.run("write", "file", lambda: timed.limit.repeated(write))


def test_an_upload_whose_part_hangs_ends_with_the_time_of_its_caller_and_releases_the_memory(
    broken: ObjectStore, proxy: FaultProxy
) -> None:
    content = random_bytes(3 * PART)
    memory = weakref.ref(content)
    gate = threading.Event()
    with proxy.faults(on("PUT", "*partNumber=2*").waits_for(gate)), pytest.raises(StorageError) as caught:
        write_within(broken, 2.0, content)
    assert caught.value.code == "storage.timeout"
    del content, caught
    until(lambda: not uploading(), timeout_s=20)
    until(lambda: gc.collect() >= 0 and memory() is None, timeout_s=20)
    gate.set()


@pytest.mark.parametrize(
    "fault",
    [
        on("PUT", "*partNumber=2*").once().answers(409),
        on("POST", "*uploadId=*").once().answers(409),
        on("POST", "*uploads*").once().answers(200, body=b"<html>no XML of S3</html>"),
    ],
    ids=["a part", "the end", "a beginning that makes no sense"],
)
def test_an_upload_that_the_server_refuses_for_a_moment_begins_anew(
    broken: ObjectStore, store: ObjectStore, proxy: FaultProxy, fault: Fault
) -> None:
    content = random_bytes(2 * PART + 7)
    with proxy.faults(fault):
        write_within(broken, 60.0, content)
    assert store.read("file") == content.tobytes()


@pytest.mark.slow
def test_a_server_that_is_down_is_reported_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(location_of("s3://bucket/run?endpoint=http://127.0.0.1:9"))
    start_s = time.monotonic()
    with pytest.raises(StorageError, match="AWS_ENDPOINT_URL") as caught:
        store.list("")
    assert (caught.value.code, caught.value.retryable) == ("storage.unreachable", True)
    assert time.monotonic() - start_s < 30


def test_the_command_line_on_a_folder_does_not_import_obstore(tmp_path: Path) -> None:
    program = (
        "import sys, holdfast.cli, holdfast.run.paths as p; p.parse('s3://b/a'); sys.exit('obstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_threads_of_one_process_share_one_client(bucket: Bucket) -> None:
    stores = [open_store(location_of(f"{bucket.url}/{name}")) for name in "ab"]
    assert len({id(store._client) for store in stores if isinstance(store, ObjectStore)}) == 1
    assert threading.active_count() < 20
