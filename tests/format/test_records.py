"""Records: canonical bytes, verified reading, names that list newest first."""

from __future__ import annotations

import json
import math
import string

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import CorruptError, IncompatibleError
from holdfast.format import records
from holdfast.format.records import Commit, Diverged, Epoch, FileSeal, Fork, Marker, Place, Record, Seal, SealDigest

HEX = "0123456789abcdef"
PATH = "somewhere/record.json"

hex16 = st.text(HEX, min_size=16, max_size=16)
hex32 = st.text(HEX, min_size=32, max_size=32)
counts = st.integers(0, 2**63 - 1)
steps = st.integers(0, 10**18 - 1)
ordinals = st.integers(1, 9_999_999_999)
places = st.builds(Place, ordinals, ordinals)
seconds = st.floats(0, 253_402_300_799)
names = st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=40).map(lambda tail: "f" + tail)
files = st.builds(FileSeal, name=names, nbytes=counts, digest=hex32)
metrics = st.dictionaries(st.text(), st.floats().map(records.to_metric))

markers = st.builds(Marker, run_id=hex32, format=st.just("1"), writer=st.text(), created=seconds)
epochs = st.builds(
    Epoch,
    epoch=st.integers(2, 9_999_999_999),
    opened_from=st.builds(Place, st.just(1), ordinals),
    why=st.sampled_from(["resume", "rollback", "takeover"]),
    created=seconds,
    world_size=st.integers(1, 10**6),
    incarnation=hex32,
)
forks = st.builds(Fork, run_id=hex32, place=places, step=counts, path=st.text())
first_epochs = st.builds(
    Epoch,
    epoch=ordinals,
    opened_from=st.none(),
    why=st.just("start"),
    created=seconds,
    world_size=st.integers(1, 10**6),
    incarnation=hex32,
    forked_from=forks | st.just(msgspec.UNSET),
)
seals = st.builds(
    Seal,
    checkpoint_id=hex16,
    place=places,
    step=counts,
    manifest=st.builds(FileSeal, name=st.just("manifest.bin"), nbytes=counts, digest=hex32),
    files=st.lists(files, max_size=4, unique_by=lambda file: file.name).map(tuple),
)

marks = st.lists(st.text(), max_size=20, unique=True).map(sorted).map(Diverged.of)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    step, checkpoint_id = draw(steps), draw(hex16)
    return Commit(
        place=draw(places),
        step=step,
        checkpoint=records.folder_name(step, checkpoint_id),
        checkpoint_id=checkpoint_id,
        seal=draw(st.builds(SealDigest, nbytes=counts, digest=hex32)),
        nbytes=draw(counts),
        created=draw(seconds),
        metrics=draw(metrics),
        diverged=draw(marks),
    )


any_record: st.SearchStrategy[Record] = st.one_of(markers, epochs, first_epochs, seals, commits())

EPOCH = Epoch(
    epoch=2, opened_from=Place(1, 7), why="resume", created=1.5, world_size=8, incarnation="0123456789abcdef" * 2
)
COMMIT = Commit(
    place=Place(3, 12),
    step=700,
    checkpoint="step-0000000700-00112233445566ff",
    checkpoint_id="00112233445566ff",
    seal=SealDigest(nbytes=900, digest="ab" * 16),
    nbytes=2**40,
    created=1_700_000_000.25,
    metrics={"loss": 0.1, "norm": "inf"},
    diverged=Diverged(2, ("model/a", "model/b")),
)


def signed(body: bytes) -> bytes:
    """A file whose digest is right, whatever it says."""
    return body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'


def altered(record: Record, old: str, new: str) -> bytes:
    body = records.encode(record).rpartition(b',"digest"')[0]
    assert old.encode() in body
    return signed(body.replace(old.encode(), new.encode()))


@given(any_record)
def test_what_was_encoded_is_decoded(record: Record) -> None:
    assert records.decode(records.encode(record), type(record), path=PATH) == record


class EpochOfOld(Record, frozen=True, kw_only=True, tag="epoch"):
    """An epoch's record as versions know it that have no forks."""

    epoch: int
    opened_from: Place | None
    why: records.Why
    created: float
    world_size: int
    incarnation: str


