"""Exports to Hugging Face: stock readers find every tensor, bit for bit, whatever layout the checkpoint has."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.errors import ConfigurationError, IncompatibleError
from holdfast.exporting import file_tasks
from holdfast.exporting.chosen_tensors import without_common_container
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.dtypes import DTYPES
from holdfast.mapping import Cast, Fuse, Pad, Rename, Split, Stack, Transpose, Unstack
from holdfast.mapping.rules import Rule
from tests.exporting.exported_runs import Tied, bits, divided_run, names_without, plain_state
from tests.support.command_line import Stored, rows, stored_run

INDEX = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBED = "model.embed.weight"


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return divided_run(tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    holdfast.save(run, plain_state(), 5)
    return run


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 1 MiB, so that tensors lie in several."""
    monkeypatch.setattr(file_tasks, "WINDOW_NBYTES", BLOCK_NBYTES)


def in_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, as the stock reader reads them; an index must name exactly these."""
    files = sorted(folder.glob("*.safetensors"))
    found = [(name, file.name, tensor) for file in files for name, tensor in load_file(file).items()]
    assert len({name for name, _, _ in found}) == len(found)
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"] == {name: file for name, file, _ in found}
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, _, tensor in found)
    else:
        assert [file.name for file in files] == ["model.safetensors"]
    return {name: tensor for name, _, tensor in found}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return {name: bits(tensor) for name, tensor in one.items()} == {n: bits(t) for n, t in other.items()}


def test_a_module_that_ranks_divided_becomes_one_file_with_its_tied_tensor_once(
    divided: Path, tmp_path: Path, small_windows: None
) -> None:
    report = holdfast.export(divided, tmp_path / "hf")
    assert same(in_folder(tmp_path / "hf"), names_without(Tied(), HEAD))
    assert (report.step, report.place, report.to, report.num_tensors, report.num_values) == (3, "1.1", "hf", 7, 0)
    assert (report.files, report.kept, report.verified) == (("model.safetensors",), (), True)
    assert report.written_nbytes == (tmp_path / "hf" / "model.safetensors").stat().st_size
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_have_the_names_of_transformers_and_at_most_their_size(divided: Path, tmp_path: Path) -> None:
    report = holdfast.export(divided, tmp_path / "hf", shard_nbytes=700_000)
    assert report.files == tuple(f"model-{at:05d}-of-00003.safetensors" for at in (1, 2, 3))
    assert same(in_folder(tmp_path / "hf"), names_without(Tied(), HEAD))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [*report.files, INDEX]


@pytest.mark.parametrize("num_files", [1, 8])
def test_every_stored_byte_is_read_once(tmp_path: Path, small_windows: None, num_files: int) -> None:
    make = np.random.default_rng(6)
    arrays = {f"w{at}": make.integers(0, 1 << 31, (8 * 100, 1000), np.int32) for at in range(4)}
    run = stored_run(
        tmp_path / "run", {name: Stored("int32", array, *rows(num_files)) for name, array in arrays.items()}
    )
    report = holdfast.export(run, tmp_path / "hf")
    assert same(in_folder(tmp_path / "hf"), {name: torch.from_numpy(array) for name, array in arrays.items()})
    needed = sum(array.nbytes for array in arrays.values())
    assert needed <= report.read_nbytes <= needed + num_files * 4096  # the values lie in some of the same blocks


def test_only_the_module_of_a_whole_state_is_written(plain: Path, tmp_path: Path) -> None:
    holdfast.export(plain, tmp_path / "hf")
    live = plain_state()["model"]
    assert isinstance(live, Tied)
    assert same(in_folder(tmp_path / "hf"), names_without(live, HEAD))


def test_a_dtype_converts_floating_tensors_and_a_cast_of_the_mapping_is_an_exception(
    divided: Path, tmp_path: Path, small_windows: None
) -> None:
    rules = [Cast("model/model.up.bias", "float64")]
    holdfast.export(divided, tmp_path / "hf", dtype="bfloat16", mapping=rules)
    expected = names_without(Tied(), HEAD)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            expected[name] = tensor.double() if name == "model.up.bias" else tensor.bfloat16()
    assert same(in_folder(tmp_path / "hf"), expected)


@pytest.mark.parametrize("stored", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_numbers_are_rounded_as_torch_rounds_them(tmp_path: Path, stored: str, dtype: str) -> None:
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide = numbers * 10.0 ** torch.randint(-9, 3, (5000,), generator=torch.Generator().manual_seed(2)).double()
    large = [6e4, -6e4] if dtype == "float16" else [1e30, -1e30]
    tensor = torch.cat([wide, torch.tensor([0.0, -0.0, 1e-45, *large])]).to(getattr(torch, stored))
    holdfast.save(tmp_path / "run", {"w": tensor}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    assert same(in_folder(tmp_path / "hf"), {"w": tensor.to(getattr(torch, dtype))})


@pytest.mark.parametrize(
    ("stored", "dtype", "value"),
    [
        ("float32", "float16", 1e30),
        ("bfloat16", "float16", -65536.0),
        ("float64", "bfloat16", 1e300),
        ("float64", "float32", 1e300),
        ("float32", "bfloat16", torch.finfo(torch.float32).max),
        ("float32", "float8_e5m2", 1e6),
    ],
)
def test_a_number_that_would_become_infinite_is_refused_by_its_tensor(
    tmp_path: Path, stored: str, dtype: str, value: float
) -> None:
    fits = torch.tensor([math.inf, -math.inf, 3.0], dtype=getattr(torch, stored))
    bad = torch.tensor([math.inf, math.nan, value, 2.0], dtype=getattr(torch, stored))
    holdfast.save(tmp_path / "run", {"m": {"fits": fits, "bad": bad}}, 1)
    with pytest.raises(IncompatibleError, match=rf"m/bad has the number .*, which {dtype} does not have") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "hf", dtype=dtype)
    assert caught.value.code == "incompatible.export"
    assert f"{float(bad[2]):g}" in caught.value.message
    assert not list((tmp_path / "hf").glob("*.safetensors"))
    holdfast.export(tmp_path / "run", tmp_path / "rest", dtype=dtype, select="m/fits")
    (made,) = in_folder(tmp_path / "rest").values()
    assert same({"x": made}, {"x": fits.to(getattr(torch, dtype))})


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_dtype_for_a_state_without_floats_was_answered_with_advice_on_globs(tmp_path: Path, to: str) -> None:
    holdfast.save(tmp_path / "run", {"m": {"a": torch.arange(3)}}, 1)
    with pytest.raises(ConfigurationError, match="has no floating tensors") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "out", to, dtype="bfloat16")
    assert caught.value.code == "config.export"
    assert not (tmp_path / "out").exists()


def test_a_number_that_rounds_to_the_largest_one_fits(tmp_path: Path) -> None:
    tensor = torch.tensor([65519.0, -65519.0])
    holdfast.save(tmp_path / "run", {"w": tensor}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "hf", dtype="float16")
    assert in_folder(tmp_path / "hf")["w"].tolist() == [65504.0, -65504.0]


def test_rules_rename_split_fuse_stack_and_transpose_on_the_way(tmp_path: Path, small_windows: None) -> None:
    make = torch.Generator().manual_seed(4)
    state = {f"l.{at}.w": torch.randn(300, 400, generator=make) for at in range(4)}
    state["qkv"] = torch.randn(96, 20, generator=make)
    state["vocabulary"] = torch.randn(10, 4, generator=make)
    holdfast.save(tmp_path / "run", state, 1)
    rules: list[Rule] = [
        Stack("l.{i}.w", "layers"),
        Transpose("layers", (0, 2, 1)),
        Split("qkv", ["q", "k", "v"], shares=(2, 1, 1), groups=4),
        Fuse(["k", "v"], "kv"),
        Pad("vocabulary", size=16, fill="zero"),
        Unstack("q", "q.{row}"),
        Rename("q.{row}", "rows.{row}"),
    ]
    holdfast.export(tmp_path / "run", tmp_path / "hf", mapping=rules)
    groups = state["qkv"].reshape(4, 4, 6, 20)
    q, k, v = (groups[:, part].reshape(-1, 20) for part in (slice(0, 2), slice(2, 3), slice(3, 4)))
    expected = {f"rows.{row}": tensor for row, tensor in enumerate(q)}
    expected["kv"] = torch.cat([k, v])
    expected["layers"] = torch.stack([state[f"l.{at}.w"].T for at in range(4)])
    expected["vocabulary"] = torch.cat([state["vocabulary"], torch.zeros(6, 4)])
    assert same(in_folder(tmp_path / "hf"), expected)


def test_every_dtype_that_safetensors_has_is_written_so_that_holdfast_reads_it_back(tmp_path: Path) -> None:
    lacking = {"complex32", "complex128"}
    some_bytes = torch.arange(96, dtype=torch.uint8).reshape(6, 16)
    state = {name: some_bytes.clone().view(getattr(torch, name)) for name in DTYPES if name != "bool"}
    state["bool"] = torch.tensor([True, False])
    holdfast.save(tmp_path / "run", state, 1)
    with pytest.raises(IncompatibleError, match="safetensors files cannot hold") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "hf")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "hf").exists()
    holdfast.export(tmp_path / "run", tmp_path / "hf", select=["!complex32", "!complex128"])
    view = holdfast.open(tmp_path / "hf")
    assert {name: view[name].dtype for name in view.names()} == {name: name for name in DTYPES if name not in lacking}
    for name in view.names():
        assert bits(view[name][...].view(torch.uint8)) == bits(state[name].view(torch.uint8))


def test_a_hugging_face_folder_is_exported_again_from_unaligned_tensors(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(40, 50).half(), "c": torch.randn(9)}
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "model.safetensors")
    report = holdfast.export(tmp_path / "old", tmp_path / "hf", shard_nbytes=100)
    assert same(in_folder(tmp_path / "hf"), tensors)
    assert (report.verified, report.step) == (False, -1)


def test_the_containers_that_all_names_lie_in_are_left_out() -> None:
    assert without_common_container(["model/a.b", "model/c"]) == {"model/a.b": "a.b", "model/c": "c"}
    assert without_common_container(["s/m/a", "s/m/b/c"]) == {"s/m/a": "a", "s/m/b/c": "b/c"}
    assert without_common_container(["model/a", "model2/a"]) == {"model/a": "model/a", "model2/a": "model2/a"}
    assert without_common_container(["a"]) == {"a": "a"}
    assert without_common_container([]) == {}


def test_of_two_modules_the_caller_chooses_one(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"student": torch.nn.Linear(2, 2), "teacher": torch.nn.Linear(3, 3)}, 1)
    with pytest.raises(ConfigurationError, match="'student', 'teacher'") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "hf")
    assert caught.value.code == "config.export"
    holdfast.export(tmp_path / "run", tmp_path / "hf", select="teacher")
    assert in_folder(tmp_path / "hf")["weight"].shape == (3, 3)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rename("a.w", "m/w"), Rename("b.w", "m%2Fw")], "would both get the name 'm/w'"),
        ([Rename("a.w", "__metadata__")], "a name that safetensors reserves"),
        ([Pad("a.w", size=9, fill="keep")], "elements that the checkpoint does not hold"),
    ],
)
def test_names_and_elements_that_do_not_fit_are_refused_before_anything_is_written(
    tmp_path: Path, rules: list[Rule], message: str
) -> None:
    holdfast.save(tmp_path / "run", {"a.w": torch.zeros(3), "b.w": torch.ones(3)}, 1)
    with pytest.raises(IncompatibleError, match=message) as caught:
        holdfast.export(tmp_path / "run", tmp_path / "hf", mapping=rules)
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 1e-05, "dtype": "float32", "z": "\u00e4"}, {"a": 1e-05, "dtype": "bfloat16", "z": "\u00e4"}),
        ({"torch_dtype": "float16", "b": [1]}, {"torch_dtype": "bfloat16", "b": [1]}),
        ({"b": None}, {"b": None, "dtype": "bfloat16"}),
        (
            {"dtype": None, "text_config": {"dtype": "float32"}, "quantization_config": {"dtype": "int4"}},
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "quantization_config": {"dtype": "int4"}},
        ),
        (
            {"dtype": {"": "float32", "vision_config": "float16", "text_config": None}},
            {"dtype": {"": "bfloat16", "vision_config": "bfloat16", "text_config": "bfloat16"}},
        ),
        ({"dtype": "bfloat16", "vocabulary": {"dtype": "x"}}, {"dtype": "bfloat16", "vocabulary": {"dtype": "x"}}),
    ],
)
def test_the_copied_configuration_names_the_dtype_of_the_export_and_keeps_the_rest(
    divided: Path, tmp_path: Path, before: dict[str, object], after: dict[str, object]
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(before))
    holdfast.export(divided, tmp_path / "hf", dtype="bfloat16", config=source)
    written = (tmp_path / "hf" / "config.json").read_text()
    assert list(json.loads(written).items()) == list(after.items())
    assert (written == json.dumps(before)) == (before == after)
    holdfast.export(divided, tmp_path / "same", config=source)
    assert (tmp_path / "same" / "config.json").read_text() == json.dumps(before)


def test_the_copied_configuration_keeps_the_text_of_numbers(divided: Path, tmp_path: Path) -> None:
    text = '{"a": 1e400, "b": [1.50, -2E-05, "1e400"], "c": Infinity, "dtype": "float32"}'
    (tmp_path / "config.json").write_text(text)
    holdfast.export(divided, tmp_path / "hf", dtype="bfloat16", config=tmp_path)
    written = (tmp_path / "hf" / "config.json").read_text()
    assert "".join(written.split()) == text.replace("float32", "bfloat16").replace(" ", "")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "\xff", '{"dtype": 1e400}', '{"dtype": 16}', '{"dtype": {"": []}}', '{"torch_dtype": ["float16"]}'],
)
def test_a_malformed_configuration_is_refused_where_a_dtype_goes_into_it(
    divided: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"has a malformed config\.json") as caught:
        holdfast.export(divided, tmp_path / "hf", dtype="bfloat16", config=tmp_path)
    assert caught.value.code == "config.export"
    assert not (tmp_path / "hf").exists()


def test_the_configuration_and_the_tokenizer_are_copied(divided: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt"}
    for name in (*copied, "model.safetensors", "README.md", "training_args.bin"):
        (source / name).write_text(name)
    holdfast.export(divided, tmp_path / "hf", config=source)
    assert {path.name: path.read_text() for path in (tmp_path / "hf").iterdir() if path.name in copied} == {
        name: name for name in copied
    }
    assert {path.name for path in (tmp_path / "hf").iterdir()} == copied | {"model.safetensors"}
    (source / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"holds no config\.json"):
        holdfast.export(divided, tmp_path / "hf2", config=source)
    assert not (tmp_path / "hf2").exists()
