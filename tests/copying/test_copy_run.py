"""`copy_run` and ``holdfast cp``: what a copy has, what it refuses, and what it does about damage and deletions."""

from __future__ import annotations

import fnmatch
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

import holdfast
from holdfast.cli import cp as copy_command
from holdfast.copying.run_copy import CopyOutcome, RunCopy
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError, StorageError
from holdfast.format.records import Place, commit_key
from holdfast.policy.keep import KeepEvery
from holdfast.run.garbage import LEAST_GRACE_S, collect, plan_collection
from holdfast.run.history import Run
from holdfast.run.holds import Holds, create_lease
from holdfast.run.leases import want_leases
from holdfast.run.quarantine import quarantine
from holdfast.run.removal import abandon
from holdfast.run.retention import Retention
from holdfast.store.base import Location, Store
from holdfast.store.only_writer import only_writer
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.store.test_posix_storage import mounted
from tests.support.checkpoints import begin, check, save, write_data
from tests.support.checkpoints import publish_manifest as begin_save
from tests.support.command_line import damage, folder_of, holdfast_command
from tests.support.faulty_storage import FaultyStore
from tests.support.nursery import until
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import on
from tests.support.servers.s3 import Bucket


@pytest.fixture
def source(tmp_path: Path) -> Run:
    """A run with the steps 10, 20, 30, each in two files."""
    run = Run.create(open_store(Location(str(tmp_path / "source"))))
    begin(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), 10 * seq)
    return run


@pytest.fixture
def src(source: Run) -> Path:
    return Path(source.storage.location.url)


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "copies" / "run"


def opened(path: Path) -> Run:
    return Run.open(open_store(Location(str(path))))


def steps(path: Path) -> list[int]:
    return [each.step for each in holdfast.ls(path)]


def check_all(path: Path) -> None:
    """Every checkpoint of the run is whole."""
    for place in opened(path).places():
        check(opened(path), opened(path).commit(place))


def copy_with(
    source: Run,
    target: Path | Store,
    during: Callable[[str], None],
    *,
    skip_damaged: bool = False,
    only: Place | None = None,
) -> CopyOutcome:
    """Copy, and call `during` with the text of the progress when the data of a checkpoint is about to be copied."""

    @contextmanager
    def shown(text: str, _: int) -> Iterator[Callable[[int], None]]:
        during(text)
        yield lambda _: None

    storage = open_store(Location(str(target))) if isinstance(target, Path) else target
    return RunCopy(source, storage, only=only, read_back=False, skip_damaged=skip_damaged, shown=shown).run()


def test_a_copy_is_the_same_run_file_by_file(source: Run, src: Path, dst: Path) -> None:
    report = holdfast.copy_run(src, dst)
    subprocess.run(["diff", "-r", src, dst], check=True)
    assert (report.copied, report.present, report.head, report.step) == (("1.1", "1.2", "1.3"), (), "1.3", 30)
    assert opened(dst).run_id == source.run_id


def test_the_next_copy_brings_what_is_new(source: Run, src: Path, dst: Path) -> None:
    holdfast.copy_run(src, dst)
    save(source, Place(1, 4), 40)
    report = holdfast.copy_run(src, dst)
    assert (report.copied, report.present) == (("1.4",), ("1.1", "1.2", "1.3"))
    subprocess.run(["diff", "-r", src, dst], check=True)
    assert holdfast.copy_run(src, dst).copied == ()


def test_one_checkpoint_makes_a_run(src: Path, dst: Path) -> None:
    report = holdfast.copy_run(f"{src}@step=20", dst)
    assert (report.copied, report.head) == (("1.2",), "1.2")
    assert steps(dst) == [20]
    holdfast.copy_run(f"{src}@1.1", dst)
    assert steps(dst) == [20, 10]
    check_all(dst)
    assert holdfast_command("doctor", dst).status == 0