@given(first_epochs)
def test_a_version_without_forks_reads_an_epoch_that_has_one(epoch: Epoch) -> None:
    found = records.decode(records.encode(epoch), EpochOfOld, path=PATH)
    assert (found.epoch, found.why, found.incarnation) == (epoch.epoch, "start", epoch.incarnation)


def test_an_epoch_without_a_fork_has_the_bytes_that_it_had_before_there_were_forks() -> None:
    assert b"forked_from" not in records.encode(EPOCH)
    same = EpochOfOld(**{name: getattr(EPOCH, name) for name in EpochOfOld.__struct_fields__})
    assert records.encode(same) == records.encode(EPOCH)


def test_only_an_epoch_that_begins_a_run_can_be_a_fork() -> None:
    fork = Fork(run_id="ab" * 16, place=Place(1, 1), step=7, path="")
    with pytest.raises(ValueError, match="another run"):
        msgspec.structs.replace(EPOCH, forked_from=fork)


@given(any_record)
def test_the_bytes_are_one_canonical_ascii_line_of_json(record: Record) -> None:
    data = records.encode(record)
    assert data.isascii()
    assert data.endswith(b'"}\n')
    assert data.count(b"\n") == 1
    members = json.loads(data)
    assert list(members)[:2] == ["holdfast", "reader_features"]
    assert members["digest"] == xxhash.xxh3_128_hexdigest(data.rpartition(b',"digest"')[0])
    assert records.encode(records.decode(data, type(record), path=PATH)) == data


def test_the_bytes_of_an_epoch_never_change() -> None:
    assert records.encode(EPOCH) == signed(
        b'{"holdfast":"epoch","reader_features":[],"epoch":2,"opened_from":{"epoch":1,"seq":7},"why":"resume",'
        b'"created":1.5,"world_size":8,"incarnation":"0123456789abcdef0123456789abcdef"'
    )


@given(any_record, st.data())
def test_every_change_of_a_byte_is_noticed(record: Record, data: st.DataObject) -> None:
    raw = bytearray(records.encode(record))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError, match=r"corrupt\.record"):
        records.decode(bytes(raw), type(record), path=PATH)


def test_every_truncation_is_noticed_and_the_path_is_named() -> None:
    whole = records.encode(EPOCH)
    for nbytes in range(len(whole)):
        with pytest.raises(CorruptError) as caught:
            records.decode(whole[:nbytes], Epoch, path=PATH)
        assert caught.value.path == PATH


def test_a_record_of_another_kind_is_corruption() -> None:
    with pytest.raises(CorruptError, match="'epoch' record where a 'commit' record"):
        records.decode(records.encode(EPOCH), Commit, path=PATH)


def test_an_unknown_reader_feature_is_refused_by_name_whatever_the_rest_looks_like() -> None:
    newer = signed(b'{"holdfast":"commit","reader_features":["signed-commits"],"place":"as never seen before"')
    with pytest.raises(IncompatibleError, match="signed-commits"):
        records.decode(newer, Commit, path=PATH)


def test_an_unknown_format_of_a_run_is_refused() -> None:
    marker = Marker(run_id="0" * 32, format="2", writer="holdfast 9", created=0.0)
    with pytest.raises(IncompatibleError, match="format '2'"):
        records.decode(records.encode(marker), Marker, path=PATH)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step":700', '"step":7,"step":700'),
        ('"seq":12', '"seq":11,"seq":12'),
        ('"loss":0.1', '"loss":0.2,"loss":0.1'),
        ('"step":700', '"step":700,"new":{"a":[{"b":1,"b":2}]}'),
        ('{"holdfast":"commit"', '{"holdfast":"commit","holdfast":"commit"'),
    ],
)
def test_a_member_that_stands_twice_is_corruption(old: str, new: str) -> None:
    with pytest.raises(CorruptError, match="twice"):
        records.decode(altered(COMMIT, old, new), Commit, path=PATH)


def test_a_time_that_no_calendar_has_is_corruption() -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.record"):
        records.decode(altered(EPOCH, '"created":1.5', '"created":1e300'), Epoch, path=PATH)


