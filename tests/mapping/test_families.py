"""Families of models: each form's rules lead to the names of folders and back, bit for bit, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.decoding import decode_json
from holdfast.mapping import family
from holdfast.mapping.family_shapes import SizesConfig, shape_conflict

HIDDEN, LAYERS, EXPERTS = 8, 3, 4
CONFIG: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS}
QKVO = [f"self_attn.{each}_proj.weight" for each in "qkvo"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
#: The names of a layer in a folder, each with its shape where that is no square.
NAMES: dict[str, list[str]] = {
    "llama": [*QKVO, *NORMS, *(f"mlp.{each}_proj.weight" for each in ("gate", "up", "down"))],
    "mixtral": [
        *(*QKVO, *NORMS, "block_sparse_moe.gate.weight"),
        *(f"block_sparse_moe.experts.{e}.{w}.weight" for e in range(EXPERTS) for w in ("w1", "w2", "w3")),
    ],
    "qwen3_moe": [
        *(*QKVO, *NORMS, "mlp.gate.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        *(f"mlp.experts.{e}.{w}_proj.weight" for e in range(EXPERTS) for w in ("gate", "up", "down")),
    ],
    "gpt2": [
        f"{each}.{leaf}"
        for each in ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        for leaf in ("weight", "bias")
    ],
    "gpt_neox": [
        f"{each}.{leaf}"
        for each in (
            *("attention.query_key_value", "attention.dense", "input_layernorm", "post_attention_layernorm"),
            *("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        )
        for leaf in ("weight", "bias")
    ],
    "phi3": [
        *("self_attn.qkv_proj.weight", "self_attn.o_proj.weight"),
        *("mlp.gate_up_proj.weight", "mlp.down_proj.weight", *NORMS),
    ],
}
#: The names outside of layers.
OUTSIDE = {
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"],
    "gpt_neox": [*(f"gpt_neox.{x}" for x in ("embed_in.weight", "final_layer_norm.weight", "final_layer_norm.bias"))],
}
ABOVE = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
SHAPES = {
    "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
    "attn.c_attn.bias": (3 * HIDDEN,),
    "attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
    "attention.query_key_value.bias": (3 * HIDDEN,),
    "self_attn.qkv_proj.weight": (2 * HIDDEN, HIDDEN),
    "mlp.gate_up_proj.weight": (2 * HIDDEN, HIDDEN),
}


def config_of(name: str) -> dict[str, object]:
    return {
        **CONFIG,
        "model_type": name,
        "tie_word_embeddings": False,
        **({"num_experts": EXPERTS} if name != "mixtral" else {}),
        **({"num_local_experts": EXPERTS} if name == "mixtral" else {}),
    }


def write_folder(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A folder of a tiny model of the family, with its configuration."""
    make = torch.Generator().manual_seed(1)
    heads = {"embed_out.weight" if name == "gpt_neox" else "lm_head.weight": (HIDDEN, HIDDEN)}
    others = OUTSIDE.get(name, ["model.embed_tokens.weight", "model.norm.weight"])
    shapes: dict[str, tuple[int, ...]] = {**heads, **dict.fromkeys(others, (HIDDEN,))}
    for at in range(LAYERS):
        for leaf in NAMES[name]:
            is_flat = leaf.endswith("bias") or "norm" in leaf or "ln_" in leaf
            shapes[f"{ABOVE.get(name, 'model.layers')}.{at}.{leaf}"] = SHAPES.get(
                leaf, (HIDDEN,) if is_flat else (HIDDEN, HIDDEN)
            )
    tensors = {key: torch.randn(shape, generator=make) for key, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return tensors


@pytest.mark.parametrize("form", ["transformers", "separate"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rules_of_a_form_lead_from_a_folder_and_back(
    tmp_path: Path, name: str, form: Literal["transformers", "separate"]
) -> None:
    wanted, known = write_folder(tmp_path / "old", name), family(config_of(name))
    holdfast.export(tmp_path / "old", tmp_path / "live", mapping=known.read(form))
    live = load_file(tmp_path / "live" / "model.safetensors")
    assert (live.keys() == wanted.keys()) == (known.read(form, under="") == [])
    holdfast.save(tmp_path / "run", {"model": live}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "new", mapping=known.write(form), config=tmp_path / "old")
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_the_parts_of_fused_tensors_are_those_of_the_family(tmp_path: Path) -> None:
    stored = write_folder(tmp_path / "neox", "gpt_neox")["gpt_neox.layers.1.attention.query_key_value.weight"]
    rules = family(config_of("gpt_neox")).read("separate", under="")
    holdfast.export(tmp_path / "neox", tmp_path / "a", mapping=rules)
    k = load_file(tmp_path / "a" / "model.safetensors")["gpt_neox.layers.1.attention.k_proj.weight"]
    assert torch.equal(k, stored.view(4, 3, 2, HIDDEN)[:, 1].reshape(HIDDEN, HIDDEN))
    stored = write_folder(tmp_path / "gpt2", "gpt2")["transformer.h.2.attn.c_attn.weight"]
    holdfast.export(tmp_path / "gpt2", tmp_path / "b", mapping=family("gpt2").read("separate", under=""))
    v = load_file(tmp_path / "b" / "model.safetensors")["transformer.h.2.attn.v_proj.weight"]
    assert torch.equal(v, stored[:, 2 * HIDDEN :].T)
    experts = write_folder(tmp_path / "mixtral", "mixtral")
    holdfast.export(tmp_path / "mixtral", tmp_path / "c", mapping=family("mixtral").read(under=""))
    fused = load_file(tmp_path / "c" / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    up = experts["model.layers.0.block_sparse_moe.experts.3.w3.weight"]
    assert torch.equal(fused[3, HIDDEN:], up)


@pytest.mark.parametrize(
    ("saved", "rules", "code"),
    [
        ("mixtral", "qwen3_moe", "incompatible.export"),
        ("qwen3_moe", "mixtral", "incompatible.export"),
        ("llama", "mixtral", "incompatible.mapping"),
        ("gpt2", "", "incompatible.export"),
    ],
)
def test_rules_of_another_family_are_refused_before_anything_is_written(
    tmp_path: Path, saved: str, rules: str, code: str
) -> None:
    write_folder(tmp_path / "old", saved)
    mapping = family(config_of(saved)).read("separate" if saved == "gpt2" else "transformers")
    holdfast.export(tmp_path / "old", tmp_path / "live", mapping=mapping)
    holdfast.save(tmp_path / "run", {"model": load_file(tmp_path / "live" / "model.safetensors")}, 1)
    back = family(rules).write() if rules else None
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.export(tmp_path / "run", tmp_path / "new", mapping=back, config=tmp_path / "old")
    assert caught.value.code == code
    assert not (tmp_path / "new").exists()


def test_a_layer_that_lacks_a_tensor_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "old", "llama")
    with pytest.raises(holdfast.IncompatibleError, match=r"model\.layers\.2\.mlp\.up_proj\.weight would be missing"):
        holdfast.export(tmp_path / "old", tmp_path / "new", config=tmp_path / "old", select="!**.2.mlp.up_proj.*")
    assert not (tmp_path / "new").exists()


def test_an_unknown_family_is_told_of_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path / "old", "llama")
    quantised = {**CONFIG, "quantization_config": {"bits": 4}}
    configs: list[dict[str, object]] = [{"model_type": "bert"}, {"model_type": "llama"}, quantised]
    for at, given in enumerate(configs):
        (tmp_path / "old" / "config.json").write_text(json.dumps({"model_type": "llama", **given}))
        holdfast.export(tmp_path / "old", tmp_path / str(at), config=tmp_path / "old", select="**.0.**")
    told = [record.getMessage() for record in caplog.records if "are not compared" in record.getMessage()]
    expected = ["'bert', whose names holdfast does not know", "has no number of layers", "quantises the weights"]
    assert [text.endswith(end) for text, end in zip(told, expected, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"num_hidden_layers": 2},
            r"layers\.2\.input_layernorm\.weight would be in the folder, as would .* 4 other ten",
        ),
        ({"num_hidden_layers": 4}, r"layers\.3\.input_layernorm\.weight would be missing"),
        ({"tie_word_embeddings": True}, r"lm_head\.weight would be in the folder, and .* no such tensor"),
        ({"attention_bias": True}, r"layers\.0\.self_attn\.k_proj\.bias would be missing"),
        ({"mlp_bias": True}, r"layers\.0\.mlp\.down_proj\.bias would be missing"),
        ({"model_type": "qwen2"}, r"layers\.0\.self_attn\.k_proj\.bias would be missing"),
        ({"model_type": "qwen3"}, r"layers\.0\.self_attn\.k_norm\.weight would be missing"),
        ({"model_type": "gemma2"}, r"layers\.0\.post_feedforward_layernorm\.weight would be missing"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0, 1]}, r"layers\.2\.mlp\.experts\.down_proj"),
        ({"model_type": "olmoe", "mlp_only_layers": [0, 1]}, r"layers\.0\.mlp\.experts\.down_proj"),
    ],
)
def test_names_that_are_not_those_of_the_configuration_are_refused(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    write_folder(tmp_path / "old", "llama")
    (tmp_path / "old" / "config.json").write_text(json.dumps({**config_of("llama"), **changed}))
    with pytest.raises(holdfast.IncompatibleError, match=message) as caught:
        holdfast.export(tmp_path / "old", tmp_path / "new", config=tmp_path / "old")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("model.embed_tokens.weight", (60, 16), "[61, 16], by vocab_size"),
        ("model.layers.0.self_attn.k_proj.weight", (16, 16), "[8, 16], by num_key_value_heads x head_dim"),
        ("model.layers.1.mlp.down_proj.weight", (16, 32), "[16, 24], by intermediate_size"),
        ("model.norm.weight", (8,), "[16], by the hidden size"),
    ],
)
def test_shapes_that_contradict_the_configuration_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], wanted: str
) -> None:
    write_folder(tmp_path / "old", "llama")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    config = json.dumps({**config_of("llama"), **sizes, "intermediate_size": 24})
    (tmp_path / "old" / "config.json").write_text(config)
    found = shape_conflict(decode_json(config.encode(), SizesConfig), {name: shape})
    assert found is not None
    assert (found.name, found.shape) == (name, shape)
    assert f"{list(found.configured)}, by {found.why}" == wanted
    with pytest.raises(holdfast.IncompatibleError, match=r"has the shape .* asks for ") as caught:
        holdfast.export(tmp_path / "old", tmp_path / "new", config=tmp_path / "old")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_a_tensor_outside_of_layers_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path / "old", "llama")
    with pytest.raises(holdfast.IncompatibleError, match=f"{name} would be missing from the folder, and "):
        holdfast.export(tmp_path / "old", tmp_path / "new", config=tmp_path / "old", select=f"!{name}")


def test_a_family_with_experts_needs_none_where_no_layer_has_any() -> None:
    for given in ({"decoder_sparse_step": 9}, {"mlp_only_layers": [0, 1, 2]}):
        known = family({**config_of("qwen3_moe"), **given})
        assert (known.read(under=""), known.write()) == ([], [])
    assert family("qwen3_moe").read(under="") != []


def test_a_configuration_object_is_refused_with_the_call_that_has_its_content() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return {"model_type": "llama"}

    config = Config()
    with pytest.raises(TypeError, match=r"not a Config; write family\(config\.to_dict\(\)\)"):
        family(config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="or a model_type, not"):
        family(None)  # type: ignore[arg-type]


def test_what_is_no_family_or_lacks_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="'bert' is none of the families"):
        family("bert")
    with pytest.raises(ValueError, match="no configuration of a model"):
        family({"model_type": 7})
    with pytest.raises(ValueError, match="need num_attention_heads"):
        family("gpt_neox").read("separate")
    with pytest.raises(ValueError, match="has the forms 'transformers', 'separate', not 'fused'"):
        family("gpt2").write("fused")  # type: ignore[arg-type]
