"""A checkpoint that a load has found damaged in storage is in quarantine until somebody finds it whole: later loads
pass over it at once, and no policy counts it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, KeepEvery, KeepLast
from holdfast.errors import CorruptError
from holdfast.format.digests import XXH3, DigestKind
from holdfast.format.records import Place
from holdfast.io import digest
from holdfast.policy.keep import KeepPolicy
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.quarantine import in_quarantine, lift, quarantine, reason_of
from holdfast.run.removal import remove_checkpoint
from holdfast.run.retention import Retention
from holdfast.run.second_reading import quarantine_if_damaged
from holdfast.store.base import Bytes
from holdfast.store.urls import location_of, open_store
from tests.support.command_line import holdfast_command
from tests.support.models import build, differing, filled, start_new_job
from tests.support.ranks import run_ranks

STEPS = (1, 2, 3, 4)
HEAD = Place(1, 4)


def save_all(run: str) -> None:
    start_new_job()
    for step in STEPS:
        holdfast.save(run, filled("fsdp", step).state, step, timeout_s=30)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 1 to 4, of two ranks."""
    run = tmp_path_factory.mktemp("quarantine") / "run"
    run_ranks(2, save_all, str(run))
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    start_new_job()
    shutil.copytree(saved_run, tmp_path / "run")
    return tmp_path / "run"


def opened(run: Path) -> Run:
    return Run.open(open_store(location_of(str(run))))


def file_of(run: Path, step: int, name: str = "data-00001.safetensors") -> Path:
    return next(run.glob(f"checkpoints/step-{step:010d}-*")) / name


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def load(run: Path, *, fallback: bool = True) -> holdfast.LoadReport:
    return holdfast.load(run, build("plain", num_steps=0).state, fallback=fallback)


@pytest.fixture
def shut(run: Path) -> Path:
    """The run, whose head a load has found damaged and put into quarantine."""
    flip_last(file_of(run, 4))
    assert load(run).step == 3
    assert in_quarantine(open_store(location_of(str(run)))) == {HEAD}
    return run


def test_a_later_load_passes_over_it_without_reading_it_and_says_why_and_since_when(shut: Path) -> None:
    flip_last(file_of(shut, 4))  # whole again, which only somebody who reads it knows
    report = load(shut)
    assert report.step == 3
    ((place, reason),) = report.skipped
    assert place == "1.4"
    assert f"in quarantine since {time.strftime('%Y-%m-%d', time.gmtime())}" in reason
    assert "data-00001.safetensors" in reason


def test_a_restore_does_so_too_and_saves_go_on_from_the_older_one(shut: Path) -> None:
    job = build("plain", num_steps=0)
    with Checkpointer(shut, job.state, memory=None) as checkpointer:
        report = checkpointer.restore(fallback=True)
        assert (report.step, differing(job, 3)) == (3, [])
        checkpointer.save(4)
    assert opened(shut).epoch(2).why == "resume"
    assert load(shut).place == "2.1"


def test_a_load_without_fallback_reads_it(shut: Path) -> None:
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors"):
        load(shut, fallback=False)
    flip_last(file_of(shut, 4))
    assert load(shut, fallback=False).step == 4
    assert holdfast.load(f"{shut}@1.4", build("plain", num_steps=0).state).step == 4


def test_the_advice_of_a_load_without_fallback_names_none_that_is_in_quarantine(shut: Path) -> None:
    quarantine(opened(shut), Place(1, 3), "a test")
    with pytest.raises(CorruptError) as caught:
        load(shut, fallback=False)
    assert f"'{shut}@1.2' (step 2)" in caught.value.action


def test_where_all_are_in_quarantine_the_error_says_how_to_lift_it(run: Path) -> None:
    for number in range(1, 5):
        quarantine(opened(run), Place(1, number), "a test")
    with pytest.raises(CorruptError, match="a test") as caught:
        load(run)
    assert caught.value.code == "corrupt.lineage"
    assert "verify --deep" in caught.value.action