def test_what_an_attacker_wrote_is_not_repeated_at_length() -> None:
    feature = altered(EPOCH, '"reader_features":[]', f'"reader_features":["{"x" * 100_000}"]')
    with pytest.raises(IncompatibleError) as unknown:
        records.decode(feature, Epoch, path=PATH)
    with pytest.raises(CorruptError) as other:
        records.decode(altered(EPOCH, '"holdfast":"epoch"', f'"holdfast":"{"x" * 100_000}"'), Epoch, path=PATH)
    assert max(len(str(unknown.value)), len(str(other.value))) < 1000


def test_a_seal_may_be_larger_than_other_records() -> None:
    files = tuple(FileSeal(f"data-{number:05}.safetensors", 2**40, "0" * 32) for number in range(20_000))
    manifest = FileSeal("manifest.hfm", 1, "0" * 32)
    seal = Seal(checkpoint_id="0" * 16, place=Place(1, 1), step=1, manifest=manifest, files=files)
    data = records.encode(seal)
    assert records.MAX_RECORD_NBYTES < len(data) < records.max_nbytes(Seal)
    assert records.decode(data, Seal, path=PATH) == seal


def test_a_member_that_a_newer_writer_added_is_ignored() -> None:
    newer = altered(EPOCH, '"why"', '"host":"a","why"')
    assert records.decode(newer, Epoch, path=PATH) == EPOCH


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"step":700', '"step":-700'),
        ('"step":700', '"step":701'),
        ('"step":700', '"step":"700"'),
        ('"step":700', '"step":7e2'),
        ('"nbytes":900', '"nbytes":-1'),
        ('"nbytes":900', '"nbytes":9223372036854775808'),
        ('"seq":12', '"seq":0'),
        ('"seq":12', '"seq":10000000000'),
        ("step-0000000700", "../-0000000700"),
        ("00112233445566ff", "00112233445566FF"),
        ("abab", "abaz"),
        ('"loss":0.1', '"loss":null'),
        ('"loss":0.1', '"loss":"big"'),
        ('"created":1700000000.25,', ""),
        ('"num_tensors":2', '"num_tensors":1'),
        ('"num_tensors":2', '"num_tensors":17'),
        ('"model/a"', '"model/b"'),
        ('"model/a"', '"model/c"'),
        (',"diverged":{"num_tensors":2,"names":["model/a","model/b"]}', ""),
    ],
)
def test_impossible_content_with_a_right_digest_is_corruption(old: str, new: str) -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.record"):
        records.decode(altered(COMMIT, old, new), Commit, path=PATH)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "a\\b", ".hidden", "a\n", "a b", "x" * 256])
def test_a_file_name_that_could_leave_the_folder_is_refused(name: str) -> None:
    seal = Seal(
        checkpoint_id="0" * 16,
        place=Place(1, 1),
        step=1,
        manifest=FileSeal("manifest.bin", 1, "0" * 32),
        files=(FileSeal(name, 1, "0" * 32),),
    )
    with pytest.raises(ValueError, match="not a valid Seal"):
        records.encode(seal)


def test_a_seal_that_names_a_file_twice_is_refused() -> None:
    file = FileSeal("a", 1, "0" * 32)
    for twice in ((file, file), (FileSeal("seal.json", 1, "0" * 32),), (FileSeal("manifest", 1, "0" * 32),)):
        with pytest.raises(ValueError, match="every file once"):
            Seal(
                checkpoint_id="0" * 16,
                place=Place(1, 1),
                step=1,
                manifest=FileSeal("manifest", 1, "0" * 32),
                files=twice,
            )


def test_an_epoch_cannot_be_opened_from_itself_or_the_future() -> None:
    for origin in (Place(2, 1), Place(3, 1)):
        with pytest.raises(ValueError, match="cannot be opened from"):
            msgspec.structs.replace(EPOCH, opened_from=origin)
    with pytest.raises(ValueError, match="must not name a place"):
        msgspec.structs.replace(EPOCH, why="start")
    with pytest.raises(ValueError, match="must name the place"):
        msgspec.structs.replace(EPOCH, opened_from=None)


