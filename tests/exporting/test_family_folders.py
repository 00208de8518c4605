"""The rules of `holdfast.mapping.family`, with classes of transformers: in and out, on other layouts, bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.mapping import Family, family
from tests.exporting.exported_runs import bits
from tests.support.ranks import run_ranks

with warnings.catch_warnings():  # the library's warnings at its import are not ours
    warnings.simplefilter("ignore")
    import transformers

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

#: Dtype, shape and bytes of a tensor.
Bits = tuple[torch.dtype, torch.Size, bytes]
TINY = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**TINY, "num_key_value_heads": 2, "eos_token_id": 1, "bos_token_id": 1}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 4},
    "gemma": {**SIZES, "head_dim": 4},
    "gemma2": {**SIZES, "head_dim": 4},
    "phi3": {**SIZES, "pad_token_id": 0},
    "gpt2": {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "eos_token_id": 1, "bos_token_id": 1},
    "gpt_neox": TINY,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 4},
    "olmoe": {**SIZES, "num_experts": 4},
}
FUSED = {"gpt2", "gpt_neox", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe"}


def made(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # biases and norms, too
        parameter.data = torch.randn(parameter.shape)
    return model


def family_in(folder: str | Path) -> Family:
    return family(json.loads((Path(folder) / "config.json").read_text()))


def state_of(model: nn.Module) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


def files_of(folder: Path) -> dict[str, Bits]:
    return {name: bits(item) for file in folder.glob("*.safetensors") for name, item in load_file(file).items()}


def whole(item: Any) -> Bits:
    return bits((item.full_tensor() if hasattr(item, "full_tensor") else item).detach())


def load_divided(name: str, folder: str, run: str) -> dict[str, Bits]:
    """Load a folder into a model of FSDP2, save that, and return its tensors, whole."""
    model = made(name, 2)
    for layer in next(each for each in model.modules() if isinstance(each, nn.ModuleList)):
        fully_shard(layer)
    fully_shard(model)
    state = {"model": model}
    report = holdfast.load(folder, state, mapping=family_in(folder).read())
    assert (report.missing, report.unexpected) == ((), ())
    holdfast.save(run, state, 1)
    return {key: whole(item) for key, item in model.state_dict().items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_goes_into_fsdp2_and_out_again_with_the_names_and_bits_of_save_pretrained(
    tmp_path: Path, name: str
) -> None:
    model, old = made(name, 1), tmp_path / "old"
    model.save_pretrained(old, max_shard_size="10KB")
    world_size = 3 if name in FUSED else 2
    assert run_ranks(world_size, load_divided, name, str(old), str(tmp_path / "run")) == [state_of(model)] * world_size
    holdfast.export(tmp_path / "run", tmp_path / "new", mapping=family_in(old).write(), config=old)
    assert files_of(tmp_path / "new") == files_of(old)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(found.values()), found
    assert state_of(loaded) == state_of(model)


@pytest.mark.parametrize("name", sorted(FUSED))
def test_the_live_names_of_a_class_are_a_folder_that_from_pretrained_reads_too(tmp_path: Path, name: str) -> None:
    model = made(name, 1)
    model.config.save_pretrained(tmp_path / "config")
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "new", config=tmp_path / "config")
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(found.values()), found
    assert state_of(loaded) == state_of(model)


#: Options that decide about names.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}],
    "qwen3": [{"attention_bias": True}],
    "gemma": [{"tie_word_embeddings": False}, {"attention_bias": True}],
    "gemma2": [{"attention_bias": True}],
    "gpt2": [{"tie_word_embeddings": False}],
    "gpt_neox": [{"attention_bias": False}, {"tie_word_embeddings": True}],
    "qwen2_moe": [{"qkv_bias": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}, {"mlp_only_layers": [0, 1]}],
    "qwen3_moe": [{"attention_bias": True}, {"decoder_sparse_step": 3}],
    "olmoe": [{"attention_bias": True}],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_that_a_configuration_gives_are_those_of_the_class(tmp_path: Path, name: str) -> None:
    for at, options in enumerate([{}, *OPTIONS.get(name, [])]):
        config = transformers.AutoConfig.for_model(name, **{**FAMILIES[name], **options})
        model, folder = transformers.AutoModelForCausalLM.from_config(config), tmp_path / str(at)
        model.save_pretrained(folder)
        found = family_in(folder)
        assert found.difference(files_of(folder)) == ((), ()), options
        live = {key for key in state_of(model) if key != "lm_head.weight" or not config.tie_word_embeddings}
        assert found.difference(live) == ((), ()), options
        for key in live:
            assert found.difference(live - {key}) not in (None, ((), ())), key
        base = tmp_path / f"base-{at}"
        model.base_model.save_pretrained(base)
        assert family_in(base).difference(files_of(base)) == ((), ()), options


@pytest.mark.parametrize("name", FAMILIES)
def test_an_export_whose_shapes_are_those_of_another_configuration_is_refused(tmp_path: Path, name: str) -> None:
    model, folder = made(name, 1), tmp_path / "old"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 64}))
    with pytest.raises(holdfast.IncompatibleError, match=r"has the shape \[60, 16\], and .* asks for \[64, 16\]"):
        holdfast.export(folder, tmp_path / "new", config=folder)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("saved", "configured"), [(True, False), (False, True)])
def test_a_head_that_is_tied_only_in_the_state_or_the_configuration_is_refused(
    tmp_path: Path, *, saved: bool, configured: bool
) -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=configured)
    config.save_pretrained(tmp_path / "config")
    config.tie_word_embeddings = saved
    holdfast.save(tmp_path / "run", {"model": transformers.AutoModelForCausalLM.from_config(config)}, 1)
    with pytest.raises(holdfast.IncompatibleError, match=r"lm_head\.weight would be "):
        holdfast.export(tmp_path / "run", tmp_path / "hf", config=tmp_path / "config")
    assert not (tmp_path / "hf").exists()


class Attention(nn.Module):
    """The projections of a layer of GPT-2, GPT-NeoX or Phi-3, as linear layers of their own."""

    def __init__(self, *, bias: bool, kv: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, size, bias=bias) for size in (16, kv, kv))
        self.out = nn.Linear(16, 16, bias=bias)


#: The names of the fused projection and the output projection in a class; and the rows of k.
FUSED_AT = {
    "gpt2": ("transformer.h.{}.attn.c_attn", "transformer.h.{}.attn.c_proj", 16),
    "gpt_neox": ("gpt_neox.layers.{}.attention.query_key_value", "gpt_neox.layers.{}.attention.dense", 16),
    "phi3": ("model.layers.{}.self_attn.qkv_proj", "model.layers.{}.self_attn.o_proj", 8),
}


def by_torch(name: str, model: Any) -> dict[str, torch.Tensor]:
    """The separate projections of all layers, cut out by torch as the class itself cuts activations."""
    items, cut = dict(model.state_dict()), {}
    for at in range(2):
        fused, out, kv = (text.format(at) if isinstance(text, str) else text for text in FUSED_AT[name])
        above = str(fused).rpartition(".")[0]
        for leaf in ("weight", "bias") if name != "phi3" else ("weight",):
            tensor, other = items[f"{fused}.{leaf}"], items[f"{out}.{leaf}"]
            if name == "gpt2" and leaf == "weight":  # Conv1D
                tensor, other = tensor.T, other.T
            if name == "gpt_neox":  # q, k and v of one head after another
                heads = tensor.unflatten(0, (4, 3, 4))
                parts = [heads[:, each].flatten(0, 1) for each in range(3)]
            else:
                parts = list(tensor.split([16, int(kv), int(kv)]))
            for each, part in zip("qkv", parts, strict=True):
                cut[f"{above}.{each}_proj.{leaf}"] = part
            cut[f"{out}.{leaf}"] = other
    return {key: item.contiguous() for key, item in cut.items()}


def load_tensor_parallel(name: str, folder: str, run: str) -> dict[str, Bits]:
    """Load the attention of a folder into layers of their own, divided by tensor parallelism; save these."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layers = [Attention(bias=name != "phi3", kv=int(FUSED_AT[name][2])) for _ in range(2)]
    plan: dict[str, Any] = {f"{each}_proj": ColwiseParallel() for each in "qkv"}
    state: dict[str, torch.Tensor] = {}
    for at, layer in enumerate(layers):
        parallelize_module(layer, mesh, {**plan, "out": RowwiseParallel()})
        fused, out = (str(text).format(at) for text in FUSED_AT[name][:2])
        for key, item in layer.named_parameters():
            above = out if key.startswith("out.") else f"{fused.rpartition('.')[0]}.{key.split('.')[0]}"
            state[f"{above}.{key.split('.')[-1]}"] = item.data
    rules = family_in(folder).read("separate")
    holdfast.load(folder, {"model": state}, mapping=rules, select=[f"model/{key}" for key in state])
    holdfast.save(run, {"model": state}, 1)
    return {key: whole(item) for key, item in state.items()}


