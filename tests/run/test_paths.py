"""The grammar of paths: the selectors, the characters that belong to a name, and the paths that are refused."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.errors import ConfigurationError, HoldfastError, NotFoundError
from holdfast.format.records import Place
from holdfast.run.paths import Selection, parse
from holdfast.store.base import Location
from holdfast.store.urls import location_of, open_store

roots = st.text("ab@./ =-0", min_size=1).filter(lambda text: text.strip() and not text.endswith("/")).map("/r/".__add__)
ordinals = st.integers(1, 9_999_999_999)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("runs/a", Selection(Location("runs/a"))),
        ("/", Selection(Location("/"))),
        ("runs/a//", Selection(Location("runs/a"))),
        ("runs/a@step=700", Selection(Location("runs/a"), step=700)),
        ("runs/a/@step=0", Selection(Location("runs/a"), step=0)),
        ("runs/a@3.12", Selection(Location("runs/a"), place=Place(3, 12))),
        ("runs/a@latest", Selection(Location("runs/a@latest"))),
        ("runs/a@3", Selection(Location("runs/a@3"))),
        ("runs/a@v1.2.3", Selection(Location("runs/a@v1.2.3"))),
        ("user@host/a", Selection(Location("user@host/a"))),
        ("user@3.12/a", Selection(Location("user@3.12/a"))),
        ("user@step=7/a", Selection(Location("user@step=7/a"))),
        ("a@3.12/", Selection(Location("a@3.12"))),
        ("a@b@3.12", Selection(Location("a@b"), place=Place(3, 12))),
        ("runs/a/checkpoints/step-0000000700-00112233445566ff", None),
    ],
)
def test_a_final_selector_selects_and_any_other_at_sign_is_part_of_the_path(
    text: str, target: Selection | None
) -> None:
    expected = target or Selection(Location(text))
    assert parse(text) == replace(expected, location=Location(str(Path(expected.root).absolute())))


@pytest.mark.parametrize(
    "text", ["a@step=", "a@step=x", "a@step=-1", "a@step=1.5", "a@step=" + "9" * 19, "a@0.1", "a@1.0"]
)
def test_a_malformed_selector_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"RUN@step=700, RUN@3\.12") as caught:
        parse(text)
    assert caught.value.code == "config.path"


@pytest.mark.parametrize("text", ["", "  ", "@step=7", "@3.12", "a\0b"])
def test_a_path_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.path"):
        parse(text)


@pytest.mark.parametrize("text", ["floppy://name/run", "tape://host/run@step=7", "file://server/run", "file://run"])
def test_a_url_is_refused_and_told_what_works(text: str) -> None:
    for refuse in (parse, location_of):
        with pytest.raises(ConfigurationError, match="local or shared file system") as caught:
            refuse(text)
        assert caught.value.code == "config.scheme"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///runs/a", "/runs/a"),
        ("file://localhost/runs/a@step=7", "/runs/a@step=7"),
        ("FILE:///runs/a%20b@3.12", "/runs/a b@3.12"),
    ],
)
def test_a_file_url_is_the_path_in_it(url: str, path: str) -> None:
    assert parse(url) == parse(path)
    assert open_store(parse(url).location).resolved() == open_store(parse(path).location).resolved()


@pytest.mark.parametrize(
    ("path", "url"),
    [
        (Path("s3://bucket/runs/a"), "s3://bucket/runs/a"),
        (Path("gs://bucket/a@step=7"), "gs://bucket/a@step=7"),
        ("sftp:/host/a", "sftp://host/a"),
        (Path("file:///runs/a"), "file:///runs/a"),
    ],
)
def test_a_url_in_a_path_object_names_no_folder_of_this_machine(path: str | Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Pass the URL as a str: '{re.escape(url)}'") as caught:
        parse(path)
    assert caught.value.code == "config.path"


def test_a_url_that_was_made_absolute_named_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (os.path.abspath("s3://b/run@step=7"), Path("s3://b/run@step=7").absolute()):
        with pytest.raises(ConfigurationError, match="Pass the URL as a str: 's3://b/run@step=7'") as caught:
            parse(path)
        assert caught.value.code == "config.path"
    assert parse("./s3:/b/run").location == Location(f"{tmp_path}/s3:/b/run")
    (tmp_path / "s3:").mkdir()  # as one who writes the path above makes it
    assert parse(tmp_path / "s3:" / "b").location == Location(f"{tmp_path}/s3:/b")


@pytest.mark.parametrize("text", ["./s3:/a", "/r/s3:/a", "runs:/a", "c:/a", "s3:a"])
def test_a_folder_may_have_a_colon(text: str) -> None:
    assert parse(text).location.folder == Path.cwd() / text


def test_a_path_object_is_as_good_as_text() -> None:
    assert parse(Path("/runs") / "a@step=7") == Selection(Location("/runs/a"), step=7)


def test_a_path_is_resolved_when_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert parse("runs/a@step=7") == Selection(Location(f"{tmp_path}/runs/a"), step=7)
    assert parse("~/runs/a") == Selection(Location(f"{tmp_path}/home/runs/a"))
    assert parse("./~/runs/a") == Selection(Location(f"{tmp_path}/~/runs/a"))
    with pytest.raises(ConfigurationError, match="knows no home folder for it"):
        parse("~nobody-is-called-so/runs/a")


@pytest.mark.parametrize("command", ["open", "load"])
def test_where_a_relative_path_led_is_said_when_no_run_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFoundError) as caught:
        holdfast.open("runs/a") if command == "open" else holdfast.load("runs/a", into={"a": 0})
    where = f"'{tmp_path}/runs/a' ('runs/a' in the working directory '{tmp_path}')"
    assert caught.value.message == f"no holdfast run at {where}: there is no such folder."
    with pytest.raises(NotFoundError) as caught:
        holdfast.open(tmp_path / "runs/a")
    assert caught.value.message == f"no holdfast run at '{tmp_path}/runs/a': there is no such folder."


def test_a_slip_in_the_name_of_a_file_is_guessed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt")
    with pytest.raises(NotFoundError, match=r"no such folder.*Did you mean 'old\.pt', in the same folder\?"):
        holdfast.load(tmp_path / "olt.pt", into={"w": torch.zeros(1)})


def test_a_relative_path_from_a_folder_that_was_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigurationError, match="working directory of this process was removed"):
        parse("runs/a")


def test_a_path_in_bytes_is_refused() -> None:
    class InBytes(os.PathLike[bytes]):
        def __fspath__(self) -> bytes:
            return b"runs/a"

    with pytest.raises(TypeError, match="bytes"):
        parse(InBytes())  # type: ignore[arg-type]


@given(roots, st.integers(0, 10**18 - 1))
def test_any_root_takes_a_step(root: str, step: int) -> None:
    assert parse(f"{root}@step={step}") == Selection(Location(os.path.normpath(root)), step=step)


@given(roots, ordinals, ordinals)
def test_any_root_takes_a_place(root: str, epoch: int, seq: int) -> None:
    assert parse(f"{root}@{epoch}.{seq}") == Selection(Location(os.path.normpath(root)), place=Place(epoch, seq))


@given(roots, st.none() | st.integers(0, 10**18 - 1))
def test_a_target_with_a_selector_prints_as_it_is_written(root: str, step: int | None) -> None:
    root = os.path.normpath(root)
    target = Selection(Location(root), place=Place(2, 3)) if step is None else Selection(Location(root), step=step)
    assert parse(str(target)) == target


def test_all_ways_to_write_a_folder_resolve_to_one_text(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    ways = (tmp_path / "run", tmp_path / "link", tmp_path / "run" / ".." / "run", f"{tmp_path}//run/")
    assert {open_store(parse(way).location).resolved() for way in ways} == {str((tmp_path / "run").resolve())}


@pytest.mark.parametrize("path", ["meta-llama/Llama-3-8B", "hf://meta-llama/Llama-3-8B"])
def test_the_name_of_a_model_on_the_hub_is_to_be_downloaded(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HoldfastError, match=r"Hugging Face Hub.*ownload"):
        holdfast.load(path, {"model": {}})


@pytest.mark.parametrize(
    ("text", "location", "step"),
    [
        ("s3://bucket/run@step=7", Location("s3://bucket/run"), 7),
        ("s3://bucket/run?region=eu@step=7", Location("s3://bucket/run", (("region", "eu"),)), 7),
        ("gs://bucket/run", Location("gs://bucket/run"), None),
    ],
)
def test_a_selector_follows_the_options_of_an_object_store(text: str, location: Location, step: int | None) -> None:
    found = parse(text)
    assert (found.location, found.step) == (location, step)
    assert parse(location).location == location


@pytest.mark.parametrize("name", ["regoin", "secret_access_key"])
def test_a_slip_in_an_option_of_a_location_is_no_key_error(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(Location("s3://bucket/run@step=7", ((name, "s3cr3t"),)))
    assert caught.value.code == "config.store_option"
    assert "s3cr3t" not in str(caught.value)