def test_a_file_over_the_size_limit_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_NBYTES", 100)
    with pytest.raises(CorruptError, match=r"more than any .epoch. record"):
        records.decode(signed(b'{"holdfast":"epoch"' + b" " * 100), Epoch, path=PATH)
    with pytest.raises(ValueError, match="limit"):
        records.encode(EPOCH)


@pytest.mark.parametrize("body", [b"", b"[", b"{", b'{"a":"\xff"', b'{"a":' + b"[" * 100_000, b"[]", b'{"a":1'])
def test_text_that_is_no_record_is_corruption(body: bytes) -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.record"):
        records.decode(signed(body), Epoch, path=PATH)


def test_whole_numbers_given_as_metrics_give_the_bytes_that_a_reader_would_write() -> None:
    whole = msgspec.structs.replace(COMMIT, metrics={"loss": 2})
    assert records.encode(whole) == records.encode(msgspec.structs.replace(COMMIT, metrics={"loss": 2.0}))


@given(st.floats())
def test_a_metric_survives_its_record(value: float) -> None:
    data = records.encode(msgspec.structs.replace(COMMIT, metrics={"m": records.to_metric(value)}))
    read = float(records.decode(data, Commit, path=PATH).metrics["m"])
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_metric_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid Commit"):
        records.encode(msgspec.structs.replace(COMMIT, metrics={"m": math.nan}))


def test_a_commit_names_16_diverged_tensors_and_counts_all() -> None:
    names = [f"layers/{number:03}" for number in range(40)]
    assert Diverged.of(names) == Diverged(40, tuple(names[:16]))
    assert Diverged.of(names[:16]) == Diverged(16, tuple(names[:16]))
    assert Diverged.of([]) == Diverged(0, ())


def test_a_place_reads_as_people_write_it() -> None:
    assert str(Place(3, 12)) == "3.12"
    assert Place(2, 99) < Place(3, 1) < Place(3, 2)


@given(places, places)
def test_a_listing_of_commits_begins_with_the_newest(a: Place, b: Place) -> None:
    assert (a < b) == (records.commit_key(a) > records.commit_key(b))


@given(places)
def test_names_are_parsed_back(place: Place) -> None:
    epoch_name = records.epoch_key(place.epoch).removeprefix("epochs/")
    commit_name = records.commit_key(place).removeprefix("history/")
    assert records.parse_epoch_name(epoch_name) == place.epoch
    assert records.parse_commit_name(commit_name) == place


@given(steps, hex16)
def test_a_folder_name_is_parsed_back(step: int, checkpoint_id: str) -> None:
    assert records.parse_folder(records.folder_name(step, checkpoint_id)) == (step, checkpoint_id)


def test_keys_are_those_of_the_specification() -> None:
    assert records.epoch_key(1) == "epochs/9999999998.json"
    assert records.commit_key(Place(3, 12)) == "history/9999999996-9999999987.json"
    assert records.checkpoint_key("step-0000000700-00112233445566ff", "seal.json") == (
        "checkpoints/step-0000000700-00112233445566ff/seal.json"
    )


@pytest.mark.parametrize("name", ["9999999998.json~", "9999999998", "x.json", "9999999999.json", "99999999980.json"])
def test_names_that_cannot_be_epochs_are_told_apart(name: str) -> None:
    assert records.parse_epoch_name(name) is None


@pytest.mark.parametrize("name", ["9999999998.json", "9999999998-9999999999.json", "9999999998-9999999998.json.bak"])
def test_names_that_cannot_be_commits_are_told_apart(name: str) -> None:
    assert records.parse_commit_name(name) is None


@pytest.mark.parametrize(("step", "checkpoint_id"), [(-1, "0" * 16), (1, "xyz"), (1, "0" * 15), (10**18, "0" * 16)])
def test_a_folder_name_that_cannot_be_parsed_back_is_refused(step: int, checkpoint_id: str) -> None:
    with pytest.raises(ValueError, match="not valid"):
        records.folder_name(step, checkpoint_id)


@pytest.mark.parametrize("ordinal", [0, -1, 10**10])
def test_an_epoch_that_has_no_name_is_refused(ordinal: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        records.epoch_key(ordinal)
