"""Folders that transformers itself wrote load to the model that its own `from_pretrained` makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.mapping import Rename

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
