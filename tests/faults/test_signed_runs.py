"""Signed runs: whoever may write the files of a run, and has no key, can change nothing that a reader takes.

The attacks rewrite files with every digest right that can be made without the key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, HoldfastError, Memory, signing
from holdfast.format import records
from holdfast.format.container import TABLE_OFFSET
from holdfast.node_memory.node_folder import node_folders
from holdfast.signing import FILE, KEYS, REQUIRED, SIGNED, SigningKey, keys
from tests.support import independent_reader
from tests.support.command_line import holdfast_command
from tests.support.keepers import keeper_of
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks
from tests.support.servers.s3 import Bucket

ONE, OTHER = "ab" * 32, "cd" * 32
WEIGHTS = torch.arange(700_000, dtype=torch.float32)  # three blocks


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(KEYS, ONE)
    return ONE


@pytest.fixture
def run(tmp_path: Path, key: str) -> Path:
    """A signed run of two checkpoints."""
    run = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(run, {"w": WEIGHTS + step, "progress": step}, step)
    start_new_job()
    return run


def load(run: Path | str) -> torch.Tensor:
    weights = torch.zeros_like(WEIGHTS)
    holdfast.load(run, {"w": weights, "progress": 0})
    return weights


def code(call: Callable[[], object]) -> str:
    with pytest.raises(HoldfastError) as error:
        call()
    return error.value.code


def newest(run: Path) -> tuple[Path, Path, Path]:
    """The data file, the seal and the commit of the head."""
    folder = max((run / "checkpoints").iterdir())
    return folder / "data-00000.safetensors", folder / "seal.json", min((run / "history").glob("*.json"))


def rewritten(record: Path, change: Callable[[str], str]) -> bytes:
    """Change the text of a record, and give it the digest that any writer can make. Returns its bytes."""
    body = change(record.read_text()[: -len(',"digest":""}\n') - 32])
    record.write_text(f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n')
    return record.read_bytes()


def change_a_weight(run: Path) -> None:
    """Change a weight of the head, and every digest on the way up to the commit."""
    data, seal, commit = newest(run)
    content = bytearray(data.read_bytes())
    start = int.from_bytes(content[:8], "little") + 8
    old = bytes.fromhex(content[TABLE_OFFSET : TABLE_OFFSET + 3 * 64].decode())
    content[start + 4] ^= 1
    blocks = [bytes(content[at : at + (1 << 20)]) for at in range(start, len(content), 1 << 20)]
    table = b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert table[32:] == old[32:]
    content[TABLE_OFFSET : TABLE_OFFSET + 3 * 64] = table.hex().encode()
    data.write_bytes(content)
    digest = hashlib.sha256(table).hexdigest()
    sealed = rewritten(seal, lambda text: text.replace(hashlib.sha256(old).hexdigest(), digest))
    name = hashlib.sha256(sealed).hexdigest()
    rewritten(commit, lambda text: re.sub(r'("seal":\{"nbytes":\d+,"digest":")[0-9a-f]{64}', rf"\g<1>{name}", text))


def strip(run: Path) -> None:
    """Put in place of the run one with other weights that nobody has signed, made with the library itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(KEYS)
        shutil.rmtree(run)
        holdfast.save(run, {"w": WEIGHTS + 2, "progress": 6}, 2)
    start_new_job()


def test_a_signed_run_is_read_with_the_key_and_its_records_say_so(run: Path) -> None:
    assert torch.equal(load(run), WEIGHTS + 2)
    assert torch.equal(load(f"{run}@step=1"), WEIGHTS + 1)
    data, seal, commit = newest(run)
    for record in (seal, commit):
        found = json.loads(record.read_text())
        assert found["reader_features"] == [SIGNED]
        assert found["key"] == SigningKey(bytes.fromhex(ONE)).id
        assert len(found["hmac"]) == 64
        assert ONE not in record.read_text()
    start = int.from_bytes(data.read_bytes()[:8], "little") + 8
    first_block = data.read_bytes()[start : start + (1 << 20)]
    assert data.read_bytes()[TABLE_OFFSET : TABLE_OFFSET + 64].decode() == hashlib.sha256(first_block).hexdigest()


