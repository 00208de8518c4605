"""Folders that transformers itself wrote load to the model that its own `from_pretrained` makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.mapping import Drop, Rename

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_a_sharded_model_of_transformers_is_what_from_pretrained_makes_of_it(
    tmp_path: Path, shard_size: str, is_tied: bool
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "100KB")
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    report = holdfast.load(tmp_path, {"net": model}, mapping=[Rename("{x:**}", "net/{x}")])
    assert (report.missing, report.unexpected) == ((), ())
    stock = LlamaForCausalLM.from_pretrained(tmp_path)
    wanted = stock.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IN_NET = Rename("{x:**}", "net/{x}")


def tied_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("left_out", ["", EMBED, HEAD])
def test_tied_weights_stay_tied_whichever_of_their_names_a_folder_has(tmp_path: Path, left_out: str) -> None:
    wanted = copies(tied_llama(0))
    save_file({name: tensor for name, tensor in wanted.items() if name != left_out}, tmp_path / "model.safetensors")
    model = tied_llama(1)
    holdfast.load(tmp_path, {"net": model}, mapping=[IN_NET])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_weights_that_differ_in_a_folder_are_not_tied(tmp_path: Path) -> None:
    stored = copies(tied_llama(0))
    stored[HEAD] += 1
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(holdfast.IncompatibleError, match="which differ") as caught:
        holdfast.load(tmp_path, {"net": tied_llama(1)}, mapping=[IN_NET])
    assert caught.value.code == "incompatible.tied"


def test_rotary_buffers_of_older_folders_are_named_and_a_rule_leaves_them_out(tmp_path: Path) -> None:
    wanted = copies(tied_llama(0))
    buffers = {f"model.layers.{at}.self_attn.rotary_emb.inv_freq": torch.ones(4) for at in range(2)}
    save_file(wanted | buffers, tmp_path / "model.safetensors")
    model = tied_llama(1)
    rotary = model.model.rotary_emb.inv_freq.clone()
    before = copies(model)
    with pytest.raises(holdfast.IncompatibleError, match=r"rotary_emb\.inv_freq"):
        holdfast.load(tmp_path, {"net": model}, mapping=[IN_NET])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    report = holdfast.load(tmp_path, {"net": model}, mapping=[IN_NET, Drop("net/**.rotary_emb.inv_freq")])
    assert (report.missing, report.unexpected) == ((), ())
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.model.rotary_emb.inv_freq, rotary)