class TestTheCommandLineTells:
    def test_verify_says_who_found_the_damage_and_how_to_lift_the_quarantine(self, shut: Path) -> None:
        flip_last(file_of(shut, 4))
        result = holdfast_command("verify", shut)
        assert result.status == 0, "the structure is sound"
        assert "it is in quarantine since 20" in result.out
        assert f"process {os.getpid()}" in result.out
        assert f"holdfast release {shut}@1.4" in result.out
        (row,) = json.loads(holdfast_command("verify", shut, "--json").out)["checkpoints"]
        assert row["quarantine"]["lift"] == f"holdfast release {shut}@1.4"
        assert row["quarantine"]["holder"].endswith(f"process {os.getpid()}")
        assert "does not match its digest" in row["quarantine"]["reason"]
        assert abs(row["quarantine"]["created"] - time.time()) < 600

    def test_verify_says_it_also_where_the_seal_is_lost(self, shut: Path) -> None:
        file_of(shut, 4).with_name("seal.json").unlink()
        for path in (shut, f"{shut}@step=4"):
            result = holdfast_command("verify", path)
            assert result.status == 1
            assert "step 4 at 1.4" in result.out
            assert "it is in quarantine since" in result.out
        sound, *_ = json.loads(holdfast_command("verify", f"{shut}@1.3", "--json").out)["checkpoints"]
        assert sound["quarantine"] is None

    def test_show_says_it_too(self, shut: Path) -> None:
        assert f"holdfast release {shut}@1.4" in holdfast_command("show", shut).out
        assert json.loads(holdfast_command("show", shut, "--json").out)["quarantine"]["reason"]
        assert "quarantine" not in holdfast_command("show", f"{shut}@1.3").out
        assert json.loads(holdfast_command("show", f"{shut}@1.3", "--json").out)["quarantine"] is None

    def test_an_unreadable_record_is_told_as_one(self, shut: Path) -> None:
        (record,) = (shut / "quarantine").iterdir()
        record.chmod(0o600)
        record.write_bytes(b"{")
        assert "it is in quarantine, and the record of why cannot be read" in holdfast_command("verify", shut).out


class TestLifting:
    def test_verify_lifts_it_once_every_byte_is_whole_again(self, shut: Path) -> None:
        assert holdfast_command("verify", shut, "--deep").status == 1
        assert load(shut).step == 3
        flip_last(file_of(shut, 4))
        assert holdfast_command("verify", shut).status == 0, "not without --deep"
        assert load(shut).step == 3
        result = holdfast_command("verify", shut, "--deep")
        assert result.status == 0
        assert "it was in quarantine" in result.out
        assert (load(shut).step, load(shut).skipped) == (4, ())
        assert "quarantine" not in holdfast_command("verify", shut, "--deep").out

    def test_verify_of_all_checkpoints_lifts_those_that_are_whole(self, shut: Path) -> None:
        quarantine(opened(shut), Place(1, 2), "a test")
        document = json.loads(holdfast_command("verify", shut, "--deep", "--all", "--json").out)
        assert [row["released"] for row in document["checkpoints"]] == [False, False, True, False]
        assert in_quarantine(opened(shut).storage) == {HEAD}

    def test_release_lifts_it_unread(self, shut: Path) -> None:
        assert "step 4 at 1.4 is out of quarantine" in holdfast_command("release", f"{shut}@1.4").out
        assert "was not in quarantine" in holdfast_command("release", f"{shut}@1.4").out
        assert "in quarantine" not in load(shut).skipped[0][1], "it was read again"

    def test_its_removal_lifts_it(self, shut: Path) -> None:
        quarantine(opened(shut), Place(1, 2), "a test")
        remove_checkpoint(opened(shut), opened(shut).commit(Place(1, 2)))
        assert in_quarantine(opened(shut).storage) == {HEAD}


def test_ls_and_doctor_show_it(shut: Path) -> None:
    assert "quarantine" in holdfast_command("ls", shut).out
    assert [row.quarantined for row in holdfast.ls(shut)] == [True, False, False, False]
    (finding,) = examine(opened(shut))
    assert finding.code == "commit.quarantined"
    assert "data-00001.safetensors" in finding.text
    assert f"holdfast verify --deep {shut}@1.4" in finding.text


