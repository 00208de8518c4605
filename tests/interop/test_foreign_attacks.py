"""Foreign checkpoints that an attacker wrote, or that are sound and easily misread: none hangs, and none gives other
elements than were saved."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import holdfast
from holdfast.interop import pickled_tree
from holdfast.interop.foreign_format import ForeignState
from holdfast.interop.pickle_machine import PickleError, unpickled
from holdfast.interop.pickled_tree import nodes_of
from holdfast.interop.safetensors_header import decode_header
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS
from holdfast.io.jobs import DataFile
from holdfast.mapping import Rename
from tests.interop.test_dcp import metadata_of, write
from tests.interop.torch_archives import rewrite

# Stock DCP warns where there is one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.timeout(20),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "dcp", {"w": torch.arange(6.0).reshape(2, 3), "v": {"lr": 0.5}})


def bomb() -> tuple[Any, ...]:
    """A tuple of a few hundred bytes whose text has 2**40 characters."""
    made: tuple[Any, ...] = (1, 1)
    for _ in range(40):
        made = (made, made)
    return made


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def info_of(metadata: Any) -> Any:
    return metadata.storage_data[MetadataIndex("w", torch.Size([0, 0]))]


def enlarged(tensor: Any) -> Any:
    """A tensor of 8 TiB in the item of a small one."""
    tensor.size = torch.Size([2, 1 << 40])
    tensor.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), tensor.size)]
    return tensor


CHANGES: dict[str, Callable[[Any], None]] = {
    "a path that is a bomb": lambda m: m.planner_data.update(w=bomb()),
    "a shape that is a bomb": lambda m: setattr(m.state_dict_metadata["w"], "size", bomb()),
    "an offset that is a bomb": lambda m: setattr(info_of(m), "offset", bomb()),
    "transforms that are bombs": lambda m: setattr(info_of(m), "transform_descriptors", [bomb()]),
    "a path of 40000 keys": lambda m: m.planner_data.update(w=("w", *[0] * 40_000)),
    "paths of one long text": lambda m: m.planner_data.update(w=("a" * 100_000,) * 100, v=("a",)),
    "a number of 5000 digits in a path": lambda m: m.planner_data.update(w=("w", 10**5000)),
    "a number of 5000 digits as a length": lambda m: setattr(info_of(m), "length", 10**5000),
    "a shape of another item": lambda m: m.state_dict_metadata.update(w=enlarged(m.state_dict_metadata["w"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_hostile_metadata_is_refused_at_once_and_without_its_text(folder: Path, change: str) -> None:
    with pytest.raises(holdfast.CorruptError) as caught:
        holdfast.open(changed(folder, CHANGES[change]))
    assert len(str(caught.value)) < 1000


def test_numbers_that_all_have_one_hash_are_refused_as_keys() -> None:
    colliding = {k * ((1 << 61) - 1): None for k in range(1, 2000)}
    with pytest.raises(PickleError, match="too many large numbers"):
        unpickled(pickle.dumps(colliding), {})
    assert unpickled(pickle.dumps(dict.fromkeys(range(5000))), {}) == dict.fromkeys(range(5000))


def test_a_function_that_is_called_with_one_large_argument_many_times_is_refused() -> None:
    large = (
        b"\x80\x02]q\x01(" + b"))\x86" * 20_000 + b"e0(" + b"ccollections\nOrderedDict\nh\x01\x85R0" * 10_000 + b"t."
    )
    with pytest.raises(PickleError, match="too often"):
        unpickled(large.replace(b"))\x86", b"K\x01N\x86"), ARCHIVE_GLOBALS)


def test_a_list_that_holds_itself_many_times_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_tree, "_MAX_NODES", 1000)
    cyclic: list[Any] = []
    cyclic.extend([cyclic] * 50_000)
    tracemalloc.start()
    try:
        with pytest.raises(PickleError, match="too often"):
            nodes_of("v", cyclic)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_an_optimizer_of_many_groups_with_one_long_list_is_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_tree, "_MAX_NODES", 1000)
    group = {"params": list(range(50_000))}
    with pytest.raises(PickleError, match="too often"):
        nodes_of("v", {"state": {}, "param_groups": [group] * 50_000})


def test_a_header_with_its_last_of_many_names_twice_is_refused_at_once() -> None:
    names = [f'"{number:08d}":0' for number in range(100_000)]
    with pytest.raises(holdfast.CorruptError, match="'00099999' twice"):
        decode_header(f"{{{','.join([*names, names[-1]])}}}".encode(), 0, path="file")


def test_a_conjugate_in_a_folder_of_dcp_is_refused_as_sound_but_unreadable(tmp_path: Path) -> None:
    saved = write(tmp_path / "dcp", {"c": torch.randn(3, dtype=torch.complex64).conj()})
    live = {"c": torch.zeros(3, dtype=torch.complex64)}
    with pytest.raises(holdfast.IncompatibleError, match="conjugate"):
        holdfast.load(saved, live)
    with pytest.raises(holdfast.IncompatibleError, match="conjugate"):
        holdfast.open(saved)["c"][...]


def test_a_dict_of_an_optimizer_is_not_advised_to_lose_its_state(tmp_path: Path) -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))])

    saved = optimizer()
    for parameter in saved.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    folder = write(tmp_path / "dcp", {"optim": saved.state_dict()})
    with pytest.raises(holdfast.StateError, match="Put the module that owns the parameter into the state"):
        holdfast.load(folder, {"optim": optimizer()})
    slots = {
        i: {key: torch.zeros_like(x) for key, x in kept.items()} for i, kept in saved.state_dict()["state"].items()
    }
    live = {"state": slots, "param_groups": [{"params": []}]}
    rule = Rename("optim/state/{i}/{x}", "optim/state/%int={i}/{x}")
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(folder, {"optim": live}, mapping=[Rename("optim/param_groups", "optim/param_groups")])
    assert ".tree(" not in str(caught.value)
    assert f"[Rename({'optim/state/{i}/{x}'!r}, {'optim/state/%int={i}/{x}'!r})]" in str(caught.value)
    holdfast.load(folder, {"optim": live}, mapping=[rule])
    taken = optimizer()
    taken.load_state_dict(live)
    assert torch.equal(taken.state_dict()["state"][1]["exp_avg"], saved.state_dict()["state"][1]["exp_avg"])


def test_a_folder_that_was_saved_again_in_one_file_gives_the_new_weights(tmp_path: Path) -> None:
    stale = {"a": "model-00001-of-00001.safetensors"}
    save_file({"a": torch.zeros(2)}, tmp_path / stale["a"])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": stale}))
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert holdfast.open(tmp_path)["a"][...].tolist() == [1, 1]


def test_an_archive_entry_behind_its_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    rewrite(path, change=("data/0", lambda entry: setattr(entry, "header_offset", (1 << 63) + 5)))
    with pytest.raises(holdfast.CorruptError):
        holdfast.open(path)["w"][...]


def test_a_shape_that_no_array_can_have_is_refused_though_it_has_no_elements() -> None:
    entry = {"dtype": "F32", "shape": [0, 1 << 55, 1 << 55], "data_offsets": [0, 0]}
    with pytest.raises(holdfast.CorruptError, match="impossible shape"):
        decode_header(json.dumps({"w": entry}).encode(), 1000, path="file")


def test_a_file_whose_name_is_no_text_is_read(tmp_path: Path) -> None:
    named = f"{tmp_path}/w\udcff.safetensors"
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    (tmp_path / "x").rename(named)
    assert holdfast.open(tmp_path)["a"][...].tolist() == [1, 1]


def test_a_device_that_torch_does_not_know_is_found_before_anything_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3), "d": torch.device("cuda", 1)}, path)
    data = path.read_bytes()
    assert data.count(b"cuda") == 1
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read("a/data.pkl")
    rewrite(path, {"data.pkl": pickled.replace(b"cuda", b"evil")})
    live = {"w": torch.zeros(3), "d": None}
    with pytest.raises(holdfast.IncompatibleError, match="evil"):
        holdfast.load(path, live)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_one_shard_of_two_without_an_index_is_not_the_whole_model(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"{'pytorch_' if suffix == 'bin' else ''}model-00001-of-00002.{suffix}"
    if suffix == "bin":
        torch.save({"a": torch.ones(2)}, path)
    else:
        save_file({"a": torch.ones(2)}, path)
    with pytest.raises(holdfast.CorruptError, match="lacks 1 file of 2"):
        holdfast.open(tmp_path)
    assert holdfast.open(path).names() == ["a"]


@pytest.mark.parametrize(
    "names", [["model-00001-of-00000", "model-00002-of-00000"], ["m-00001-of-00001", "m-00002-of-00001"]]
)
def test_shards_that_are_more_than_their_total_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(holdfast.CorruptError, match="several sets"):
        holdfast.open(tmp_path)


def test_an_index_without_tensors_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(holdfast.CorruptError, match="malformed index"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "offset"), [("shard-00001-model-00001-of-00001", 0), ("model-00001-of-00001", 2), ("other", 2)]
)
def test_the_rows_of_one_rank_are_not_read_as_the_whole_tensor(tmp_path: Path, name: str, offset: int) -> None:
    info = {"x": {"saved_offsets": [offset, 0]}}
    path = tmp_path / f"{name}.safetensors"
    save_file({"x": torch.ones(2, 3)}, path, {"DCP_SHARDING_INFO": json.dumps(info)})
    for named in (path, tmp_path):
        with pytest.raises(holdfast.IncompatibleError, match="part of one rank"):
            holdfast.open(named)


def test_a_file_of_whole_tensors_is_read_though_torch_notes_their_offsets(tmp_path: Path) -> None:
    info = {"x": {"saved_offsets": [0, 0]}}
    save_file({"x": torch.ones(2, 3)}, tmp_path / "model.safetensors", {"DCP_SHARDING_INFO": json.dumps(info)})
    assert holdfast.open(tmp_path).names() == ["x"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "model.safetensors.index.json", ".snapshot_metadata"])
def test_a_file_inside_a_folder_leads_to_the_folder(folder: Path, name: str) -> None:
    (folder / name).touch()
    with pytest.raises(holdfast.IncompatibleError, match="Name the folder instead") as caught:
        holdfast.open(folder / name)
    assert str(folder) in caught.value.action


def test_a_value_that_cannot_be_read_and_nobody_needs_does_not_stop_a_load_of_what_both_have(tmp_path: Path) -> None:
    saved = write(tmp_path / "dcp", {"a": torch.ones(3), "v": {"lr": 0.5, "unreadable": {1, 2}}})
    live: dict[str, Any] = {"a": torch.zeros(3), "v": {"lr": 0.0}}
    with pytest.raises(holdfast.IncompatibleError, match="unreadable"):
        holdfast.load(saved, live)
    report = holdfast.load(saved, live, strict=False)
    assert live["a"].tolist() == [1, 1, 1]
    assert live["v"]["lr"] == 0.5
    assert "v/unreadable" in report.unexpected


@pytest.mark.parametrize("form", ["dcp", "safetensors", "pt"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_was_written_again_after_it_was_opened_gives_no_other_tensors_elements(
    tmp_path: Path, form: str, verify: bool
) -> None:
    def save(state: dict[str, Any]) -> Path:
        if form == "dcp":
            return write(tmp_path / "dcp", state)
        path = tmp_path / f"model.{form}"
        save_file(state, path) if form == "safetensors" else torch.save(state, path)
        return path

    path = save({"a": torch.zeros(2, 2), "b": torch.ones(2, 2)})
    for file in [path] if path.is_file() else path.iterdir():
        os.utime(file, (1, 1))
    view = holdfast.open(path, verify=verify)
    if form == "dcp":
        shutil.rmtree(path)
    save({"a": torch.ones(2, 2) * 5, "c": torch.ones(2, 2) * 7})
    with pytest.raises(holdfast.CorruptError):
        view["b"][...]


@pytest.mark.parametrize("keeps_time", [False, True], ids=["new time", "time set back"])
@pytest.mark.parametrize("read", ["load", "view"])
def test_a_file_that_was_written_again_in_place_while_it_was_read_gave_old_and_new_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, keeps_time: bool
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, path)
    os.utime(path, (1, 1))
    view, open_file = holdfast.open(path), ForeignState.open_file

    def opened(*arguments: Any, **options: Any) -> DataFile:
        file = open_file(*arguments, **options)
        with path.open("r+b") as other:  # another job has come as far as the last tensor
            other.seek(-16, os.SEEK_END)
            other.write(torch.ones(4).numpy().tobytes())
        if keeps_time:  # as rsync --inplace does, and tar with the times that it stores
            os.utime(path, (1, 1))
        return file

    monkeypatch.setattr(ForeignState, "open_file", opened)
    live = {"a": torch.full((4,), 9.0), "b": torch.full((4,), 9.0)}
    with pytest.raises(holdfast.CorruptError, match="was replaced or changed after it was opened") as caught:
        view["b"][...] if read == "view" else holdfast.load(path, live)
    assert caught.value.code == "corrupt.foreign"
    if read == "load":
        with pytest.raises(holdfast.ConfigurationError) as partly:
            holdfast.save(tmp_path / "run", live, 1)
        assert partly.value.code == "config.partly_filled"


def test_one_bit_of_a_pickle_made_a_tensor_that_of_another_name(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.zeros(4), "b": torch.ones(4)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"X\1\0\0\0001", b"X\1\0\0\0000", 1))  # the name of the storage of b
    assert torch.load(path)["b"].tolist() == [0.0] * 4  # torch does not look at the checksum
    with pytest.raises(holdfast.CorruptError, match=r"data\.pkl does not match its checksum"):
        holdfast.open(path)


def test_an_archive_without_checksums_is_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(4)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert holdfast.open(tmp_path / "model.pt")["a"][...].tolist() == [1.0] * 4


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")
@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "DCP"])
def test_a_file_that_was_written_again_between_its_metadata_and_its_elements_gave_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / {"safetensors": "model.safetensors", "torch.save": "model.pt", "DCP": "folder"}[kind]

    def save(number: int) -> None:
        state = {"a": torch.full((4,), float(number)), "b": torch.full((4,), 10.0 + number)}
        if kind == "safetensors":
            save_file(state, path)
        elif kind == "torch.save":
            torch.save({**state, "number": number}, path)
        else:
            write(path, {**state, "number": number})

    save(0)
    for each in [path] if path.is_file() else path.iterdir():
        os.utime(each, (1, 1))
    make = ForeignState.__init__

    def made(*arguments: Any, **options: Any) -> None:  # the metadata was read
        save(1)
        make(*arguments, **options)

    monkeypatch.setattr(ForeignState, "__init__", made)
    with pytest.raises(holdfast.CorruptError, match="was replaced or changed after it was opened") as caught:
        holdfast.open(path)
    assert caught.value.code == "corrupt.foreign"


def test_metadata_that_is_written_again_behind_the_files_that_it_describes_is_noticed(folder: Path) -> None:
    view = holdfast.open(folder)
    os.utime(folder / ".metadata", (1, 1))
    with pytest.raises(holdfast.CorruptError, match="metadata was replaced or changed"):
        view[next(iter(view.names()))][...]


def test_a_tensor_and_a_value_of_one_path_are_refused(folder: Path) -> None:
    with pytest.raises(holdfast.CorruptError, match="twice"):
        holdfast.open(changed(folder, lambda m: m.planner_data.update({"v.lr": ("w",)})))


def test_a_name_with_half_a_character_is_refused_with_its_file(folder: Path) -> None:
    with pytest.raises(holdfast.IncompatibleError, match="metadata has a name"):
        holdfast.open(changed(folder, lambda m: m.planner_data.update(w=("w\ud800",))))
    with pytest.raises(holdfast.CorruptError, match="malformed header"):
        decode_header(b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', 1000, path="file")