def test_a_copy_leaves_out_what_belongs_to_the_work_on_the_source(source: Run, src: Path, dst: Path) -> None:
    write_data(source, begin_save(source, Place(1, 4), 40), 1)
    quarantine(source, Place(1, 1), "it was damaged")
    want_leases(source.storage)
    holdfast.request_save(src)
    holdfast.pin(f"{src}@1.2")
    holdfast.copy_run(src, dst)
    assert sorted(path.name for path in dst.iterdir()) == ["checkpoints", "epochs", "history", "holdfast.json", "pins"]
    assert len([*(dst / "checkpoints").iterdir()]) == 3
    assert [each.place for each in holdfast.ls(dst) if each.pinned] == ["1.2"]
    assert len([*(dst / "pins").iterdir()]) == 1
    holdfast.unpin(f"{dst}@1.2")
    holdfast.copy_run(src, dst)
    assert not any(each.pinned for each in holdfast.ls(dst))


def test_files_that_a_killed_copy_wrote_are_kept_and_others_written_again(source: Run, src: Path, dst: Path) -> None:
    holdfast.copy_run(src, dst)
    folder = folder_of(dst, 30)
    (dst / "history" / "9999999998-9999999996.json").unlink()
    (folder / "seal.json").unlink()
    with (folder / "data-00001.safetensors").open("ab") as file:
        file.write(b"more")
    report = holdfast.copy_run(src, dst)
    assert (report.copied, report.num_kept) == (("1.3",), 1)
    subprocess.run(["diff", "-r", src, dst], check=True)


def test_with_read_back_a_kept_file_is_compared_byte_by_byte(src: Path, dst: Path) -> None:
    holdfast.copy_run(src, dst)
    damage(folder_of(dst, 30) / "data-00001.safetensors", 0.999)
    assert holdfast.copy_run(f"{src}@step=30", dst).num_kept == 2
    assert holdfast.copy_run(f"{src}@step=30", dst, read_back=True).num_kept == 1
    check_all(dst)


def test_a_checkpoint_that_lost_files_is_completed_from_another_copy(src: Path, dst: Path) -> None:
    holdfast.copy_run(src, dst)
    (folder_of(src, 20) / "data-00000.safetensors").unlink()
    for name in ("manifest.hfm", "seal.json"):
        (folder_of(src, 20) / name).write_bytes(b"damaged")
    report = holdfast.copy_run(f"{dst}@step=20", src)
    assert (report.copied, report.present, report.num_kept) == ((), ("1.2",), 1)
    check_all(src)
    subprocess.run(["diff", "-r", src, dst], check=True)


def test_a_partial_copy_that_was_given_up_is_left_out(source: Run, src: Path, dst: Path) -> None:
    holdfast.copy_run(f"{src}@1.1", dst)
    folder = folder_of(src, 20).name
    (dst / "checkpoints" / folder).mkdir()
    (dst / "checkpoints" / folder / "manifest.hfm").write_bytes(
        (src / "checkpoints" / folder / "manifest.hfm").read_bytes()
    )
    abandon(opened(dst), folder)  # as holdfast doctor --remove does
    report = holdfast.copy_run(src, dst)
    assert (report.copied, report.removed) == (("1.3",), ("1.2",))
    with pytest.raises(ConfigurationError, match="given up"):
        holdfast.copy_run(f"{src}@1.2", dst)
    begin(source, opened_from=Place(1, 2))
    save(source, Place(2, 1), 40)
    holdfast.copy_run(src, dst)
    assert steps(dst)[:2] == [40, 10]