@pytest.mark.parametrize(
    "reader",
    [
        load,
        holdfast.open,
        lambda run: holdfast.open(f"{run}/checkpoints/{newest(run)[0].parent.name}"),
        lambda run: load(f"{run}/checkpoints/{newest(run)[0].parent.name}"),
        holdfast.ls,
        lambda run: holdfast.export(run, run.parent / "exported", to="hf", select="w"),
    ],
    ids=["load", "open", "open a folder", "load a folder", "ls", "export"],
)
def test_every_reader_refuses_a_signed_run_without_the_key_and_with_a_wrong_signature(
    run: Path, reader: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEYS)
    assert code(lambda: reader(run)) == "config.signing_key"
    monkeypatch.setenv(KEYS, OTHER)
    assert code(lambda: reader(run)) == "config.signing_key"
    monkeypatch.setenv(KEYS, ONE)
    change_a_weight(run)
    assert code(lambda: reader(run)) == "corrupt.signature"


def test_the_commands_refuse_it_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert holdfast_command("verify", str(run), "--deep").status == 0
    change_a_weight(run)
    found = holdfast_command("verify", str(run), "--deep")
    assert found.status != 0
    assert "corrupt.signature" in found.out + found.err
    monkeypatch.delenv(KEYS)
    found = holdfast_command("ls", str(run))
    assert found.status != 0
    assert "config.signing_key" in found.out + found.err


def test_a_fallback_passes_over_what_was_changed(run: Path) -> None:
    change_a_weight(run)
    weights = torch.zeros_like(WEIGHTS)
    report = holdfast.load(run, {"w": weights, "progress": 0}, fallback=True)
    assert report.step == 1
    assert torch.equal(weights, WEIGHTS + 1)


def test_a_changed_block_without_its_digest_is_found_by_ranged_reads(run: Path) -> None:
    data, *_ = newest(run)
    content = bytearray(data.read_bytes())
    content[-5000] ^= 1
    data.write_bytes(content)
    view = holdfast.open(run)
    assert torch.equal(view["w"][:1000], WEIGHTS[:1000] + 2)
    assert code(lambda: view["w"][-2000:]) == "corrupt.file"


