"""transformers loads exported models with `from_pretrained`, bit for bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.exporting.exported_runs import bits

with warnings.catch_warnings():  # the library's warnings at its import are not ours
    warnings.simplefilter("ignore")
    import transformers

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
T5 = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=False),
    "tied llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2),
    "t5": lambda: transformers.T5Config(**T5),
}
KINDS = {
    "llama": transformers.LlamaForCausalLM,
    "tied llama": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "t5": transformers.T5ForConditionalGeneration,
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("shard_nbytes", [5_000, 1_000_000])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_from_pretrained_finds_every_weight_of_an_exported_model(
    tmp_path: Path, kind: str, shard_nbytes: int, dtype: str | None
) -> None:
    torch.manual_seed(5)
    model: Any = KINDS[kind](CONFIGS[kind]())
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    model.config.save_pretrained(tmp_path / "config")
    folder = tmp_path / "hf"
    holdfast.export(tmp_path / "run", folder, dtype=dtype, shard_nbytes=shard_nbytes, config=tmp_path / "config")
    assert ((folder / "model.safetensors.index.json").exists()) == (shard_nbytes == 5_000)
    wanted = torch.float32 if dtype is None else torch.bfloat16
    chosen = {"dtype": wanted} if dtype is None else {}  # the exported configuration says it
    loaded, found = KINDS[kind].from_pretrained(folder, **chosen, output_loading_info=True)
    assert loaded.dtype == loaded.config.dtype == wanted
    assert not any(found.values()), found
    expected = {name: bits(tensor.to(wanted)) for name, tensor in model.state_dict().items()}
    assert {name: bits(tensor) for name, tensor in loaded.state_dict().items()} == expected
