"""The examples of the guide to mappings do what the guide says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast.geometry import Box
from holdfast.mapping import Fuse, Pad, Rule, family, from_toml
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import StoredTensor
from tests.mapping.test_families import write_folder
from tests.support.models import start_new_job

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "mapping.md").read_text()
BLOCKS: list[str] = re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL)

#: Llama 3 8B, but for the number of layers.
WIDTH, HIDDEN, WORDS, KV_HEADS, SIZE = 4096, 14336, 128256, 8, 128
LAYER = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.v_proj": (KV_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
LLAMA = {
    f"model/model.layers.{i}.{name}.weight": StoredTensor("bfloat16", shape)
    for i in range(2)
    for name, shape in LAYER.items()
} | {
    "model/model.norm.weight": StoredTensor("bfloat16", (WIDTH,)),
    "model/model.embed_tokens.weight": StoredTensor("bfloat16", (WORDS, WIDTH)),
    "model/lm_head.weight": StoredTensor("bfloat16", (WORDS, WIDTH)),
}


def rules(name: str) -> list[Rule]:
    """The rules that a block of the guide gives that name."""
    (block,) = [block for block in BLOCKS if f"{name} = [" in block]
    space: dict[str, Any] = {}
    exec(block, space)
    return cast("list[Rule]", space[name])


def rows(table: CheckpointTable, name: str, first: int) -> tuple[str | None, int]:
    """The stored tensor, and the row in it, from which row `first` of a tensor comes."""
    shape = table.stored[name].shape
    met = [(part, part.meet(Box((first, 0), (1, shape[1])))) for part in table.parts[name]]
    ((source, start),) = [(part.source, found[1].start[0] if found[1].start else 0) for part, found in met if found]
    return source, start


def test_llama_gets_megatrons_names_shapes_and_order_of_heads() -> None:
    table = mapped(rules("LLAMA"), LLAMA, {}, {})
    assert {name.removeprefix("model/"): one.shape for name, one in table.stored.items() if ".1." not in name} == {
        "decoder.layers.0.self_attention.linear_qkv.weight": (6144, WIDTH),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
        "decoder.layers.0.self_attention.linear_proj.weight": (WIDTH, WIDTH),
        "decoder.layers.0.mlp.linear_fc1.weight": (2 * HIDDEN, WIDTH),
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (WIDTH,),
        "decoder.layers.0.mlp.linear_fc2.weight": (WIDTH, HIDDEN),
        "decoder.final_layernorm.weight": (WIDTH,),
        "embedding.word_embeddings.weight": (131072, WIDTH),
        "output_layer.weight": (131072, WIDTH),
    }
    qkv, attention = "model/decoder.layers.1.self_attention.linear_qkv.weight", "model/model.layers.1.self_attn"
    for head in range(KV_HEADS):
        first = head * 6 * SIZE
        for query in range(4):
            assert rows(table, qkv, first + query * SIZE) == (f"{attention}.q_proj.weight", (4 * head + query) * SIZE)
        assert rows(table, qkv, first + 4 * SIZE) == (f"{attention}.k_proj.weight", head * SIZE)
        assert rows(table, qkv, first + 5 * SIZE) == (f"{attention}.v_proj.weight", head * SIZE)
    assert rows(table, "model/decoder.layers.0.mlp.linear_fc1.weight", HIDDEN) == (
        "model/model.layers.0.mlp.up_proj.weight",
        0,
    )
    assert rows(table, "model/output_layer.weight", WORDS)[0] is None


def test_the_export_is_the_import_backwards() -> None:
    table = mapped([*rules("LLAMA"), *rules("EXPORT")], LLAMA, {}, {})
    assert table.stored == LLAMA
    for name, parts in table.parts.items():
        assert all((part.source, part.start) == (name, part.box.start) for part in parts)


def test_layers_are_stacked_and_single_again() -> None:
    layers = {f"model/layers.{i}.{w}": StoredTensor("float32", (3, 2)) for i in range(4) for w in ("a.weight", "b")}
    stacked = mapped(rules("STACKED"), layers, {}, {})
    assert stacked.stored == {f"model/stacked.{w}": StoredTensor("float32", (4, 3, 2)) for w in ("a.weight", "b")}
    assert mapped([*rules("STACKED"), *rules("SINGLE")], layers, {}, {}).stored == layers


def test_pairs_become_halves() -> None:
    name = "model/layers.0.wq.weight"
    table = mapped(rules("HALVES"), {name: StoredTensor("float32", (4096, 8))}, {}, {})
    pairs = torch.arange(4096).view(32, 64, 2)
    expected = pairs.transpose(1, 2).reshape(-1).tolist()
    found = {part.box.start[0]: part.start[0] for part in table.parts[name]}
    assert [found[row] for row in range(4096)] == expected


def test_the_file_lists_rules() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
    gate_up = Fuse(["model/{l}.gate.weight", "model/{l}.up.weight"], "model/{l}.gate_up.weight")
    assert from_toml(text) == (gate_up, Pad("model/emb.weight", size=50304, fill="keep"))


def test_parts_are_selected_and_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model() -> nn.ModuleDict:
        return nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 3)})

    monkeypatch.chdir(tmp_path)
    saved = model()
    holdfast.save("runs/pretrained", {"model": saved, "step": 7}, 7)
    selecting, casting = BLOCKS[0], BLOCKS[1]
    calls = selecting.splitlines()
    assert len(calls) == 3
    for call, loaded, step in zip(calls, [True, False, False], [0, 0, 7], strict=True):
        live = model()
        state = {"model": live, "step": 0}
        exec(call, {"holdfast": holdfast, "state": state})
        assert torch.equal(live.get_parameter("head.weight"), saved.get_parameter("head.weight")) == loaded
        assert torch.equal(live.get_parameter("layers.0.weight"), saved.get_parameter("layers.0.weight"))
        assert state["step"] == step
    exec(casting, {"holdfast": holdfast, "model": model()})
    assert capsys.readouterr().out == "model/head.bias\n"


def test_a_folder_of_a_family_is_loaded_and_exported_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write_folder(tmp_path / "mixtral", "mixtral")
    monkeypatch.chdir(tmp_path)
    start_new_job()
    (block,) = [block for block in BLOCKS if "import family" in block]
    holdfast.export("mixtral", "live", mapping=family("mixtral").read())
    live = {name: torch.zeros_like(tensor) for name, tensor in load_file("live/model.safetensors").items()}
    exec(block, {"holdfast": holdfast, "model": live})
    found = load_file("hub/model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
