"""``holdfast export`` writes what `holdfast.export` writes, says so, and needs no torch for Hugging Face."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from tests.support.command_line import ENVIRONMENT, at_terminal, holdfast_command, screen_lines

MAPPING = """
[[rule]]
kind = "rename"
names = "model/{x:**}"
to = "model/net.{x}"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint: a module of 3 MB, and an optimizer."""
    path = tmp_path_factory.mktemp("runs") / "gpt"
    model = torch.nn.Sequential(torch.nn.Linear(900, 500), torch.nn.Linear(500, 600))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(900)).sum().backward()
    optimizer.step()
    holdfast.save(path, {"model": model, "optimizer": optimizer, "samples": 7}, 1)
    return path


def test_the_command_says_what_it_wrote_and_read(run: Path, tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(MAPPING)
    options = ["--dtype", "bfloat16", "--shard-size", "1MB", "--mapping", str(tmp_path / "rules.toml")]
    done = holdfast_command("export", run, tmp_path / "hf", "--to", "hf", *options)
    assert done.status in (0, None), done.err
    assert done.lines[0].startswith("step 1 at 1.1, as hf: 4 tensors, 1.4 MiB in ")
    assert done.lines[1].startswith(f"2 files with tensors in {tmp_path}/hf; read ")
    assert done.lines[1].endswith(" MiB, all of it verified")
    names = [name for file in sorted((tmp_path / "hf").glob("*.safetensors")) for name in load_file(file)]
    assert sorted(names) == ["net.0.bias", "net.0.weight", "net.1.bias", "net.1.weight"]


def test_the_document_for_programs_has_the_fields_of_the_report(run: Path, tmp_path: Path) -> None:
    done = holdfast_command("export", f"{run}@step=1", tmp_path / "dcp", "--to", "dcp", "--json")
    document = done.json
    assert (document["to"], document["files"], document["num_tensors"]) == ("dcp", ["__0_0.distcp"], 8)
    assert (document["step"], document["place"], document["verified"], document["kept"]) == (1, "1.1", True, [])
    assert document["path"] == str(tmp_path / "dcp")


def test_an_export_without_a_format_is_for_hugging_face(run: Path, tmp_path: Path) -> None:
    done = holdfast_command("export", run, tmp_path / "hf", "--select", "model", "--json")
    assert done.json["to"] == "hf"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "onnx"], "'onnx' is no format that holdfast writes"),
        (["--to", "hf", "--shard-size", "huge"], "--shard-size huge is no size"),
        (["--to", "hf", "--dtype", "int8"], "dtype must be a floating dtype"),
        (["--to", "hf", "--dtype", "bf16"], "'bf16' is not a dtype: did you mean 'bfloat16'?"),
        (["--to", "dcp", "--config", "."], "a folder of dcp has no configuration"),
        (["--to", "hf", "--select", "{"], "has a brace outside of a field"),
    ],
)
def test_wrong_options_are_wrong_usage(run: Path, tmp_path: Path, options: list[str], message: str) -> None:
    done = holdfast_command("export", run, tmp_path / "hf", *options)
    assert done.status == 2
    assert message in done.err
    assert "config.export" in done.err
    assert not (tmp_path / "hf").exists()


def test_an_export_to_hugging_face_never_imports_torch(run: Path, tmp_path: Path) -> None:
    code = (
        "import sys, holdfast\n"
        "holdfast.export(sys.argv[1], sys.argv[2], dtype='bfloat16')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "hf")]
    assert subprocess.run(command, env=ENVIRONMENT, check=False).returncode == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_a_refusal_at_a_terminal_names_the_next_action(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("")
    done = at_terminal("export", run, tmp_path / "hf", "--to", "hf")
    assert done.status == 2
    assert screen_lines(done)[-1] == "Name a new or an empty folder."