class TestSecondReading:
    def damage(self, path: Path) -> CorruptError:
        return CorruptError(f"{path} is damaged.", code="corrupt.block", action="", path=str(path))

    def test_a_file_that_is_sound_for_the_first_rank_puts_nothing_into_quarantine(self, run: Path) -> None:
        assert not quarantine_if_damaged(opened(run), HEAD, self.damage(file_of(run, 4)))
        assert in_quarantine(opened(run).storage) == frozenset()

    @pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00000.safetensors"])
    def test_a_file_that_is_gone_is_damage(self, run: Path, name: str) -> None:
        file_of(run, 4, name).unlink()
        assert quarantine_if_damaged(opened(run), HEAD, self.damage(file_of(run, 4, "").joinpath(name)))
        assert in_quarantine(opened(run).storage) == {HEAD}

    def test_a_checkpoint_that_was_removed_meanwhile_is_not_damaged(self, run: Path) -> None:
        remove_checkpoint(opened(run), opened(run).commit(Place(1, 2)))
        quarantine_if_damaged(opened(run), Place(1, 2), self.damage(run / "gone"))
        assert in_quarantine(opened(run).storage) == frozenset()

    def test_a_run_that_cannot_be_written_loads_all_the_same(self, run: Path) -> None:
        (run / "quarantine").write_text("not a folder")
        flip_last(file_of(run, 4))
        assert load(run).step == 3


def load_on_ranks(run: str) -> tuple[int, tuple[tuple[str, str], ...]]:
    start_new_job()
    report = holdfast.load(run, build("fsdp", num_steps=0).state, fallback=True, timeout_s=30)
    return report.step, report.skipped


def test_damage_that_another_rank_meets_is_remembered_for_all(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip_last(file_of(run, 4))
    run_ranks(2, load_on_ranks, str(run))
    first, second = run_ranks(2, load_on_ranks, str(run))
    assert first == second
    assert first[0] == 3
    assert "in quarantine" in first[1][0][1]
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        load(run)
    assert [record.message for record in caplog.records if "1.4 is damaged" in record.message]


def load_where_one_node_has_bad_memory(run: str) -> int:
    """A load in which the first block that the second rank reads looks altered to it."""
    honest, is_bad = digest.digest_blocks, dist.get_rank() == 1
    bad = iter((True,))

    def altered(data: Bytes, kind: DigestKind = XXH3) -> bytes:
        digests = honest(data, kind)
        return digests if next(bad, None) is None else bytes(len(digests))

    try:
        if is_bad:
            digest.digest_blocks = altered
        return load_on_ranks(run)[0]
    finally:
        digest.digest_blocks = honest


def test_damage_that_one_node_alone_sees_puts_nothing_into_quarantine(run: Path) -> None:
    assert run_ranks(2, load_where_one_node_has_bad_memory, str(run)) == [3, 3]
    assert in_quarantine(opened(run).storage) == frozenset()
    assert load(run).step == 4


def test_it_is_not_the_newest_whole_checkpoint(run: Path) -> None:
    quarantine(opened(run), HEAD, "a test")
    reasons = {kept.facts.step: kept.reasons for kept in Retention(KeepEvery(100)).survey(opened(run)).decision.kept}
    assert {step: why[-1] for step, why in reasons.items()} == {
        4: "it is newer than the newest checkpoint that was verified",
        3: "it is the newest checkpoint that was verified",
    }


class TestRetention:
    def kept(self, run: Path, policy: KeepPolicy) -> list[int]:
        return [kept.facts.step for kept in Retention(policy).survey(opened(run)).decision.kept]

    def test_keep_last_counts_others_in_its_place(self, run: Path) -> None:
        assert self.kept(run, KeepLast(2)) == [4, 3]
        quarantine(opened(run), HEAD, "a test")
        assert self.kept(run, KeepLast(2)) == [4, 3, 2]
        quarantine(opened(run), Place(1, 2), "a test")
        assert self.kept(run, KeepLast(2)) == [4, 3, 1]

    def test_it_stays_as_long_as_the_policy_would_keep_it_if_it_were_sound(self, run: Path) -> None:
        quarantine(opened(run), Place(1, 3), "a test")
        assert self.kept(run, KeepLast(2)) == [4, 3, 2]
        assert self.kept(run, KeepLast(1)) == [4]
        assert self.kept(run, KeepEvery(3)) == [4, 3]


def test_a_record_of_a_reason_that_cannot_be_read_counts_too(shut: Path) -> None:
    (record,) = (shut / "quarantine").iterdir()
    record.write_text("{}")
    assert "cannot be read" in reason_of(opened(shut).storage, HEAD)
    assert load(shut).step == 3
    assert lift(opened(shut).storage, HEAD)
    assert not lift(opened(shut).storage, HEAD)