@pytest.mark.parametrize("name", FUSED_AT)
def test_fused_projections_become_layers_of_tensor_parallelism(tmp_path: Path, name: str) -> None:
    model = made(name, 1)
    model.save_pretrained(tmp_path / "old")
    wanted = {key: bits(item) for key, item in by_torch(name, model).items()}
    for found in run_ranks(2, load_tensor_parallel, name, str(tmp_path / "old"), str(tmp_path / "run")):
        assert found == wanted


@pytest.mark.parametrize("name", FUSED_AT)
def test_separate_layers_are_exported_to_the_folder_of_the_class(tmp_path: Path, name: str) -> None:
    model, old = made(name, 1), tmp_path / "old"
    model.save_pretrained(old)
    view = family_in(old)
    holdfast.export(old, tmp_path / "separate", mapping=view.read("separate", under=""))
    live = load_file(tmp_path / "separate" / "model.safetensors")
    for key, item in by_torch(name, model).items():
        assert torch.equal(live[key], item)
    holdfast.save(tmp_path / "run", {"model": live}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "new", mapping=view.write("separate"), config=old)
    assert files_of(tmp_path / "new") == files_of(old)


@pytest.mark.parametrize(
    ("saved", "rules", "configured", "direction"),
    [
        ("mixtral", "qwen3_moe", "mixtral", "write"),
        ("qwen3_moe", "mixtral", "qwen3_moe", "write"),
        ("llama", "gpt2", "llama", "separate"),
        ("llama", None, "mixtral", ""),
        ("gpt2", None, "llama", ""),
    ],
)
def test_a_wrong_family_is_an_error_before_any_byte_is_written(
    tmp_path: Path, saved: str, rules: str | None, configured: str, direction: Literal["write", "separate", ""]
) -> None:
    made(configured, 1).config.save_pretrained(tmp_path / "config")
    holdfast.save(tmp_path / "run", {"model": made(saved, 1)}, 1)
    mapping = None if rules is None else family(rules).write("separate" if direction == "separate" else "transformers")
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.export(tmp_path / "run", tmp_path / "hf", mapping=mapping, config=tmp_path / "config")
    assert caught.value.code in ("incompatible.mapping", "incompatible.export")
    assert not (tmp_path / "hf").exists()