def test_a_run_whose_signatures_were_stripped_is_refused_where_signatures_are_required(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strip(run)
    load(run)  # nobody asked for a signature
    monkeypatch.setenv(REQUIRED, "1")
    for reader in (load, holdfast.open, holdfast.ls):
        assert code(lambda reader=reader: reader(run)) == "corrupt.unsigned"  # type: ignore[misc]


def test_a_signed_seal_below_an_unsigned_commit_is_refused(run: Path) -> None:
    """Somebody makes the commit anew, without a signature, for the signed seal of another step."""
    _, _, commit = newest(run)

    def stripped(text: str) -> str:
        return re.sub(r',"key":"[0-9a-f]{32}","hmac":"[0-9a-f]{64}"$', "", text).replace(f'["{SIGNED}"]', "[]", 1)

    rewritten(commit, stripped)
    assert code(lambda: load(run)) == "corrupt.seal"
    seal = newest(run)[1].read_bytes()
    reference = f'"digest":"{xxhash.xxh3_128_hexdigest(seal)}"'
    rewritten(commit, lambda text: re.sub(r'"digest":"[0-9a-f]{64}"', reference, text))
    assert code(lambda: load(run)) == "corrupt.seal"


def test_a_signed_record_of_another_place_is_refused(run: Path) -> None:
    older, newer = sorted((run / "history").glob("*.json"), reverse=True)
    shutil.copy(older, newer)
    assert code(lambda: load(run)) == "corrupt.record"


def test_a_feature_without_a_signature_is_a_forgery(run: Path) -> None:
    _, _, commit = newest(run)
    rewritten(commit, lambda text: re.sub(r',"hmac":"[0-9a-f]{64}"$', "", text))
    assert code(lambda: load(run)) == "corrupt.signature"


def test_a_reader_that_does_not_know_signatures_refuses_them_by_name(run: Path) -> None:
    with pytest.raises(Exception, match=SIGNED):
        independent_reader.read(run)


def test_keys_are_changed_by_putting_a_new_one_before_the_old_one(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the new key signs\n{OTHER}\n\n{ONE}\n")
    monkeypatch.delenv(KEYS)
    monkeypatch.setenv(FILE, str(file))
    state = {"w": torch.zeros_like(WEIGHTS), "progress": 0}
    holdfast.load(run, state)
    holdfast.save(run, state, 3)
    assert json.loads(newest(run)[2].read_text())["key"] == SigningKey(bytes.fromhex(OTHER)).id
    assert torch.equal(load(f"{run}@step=1"), WEIGHTS + 1)
    file.write_text(OTHER)
    assert code(lambda: load(f"{run}@step=1")) == "config.signing_key"
    assert torch.equal(load(run), WEIGHTS + 2)


@pytest.mark.parametrize("text", ["", "# nothing\n", "ab" * 31, "xy" * 32, f"{ONE} {OTHER}", "ab" * 129])
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    monkeypatch.setenv(FILE, str(file))
    with pytest.raises(ConfigurationError, match="openssl rand -hex 32") as error:
        keys()
    assert error.value.code == "config.signing_key"
    assert not text.strip() or text.strip() not in str(error.value)
    monkeypatch.setenv(FILE, str(tmp_path / "none"))
    assert code(keys) == "config.signing_key"
    monkeypatch.setenv(KEYS, ONE)
    assert code(keys) == "config.signing_key"


@pytest.mark.parametrize(("given", "meant"), [("key", "{cwd}/key"), ("~/key", "{home}/key")])
def test_a_relative_path_of_the_key_is_refused_because_keepers_work_in_another_folder(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(ONE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(KEYS, raising=False)
    monkeypatch.setenv(FILE, given)
    whole = meant.format(cwd=tmp_path, home=tmp_path / "home")
    with pytest.raises(ConfigurationError, match=re.escape(f"such as '{whole}'")) as error:
        keys()
    assert error.value.code == "config.signing_key"


def test_a_key_is_in_no_text(key: str) -> None:
    (mine,) = keys()
    assert key not in f"{mine!r} {mine} {mine.id}"


def test_a_run_goes_on_signed_after_checkpoints_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    state = {"w": WEIGHTS.clone(), "progress": 1}
    holdfast.save(run, state, 1)
    monkeypatch.setenv(KEYS, ONE)
    holdfast.save(run, state, 2)
    start_new_job()
    assert torch.equal(load(f"{run}@step=1"), WEIGHTS)
    assert torch.equal(load(run), WEIGHTS)
    assert json.loads(newest(run)[2].read_text())["reader_features"] == [SIGNED]


def test_the_keeper_signs_and_a_restore_from_memory_needs_the_key(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, node_dir = tmp_path / "run", tmp_path / "memory"
    node_dir.mkdir()
    monkeypatch.setenv(REQUIRED, "1")
    state = {"w": WEIGHTS.clone()}
    start_new_job()
    with Checkpointer(run, state, save=EverySteps(1), memory=Memory(node_dir=node_dir)) as checkpointer:
        for step in checkpointer.steps(4):
            state["w"] += 1
            checkpointer.step(step)
    assert json.loads(newest(run)[2].read_text())["reader_features"] == [SIGNED]
    start_new_job()
    again = {"w": torch.zeros_like(WEIGHTS)}
    with Checkpointer(run, again, memory=Memory(node_dir=node_dir)) as checkpointer:
        report = checkpointer.restore()
    assert (report.tier, report.next_step) == ("node memory", 4)
    assert torch.equal(again["w"], WEIGHTS + 4)
    assert torch.equal(holdfast.open(run)["w"][:], WEIGHTS + 4)
    start_new_job()
    monkeypatch.delenv(KEYS)
    with Checkpointer(run, again, memory=Memory(node_dir=node_dir)) as checkpointer:
        assert code(checkpointer.restore) == "config.signing_key"


def test_a_job_with_its_first_key_waited_for_the_keeper_of_a_job_without_one(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper of the first job lives on, without the key, and could sign nothing."""
    run, weights = tmp_path / "run", WEIGHTS.clone()
    state = {"w": weights, "progress": 1}
    start_new_job()
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.save(1)
    (folder,) = node_folders(tmp_path / "node")
    first = keeper_of(folder.path)
    monkeypatch.setenv(KEYS, ONE)
    start_new_job()
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.restore()
        weights += 1
        checkpointer.save(2).durable.wait(30)
        assert keeper_of(folder.path) != first
        second = keeper_of(folder.path)
        checkpointer.save(3)
    assert json.loads(newest(run)[2].read_text())["reader_features"] == [SIGNED]
    assert torch.equal(load(run), WEIGHTS + 1)
    assert keeper_of(folder.path) == second


def save_on_ranks(run: str) -> None:
    rank = torch.distributed.get_rank()
    holdfast.save(run, {"mine": holdfast.PerRank(rank), "w": WEIGHTS.clone()}, 1)


def load_on_ranks(run: str) -> bytes:
    into = {"mine": holdfast.PerRank(-1, on_resize="first"), "w": torch.zeros_like(WEIGHTS)}
    holdfast.load(run, into)
    return hashlib.sha256(np.asarray(into["w"]).tobytes()).digest()


def test_ranks_save_and_other_numbers_of_ranks_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The processes of the ranks live on, so they get the key for these calls alone, and not from this process.
    run = str(tmp_path / "run")
    run_ranks(2, with_key, ONE, "save", run)
    found = [*run_ranks(3, with_key, ONE, "load", run), *run_ranks(1, with_key, ONE, "load", run)]
    assert set(found) == {hashlib.sha256(WEIGHTS.numpy().tobytes()).digest()}
    monkeypatch.setenv(KEYS, ONE)
    assert records.decode(newest(Path(run))[1].read_bytes(), records.Seal, path="").reader_features == (SIGNED,)


def with_key(key: str, verb: str, run: str) -> bytes | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS, key)
        patch.setenv(REQUIRED, "1")
        return save_on_ranks(run) if verb == "save" else load_on_ranks(run)  # type: ignore[func-returns-value]


def test_a_signed_run_in_a_bucket_is_written_in_order_and_read_by_ranges(
    bucket: Bucket, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    url = f"{bucket.url}/run"
    many = torch.arange(6_000_000, dtype=torch.float32)  # more than one part
    holdfast.save(url, {"w": many}, 1)
    start_new_job()
    weights = torch.zeros_like(many)
    holdfast.load(url, {"w": weights})
    assert torch.equal(weights, many)
    assert torch.equal(holdfast.open(url)["w"][-100:], many[-100:])
    monkeypatch.delenv(KEYS)
    assert code(lambda: holdfast.open(url)) == "config.signing_key"


def test_the_log_tells_once_of_a_key_file_that_every_user_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    path.write_text(ONE)
    monkeypatch.setenv(FILE, str(path))
    path.chmod(0o640)
    signing.keys()
    assert caplog.text == ""
    path.chmod(0o644)
    for _ in range(2):
        assert len(signing.keys()) == 1
    assert caplog.text.count("chmod 600") == 1
    assert ONE not in caplog.text
