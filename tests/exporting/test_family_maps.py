"""The guide's rules between Llama's names and Megatron's, with folders of transformers; and rules that do not fit."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import holdfast
from holdfast.mapping import Rename, Rule
from tests.exporting.exported_runs import bits

with warnings.catch_warnings():  # the library's warnings at its import are not ours
    warnings.simplefilter("ignore")
    import transformers

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "mapping.md").read_text()
IN_MODEL = Rename("{x:**}", "model/{x}")
WORDS, PADDED, KV_HEADS, SIZE, LAYERS = 60, 64, 2, 4, 2


def rules(name: str) -> list[Rule]:
    """The rules of that name in the guide, for the sizes of the model here."""
    (block,) = [block for block in re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL) if f"{name} = [" in block]
    for old, new in (("groups=8", f"groups={KV_HEADS}"), ("131072", str(PADDED)), ("128256", str(WORDS))):
        block = block.replace(old, new)
    space: dict[str, Any] = {}
    exec(block, space)
    return cast("list[Rule]", space[name])


def llama() -> Any:
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS}
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def as_megatron(model: Any) -> dict[str, torch.Tensor]:
    """The weights under Megatron's names, laid out by torch: q q q q k v per key-value head, gate above up."""
    stored = model.state_dict()
    made = {"decoder.final_layernorm.weight": stored["model.norm.weight"]}
    for new, old in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        made[f"{new}.weight"] = torch.cat([stored[f"{old}.weight"], torch.zeros(PADDED - WORDS, 32)])
    for at in range(LAYERS):
        old, new = f"model.layers.{at}", f"decoder.layers.{at}"
        q, k, v = (stored[f"{old}.self_attn.{x}_proj.weight"].view(KV_HEADS, -1, SIZE, 32) for x in "qkv")
        made[f"{new}.self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, 32)
        made[f"{new}.mlp.linear_fc1.weight"] = torch.cat([stored[f"{old}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        for to, of in (
            ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
            ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
        ):
            made[f"{new}.{to}"] = stored[f"{old}.{of}"]
    return made


def test_a_folder_of_llama_becomes_megatrons_layers_and_a_folder_again(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "old", max_shard_size="10KB")
    assert (tmp_path / "old" / "model.safetensors.index.json").exists()
    expected = as_megatron(model)
    live = {name: torch.full_like(tensor, 7) for name, tensor in expected.items()}
    report = holdfast.load(tmp_path / "old", {"model": live}, mapping=[IN_MODEL, *rules("LLAMA")])
    assert (report.missing, report.unexpected) == ((), ())
    assert {name: bits(tensor) for name, tensor in live.items()} == {n: bits(t) for n, t in expected.items()}
    holdfast.save(tmp_path / "run", {"model": live}, 1)
    folder = tmp_path / "hf"
    holdfast.export(tmp_path / "run", folder, mapping=rules("EXPORT"), config=tmp_path / "old", shard_nbytes=10_000)
    loaded, found = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    assert {name: bits(tensor) for name, tensor in loaded.state_dict().items()} == {
        name: bits(tensor) for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("family", ["gpt2", "another number of heads", "the other direction"])
def test_a_map_of_another_family_is_an_error_before_any_byte_is_written(tmp_path: Path, family: str) -> None:
    model, chosen = llama(), rules("LLAMA")
    if family == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2))
    if family == "another number of heads":
        chosen = [rule if "groups" not in repr(rule) else _with_groups(rule, 3) for rule in chosen]
    if family == "the other direction":
        chosen = rules("EXPORT")
    model.save_pretrained(tmp_path / "old")
    live = {name: torch.full_like(tensor, 7) for name, tensor in as_megatron(llama()).items()}
    before = {name: bits(tensor) for name, tensor in live.items()}
    for call in (
        lambda: holdfast.load(tmp_path / "old", {"model": live}, mapping=[IN_MODEL, *chosen]),
        lambda: holdfast.export(tmp_path / "old", tmp_path / "hf", mapping=[IN_MODEL, *chosen]),
    ):
        with pytest.raises(holdfast.IncompatibleError, match="Rule") as caught:
            call()
        assert caught.value.code == "incompatible.mapping"
    assert {name: bits(tensor) for name, tensor in live.items()} == before
    assert not (tmp_path / "hf").exists()


def _with_groups(rule: Rule, groups: int) -> Rule:
    from msgspec.structs import replace

    return replace(rule, groups=groups) if getattr(rule, "groups", 1) > 1 else rule