class TestRefused:
    def test_the_run_itself_and_a_folder_in_it(self, src: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(src)
        for target in (src, tmp_path / "link", src / "copy"):
            with pytest.raises(ConfigurationError) as error:
                holdfast.copy_run(src, target)
            assert error.value.code == "config.destination"
        assert not (src / "copy").exists()

    def test_a_folder_with_other_files(self, src: Path, dst: Path) -> None:
        dst.mkdir(parents=True)
        (dst / "notes.txt").write_text("mine")
        with pytest.raises(ConfigurationError) as error:
            holdfast.copy_run(src, dst)
        assert error.value.code == "config.not_a_run"

    def test_another_run(self, src: Path, dst: Path) -> None:
        Run.create(open_store(Location(str(dst))))
        with pytest.raises(ConfigurationError) as error:
            holdfast.copy_run(src, dst)
        assert error.value.code == "config.other_run"

    def test_a_copy_that_a_job_has_saved_into(self, source: Run, src: Path, dst: Path) -> None:
        holdfast.copy_run(src, dst)
        begin(opened(dst), opened_from=Place(1, 3))
        save(source, Place(1, 4), 40)
        for _ in range(2):  # whether or not the source has opened an epoch of that number, too
            with pytest.raises(ConfigurationError) as error:
                holdfast.copy_run(src, dst)
            assert error.value.code == "config.diverged"
            begin(source, opened_from=Place(1, 3))
        assert steps(dst) == [30, 20, 10]
        # One checkpoint of an epoch that both have lands at its place, and moves no head.
        holdfast.copy_run(f"{src}@1.4", dst)
        assert opened(dst).head_place() == Place(1, 3)
        save(source, Place(2, 1), 50)
        with pytest.raises(ConfigurationError):
            holdfast.copy_run(f"{src}@2.1", dst)

    def test_a_run_that_has_more_than_the_source(self, source: Run, src: Path, dst: Path) -> None:
        holdfast.copy_run(src, dst)
        save(source, Place(1, 4), 40)
        with pytest.raises(ConfigurationError) as error:
            holdfast.copy_run(dst, src)
        assert error.value.code == "config.diverged"
        assert "1.4" in error.value.message

    def test_a_copy_that_another_call_writes_to(self, src: Path, dst: Path) -> None:
        dst.mkdir(parents=True)
        with only_writer(dst, "copies into"), pytest.raises(ConfigurationError) as error:
            holdfast.copy_run(src, dst)
        assert error.value.code == "config.destination"

    def test_a_checkpoint_that_was_removed_there(self, src: Path, dst: Path) -> None:
        holdfast.copy_run(src, dst)
        holdfast.remove(f"{dst}@1.2")
        with pytest.raises(ConfigurationError, match="was removed there"):
            holdfast.copy_run(f"{src}@1.2", dst)

    def test_a_run_without_checkpoints_and_one_that_is_not_there(self, tmp_path: Path, dst: Path) -> None:
        Run.create(open_store(Location(str(tmp_path / "empty"))))
        for src, code in (("empty", "not_found.head"), ("nothing", "not_found.run")):
            with pytest.raises(NotFoundError) as error:
                holdfast.copy_run(tmp_path / src, dst)
            assert error.value.code == code
        assert not dst.exists()

    def test_a_checkpoint_folder_and_a_selector_as_the_target(self, src: Path, dst: Path) -> None:
        for names in ((folder_of(src, 10), dst), (src, f"{dst}@step=3")):
            with pytest.raises(ConfigurationError) as error:
                holdfast.copy_run(*names)
            assert error.value.code == "config.path"


class TestDamage:
    def test_a_damaged_block_never_appears_in_the_copy(self, src: Path, dst: Path) -> None:
        damage(folder_of(src, 20) / "data-00001.safetensors", 0.999)
        with pytest.raises(CorruptError, match=r"checkpoint 1\.2 .* block 0") as error:
            holdfast.copy_run(src, dst)
        assert error.value.code == "corrupt.file"
        assert steps(dst) == [10]
        assert not (folder_of(dst, 20) / "data-00001.safetensors").exists()

    @pytest.mark.parametrize("name", ["data-00001.safetensors", "seal.json", "manifest.hfm"])
    def test_the_others_are_copied_on_request(self, src: Path, dst: Path, name: str) -> None:
        (folder_of(src, 20) / name).unlink()
        done = holdfast_command("cp", src, dst, "--skip-damaged", "--json")
        assert done.status == 1
        assert (done.json["damaged"], done.json["head"]) == (["1.2"], "1.3")
        assert steps(dst) == [30, 10]
        assert len([*(dst / "checkpoints").iterdir()]) == 2
        check_all(dst)

    def test_the_copy_of_a_file_with_a_damaged_header_has_the_right_one(self, src: Path, dst: Path) -> None:
        file = folder_of(src, 20) / "data-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[4090] ^= 1
        file.write_bytes(data)
        holdfast.copy_run(src, dst)
        assert holdfast_command("verify", "--all", "--deep", dst).status == 0

    def test_a_lost_epoch_record_of_the_source_is_said(self, source: Run, src: Path, dst: Path) -> None:
        begin(source, opened_from=Place(1, 3))
        save(source, Place(2, 1), 40)
        (src / "epochs" / "9999999998.json").unlink()
        with pytest.raises(CorruptError) as error:
            holdfast.copy_run(src, dst)
        assert error.value.code == "corrupt.history"


class TestBesideDeletions:
    def test_what_is_copied_and_the_head_are_leased(self, source: Run, src: Path, dst: Path) -> None:
        want_leases(source.storage)
        refused: list[str] = []

        def during(text: str) -> None:
            if "1.1" in text:
                save(source, Place(1, 4), 40)  # so that 1.3 is not the head any more
                for place in ("1.1", "1.3"):
                    _until_leased(source, Place.parse(place))
                    with pytest.raises(ConfigurationError) as error:
                        holdfast.remove(f"{src}@{place}")
                    refused.append(error.value.code)
                holdfast.remove(f"{src}@1.2")

        outcome = copy_with(source, dst, during)
        assert refused == ["config.in_use"] * 2
        assert (outcome.copied, outcome.vanished) == ([Place(1, 1), Place(1, 3)], [Place(1, 2)])
        assert steps(dst) == [30, 10]

    def test_a_checkpoint_that_is_deleted_while_it_is_copied_leaves_nothing(
        self, source: Run, src: Path, dst: Path
    ) -> None:
        def during(text: str) -> None:
            if "1.2" in text:
                holdfast.remove(f"{src}@1.2")

        assert copy_with(source, dst, during).vanished == [Place(1, 2)]
        assert steps(dst) == [30, 10]
        assert len([*(dst / "checkpoints").iterdir()]) == 2

    def test_an_origin_that_vanished_leaves_a_lineage_without_a_gap(self, source: Run, src: Path, dst: Path) -> None:
        begin(source, opened_from=Place(1, 3))
        save(source, Place(2, 1), 40)

        def during(text: str) -> None:
            if "1.3" in text:
                holdfast.remove(f"{src}@1.3")

        copy_with(source, dst, during)
        assert steps(dst) == [40, 20, 10]
        assert holdfast_command("doctor", dst).status == 0

    def test_what_is_committed_meanwhile_comes_with_the_next_copy(self, source: Run, src: Path, dst: Path) -> None:
        def during(text: str) -> None:
            if "1.1" in text:
                begin(source, opened_from=Place(1, 3))
                save(source, Place(2, 1), 40)

        copy_with(source, dst, during)
        assert steps(dst) == [30, 20, 10]
        holdfast.copy_run(src, dst)
        assert steps(dst) == [40, 30, 20, 10]

    def test_a_job_that_opens_an_epoch_in_the_copy_at_the_same_moment_keeps_it(
        self, source: Run, src: Path, dst: Path
    ) -> None:
        holdfast.copy_run(src, dst)
        save(source, Place(1, 4), 40)
        begin(source, opened_from=Place(1, 4))

        def during(_: str) -> None:
            begin(opened(dst), opened_from=Place(1, 3))

        with pytest.raises(ConfigurationError) as error:
            copy_with(source, dst, during)
        assert error.value.code == "config.diverged"
        assert opened(dst).head_place() == Place(1, 3)

    def test_a_policy_in_the_copy_does_not_give_up_an_abandoned_checkpoint_that_is_copied_now(
        self, source: Run, src: Path, dst: Path
    ) -> None:
        """It took the parts for those of a cut-off save, and no later call could copy the checkpoint any more."""
        begin(source, opened_from=Place(1, 2))
        save(source, Place(2, 1), 40)
        cut_off: list[str] = []

        def during(text: str) -> None:
            retention = Retention(KeepEvery(1))
            cut_off.extend(retention.apply(opened(dst), retention.survey(opened(dst))).cut_off)

        assert Place(1, 3) in copy_with(source, dst, during).copied
        assert cut_off == []
        check_all(dst)

    def test_garbage_collections_in_the_copy_wait_for_a_copy_at_work_and_take_what_a_dead_one_left(
        self, source: Run, src: Path, dst: Path
    ) -> None:
        begin(source, opened_from=Place(1, 2))
        save(source, Place(2, 1), 40)
        kinds: list[str] = []

        def during(text: str) -> None:
            plan = plan_collection(opened(dst), grace_s=LEAST_GRACE_S)
            kinds.extend(each.kind for each in (*plan.garbage, *plan.kept))
            assert collect(opened(dst), plan).deleted == []

        assert Place(1, 3) in copy_with(source, dst, during).copied
        assert set(kinds) == {"newest_epoch", "held"}
        check_all(dst)
        # A copy that is killed before its seal, and whose lease has ended.
        commit = opened(dst).commit(Place(1, 3))
        for name in ("seal.json", "data-00001.safetensors"):
            (dst / "checkpoints" / commit.checkpoint / name).unlink()
        opened(dst).storage.delete(commit_key(commit.place))
        later = time.time() + 2 * LEAST_GRACE_S  # the save of this test is younger than the time of grace
        with patch("holdfast.run.uncommitted.time.time", lambda: later):
            plan = plan_collection(opened(dst), grace_s=LEAST_GRACE_S)
            assert [each.kind for each in collect(opened(dst), plan).deleted] == ["parts"]
        assert copy_with(source, dst, lambda _: None).removed == [Place(1, 3)]
        assert steps(dst) == [40, 20, 10]

    def test_a_policy_that_looks_between_a_lease_and_a_manifest_of_a_copy_keeps_the_parts(self, source: Run) -> None:
        """A deletion had listed the leases before the copy began, and the manifest after it."""
        begin(source, opened_from=Place(1, 2))
        storage, begun = source.storage, list[str]()

        def begin_copy(_: int, when: str, name: str, path: str) -> None:
            if (when, name) == ("after", "list") and path.endswith("/pins") and not begun:
                create_lease(storage, Place(1, 4), lasting_s=60.0)
                begun.append(begin_save(source, Place(1, 4), 40))

        watched = Run(FaultyStore(storage, begin_copy), source.marker)
        retention = Retention(KeepEvery(1))
        assert retention.apply(watched, retention.survey(watched)).cut_off == []
        assert begun


def _until_leased(run: Run, place: Place) -> None:
    end_s = time.monotonic() + 30
    while not any(lease.place == place for lease in Holds.of(run.storage).leases):
        assert time.monotonic() < end_s
        time.sleep(0.005)


class TestCommand:
    def test_it_says_what_it_did_and_logs_get_no_bar(self, src: Path, dst: Path) -> None:
        done = holdfast_command("cp", src, dst)
        assert done.status == 0
        assert done.lines[0].startswith("copied 3 checkpoints, ")
        assert done.lines[1] == f"{dst}: its head is step 30 at 1.3"
        assert done.err == ""

    def test_lost_files_are_said_to_be_brought_back_by_the_command_that_the_doctor_names(
        self, src: Path, dst: Path
    ) -> None:
        holdfast.copy_run(src, dst)
        (folder_of(src, 20) / "data-00000.safetensors").unlink()
        damage(folder_of(src, 20) / "data-00001.safetensors", 0.999)
        command = "holdfast cp COPY@1.2 RUN --read-back"
        assert command in " ".join(holdfast_command("doctor", src).out.split())
        done = holdfast_command("cp", f"{dst}@1.2", src, "--read-back")
        assert done.lines[0].startswith("brought back ")
        assert done.lines[1] == f"{src}: its head is step 30 at 1.3; it had checkpoint 1.2 before"
        assert holdfast_command("verify", "--all", "--deep", src).status == 0

    def test_the_document_has_the_report(self, src: Path, dst: Path) -> None:
        document = holdfast_command("cp", f"{src}@step=10", dst, "--json").json
        assert (document["copied"], document["head"], document["step"]) == (["1.1"], "1.1", 10)

    def test_wrong_use_and_failures_have_their_exit_codes(self, src: Path, dst: Path) -> None:
        assert holdfast_command("cp", src, src).status == 2
        damage(folder_of(src, 20) / "data-00001.safetensors", 0.999)
        assert holdfast_command("cp", src, dst).status == 3


def test_a_full_disk_stops_the_copy_and_the_next_call_goes_on(src: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=100k") as disk:
        with pytest.raises(StorageError) as error:
            holdfast.copy_run(src, disk / "run")
        assert error.value.code == "storage.full"
        check_all(disk / "run")
        held = steps(disk / "run")
        assert 0 < len(held) < 3
        subprocess.run(["mount", "-o", "remount,size=10m", str(disk)], check=True)
        assert len(holdfast.copy_run(src, disk / "run").copied) == 3 - len(held)
        check_all(disk / "run")


class TestTwoCallsInAStoreWithoutLocks:
    @pytest.mark.parametrize("trouble", ["vanished", "damaged"])
    def test_one_that_gives_a_checkpoint_up_leaves_what_the_other_has_committed(
        self, source: Run, src: Path, trouble: str
    ) -> None:
        target = MemoryStore("copy")

        def during(text: str) -> None:
            if "1.2" in text:
                copy_with(source, target, lambda _: None)
                if trouble == "vanished":
                    holdfast.remove(f"{src}@1.2")
                else:
                    damage(folder_of(src, 20) / "data-00001.safetensors", 0.999)

        outcome = copy_with(source, target, during, skip_damaged=True)
        assert getattr(outcome, trouble) == [Place(1, 2)]
        copy = Run.open(target)
        assert sorted(copy.places()) == [Place(1, 1), Place(1, 2), Place(1, 3)]
        for place in copy.places():
            check(copy, copy.commit(place))

    @pytest.mark.parametrize("pattern", ["*", "manifest.hfm"])
    def test_one_commits_nothing_of_which_the_other_has_deleted_files(self, source: Run, pattern: str) -> None:
        target = MemoryStore("copy")

        class GivesUp(FaultyStore):
            """The other call deletes what is there, right before the seal."""

            def create(self, key: str, data: bytes) -> bool:
                if key.endswith("seal.json") and len(target.list("history")) == 1:
                    for name in fnmatch.filter(target.list(key.rpartition("/")[0]), pattern):
                        target.delete(f"{key.rpartition('/')[0]}/{name}")
                return super().create(key, data)

        with pytest.raises(StorageError, match="another call copies") as error:
            copy_with(source, GivesUp(target, lambda *_: None), lambda _: None)
        assert error.value.code == "storage.vanished"
        assert Run.open(target).places() == [Place(1, 1)]
        copy_with(source, target, lambda _: None)
        copy = Run.open(target)
        for place in copy.places():
            check(copy, copy.commit(place))


GOES_ON = "interrupted: what is done stays; the same command goes on from there\n"


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_an_interrupted_cp_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, as_json: list[str]
) -> None:
    """Also where the interrupt made something else fail while it unwound."""

    def interrupted(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise StorageError("the store is closed.", code="storage.io", action="")

    monkeypatch.setattr(copy_command, "copy_by", interrupted)
    assert holdfast_command("cp", "a", "b", *as_json) == (130, "", GOES_ON)


def test_a_cp_that_waits_for_a_bucket_ends_at_ctrl_c_in_one_line_and_goes_on(
    source: Run, src: Path, bucket: Bucket, proxy: FaultProxy
) -> None:
    command = [sys.executable, "-m", "holdfast", "cp", str(src), f"{bucket.url}/run"]
    environment = os.environ | bucket.behind(proxy.endpoint).environment
    gate = threading.Event()
    proxy.add(on("PUT", "*step-*").after(1).waits_for(gate))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as work:
        until(lambda: sum(request.method == "PUT" for request in proxy.requests) > 2)
        work.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        assert work.communicate(timeout=30) == ("", GOES_ON)
        assert time.monotonic() - began_s < 5
    assert work.returncode == 130
    gate.set()
    proxy.clear()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "copied 3 checkpoints" in done.stdout
