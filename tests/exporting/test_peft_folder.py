"""Adapters of peft: stock peft loads what holdfast writes, and holdfast loads what stock peft writes."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.mapping import Rename
from tests.exporting.exported_runs import bits
from tests.support.command_line import holdfast_command
from tests.support.ranks import run_ranks

with warnings.catch_warnings():  # the libraries' warnings at their import are not ours
    warnings.simplefilter("ignore")
    import peft
    import transformers

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

#: Dtype, shape and bytes of a tensor.
Bits = tuple[torch.dtype, torch.Size, bytes]
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
#: The live names of all weights of an adapter, as a user selects them.
TRAINED = ["model/**lora_*", "model/**ia3_*", "model/**modules_to_save*", "model/**trainable_tokens_delta*"]

KINDS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, use_dora=True),
    "rank-stabilized lora": lambda: peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4, use_rslora=True),
    "rank-stabilized dora": lambda: peft.LoraConfig(
        target_modules=["q_proj"], r=2, use_dora=True, use_rslora=True, modules_to_save=["lm_head"]
    ),
    "ranks of their own": lambda: peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], r=2, rank_pattern={"down_proj": 3}, alpha_pattern={"q_proj": 16}
    ),
    "lora with biases of its own": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, lora_bias=True),
    "a head and an embedding": lambda: peft.LoraConfig(
        target_modules=["embed_tokens", "down_proj"], r=3, modules_to_save=["lm_head", "norm"]
    ),
    "some tokens": lambda: peft.LoraConfig(
        target_modules=["o_proj"], r=2, trainable_token_indices={"embed_tokens": [1, 5]}
    ),
    "a classifier": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, task_type="SEQ_CLS"),
    "all biases": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, bias="all"),
    "biases of layers": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, bias="lora_only"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def base(kind: str = "", seed: int = 0) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attention_bias=True,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return (transformers.LlamaForSequenceClassification if kind == "a classifier" else transformers.LlamaForCausalLM)(
        config
    )


def randomized(model: Any, seed: int) -> Any:
    """The model with other adapter weights and biases than a new one has."""
    make = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or name.endswith("bias"):
            parameter.data = torch.randn(parameter.shape, generator=make)
    return model


def adapted(kind: str, seed: int) -> Any:
    return randomized(peft.get_peft_model(base(kind), KINDS[kind]()), seed)


def saved_by_peft(model: Any, folder: Path, **options: Any) -> Path:
    # peft says whether it adds embeddings by itself; those that are resized are outside of this
    model.save_pretrained(folder, save_embedding_layers=False, **options)
    return folder


def files_of(folder: Path) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in load_file(folder / WEIGHTS).items()}


def state_of(model: Any) -> dict[str, Bits]:
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_adapter_is_the_folder_that_peft_writes(tmp_path: Path, kind: str) -> None:
    model = adapted(kind, 1)
    stock = saved_by_peft(model, tmp_path / "stock")
    optimizer = torch.optim.AdamW(item for item in model.parameters() if item.requires_grad)
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    report = holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock)
    assert files_of(tmp_path / "made") == files_of(stock)
    assert (report.to, report.num_tensors, report.files) == ("peft", len(files_of(stock)), (WEIGHTS,))
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [CONFIG, WEIGHTS]
    assert (tmp_path / "made" / CONFIG).read_bytes() == (stock / CONFIG).read_bytes()
    loaded = peft.PeftModel.from_pretrained(base(kind), tmp_path / "made")
    wanted = peft.PeftModel.from_pretrained(base(kind), stock)
    assert state_of(loaded) == state_of(wanted)


def mixtral() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2))


#: Adapters of other models, and those that change the model.
OTHERS: dict[str, Any] = {
    "experts": (
        mixtral,
        lambda: peft.LoraConfig(
            target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], r=2
        ),
    ),
    "a tied head": (
        gpt2,
        lambda: peft.LoraConfig(
            target_modules=["c_attn"], r=2, use_dora=True, fan_in_fan_out=True, modules_to_save=["wte", "lm_head"]
        ),
    ),
    "repeated layers": (
        base,
        lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, layer_replication=[[0, 2], [1, 2]]),
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_of_other_models_go_out_and_in_as_peft_has_them(tmp_path: Path, kind: str) -> None:
    model_of, config_of = OTHERS[kind]
    model = randomized(peft.get_peft_model(model_of(), config_of()), 1)
    stock = saved_by_peft(model, tmp_path / "stock")
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock)
    assert files_of(tmp_path / "made") == files_of(stock)
    live = randomized(peft.get_peft_model(model_of(), config_of()), 2)
    report = holdfast.load(stock, {"model": live}, strict=False)
    assert (report.unexpected, len(report.loaded)) == ((), len(files_of(stock)))
    assert files_of(saved_by_peft(live, tmp_path / "again")) == files_of(stock)


@pytest.mark.parametrize(
    "method",
    [
        lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2),
        lambda: peft.VeraConfig(target_modules=["q_proj"], r=2),
        lambda: peft.AdaLoraConfig(target_modules=["q_proj"], init_r=3, total_step=10),
        lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
)
def test_a_method_whose_names_are_not_known_is_refused_out_and_fills_nothing_in(tmp_path: Path, method: Any) -> None:
    model = peft.get_peft_model(base(), method())
    stock = saved_by_peft(model, tmp_path / "stock")
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    with pytest.raises(ConfigurationError, match="holdfast knows the names of LORA and IA3") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock)
    assert caught.value.code == "config.export"
    assert not (tmp_path / "made").exists()
    with pytest.raises(holdfast.IncompatibleError):
        holdfast.load(stock, {"model": peft.get_peft_model(base(), method())}, strict=False)


def test_a_training_loop_exports_its_adapter(tmp_path: Path) -> None:
    model = adapted("rank-stabilized dora", 1)
    stock = saved_by_peft(model, tmp_path / "stock")
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    select = ["model/**lora_*", "model/**modules_to_save*", "optimizer"]
    hub = holdfast.ExportHub(tmp_path / "adapters", every=2, to="peft", config=stock)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(
        tmp_path / "run", state, memory=None, save=holdfast.EverySteps(2), select=select, listeners=[hub]
    ) as checkpointer:
        for step in checkpointer.steps(3):
            model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
            optimizer.step()
            checkpointer.step(step)
    (folder,) = (tmp_path / "adapters").iterdir()
    assert files_of(folder) == files_of(saved_by_peft(model, tmp_path / "after"))


def test_all_biases_beside_a_module_that_is_saved_whole_are_written_and_read_once(tmp_path: Path) -> None:
    """Peft writes the biases of such a module under their names in the model, too, and reads the other ones."""

    def made(seed: int) -> Any:
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, bias="all", modules_to_save=["k_proj"])
        return randomized(peft.get_peft_model(base(), config), seed)

    model = made(1)
    stock = saved_by_peft(model, tmp_path / "stock")
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock)
    once = {name: item for name, item in files_of(stock).items() if ".modules_to_save." not in name}
    assert len(once) == len(files_of(stock)) - 2
    assert files_of(tmp_path / "made") == once
    wanted = state_of(peft.PeftModel.from_pretrained(base(), stock))
    assert state_of(peft.PeftModel.from_pretrained(base(), tmp_path / "made")) == wanted
    for folder in ("stock", "made"):
        live = made(2)
        report = holdfast.load(tmp_path / folder, {"model": live}, strict=False)
        assert (report.unexpected, len(report.loaded)) == ((), len(once))
        expected = made(2)
        peft.set_peft_model_state_dict(expected, peft.utils.load_peft_weights(str(stock), device="cpu"))
        assert state_of(live) == state_of(expected)


@pytest.mark.parametrize(("trained", "configured"), [("all", "none"), ("all", "lora_only"), ("lora_only", "none")])
def test_trained_biases_that_the_configuration_leaves_out_are_refused(
    tmp_path: Path, trained: str, configured: str
) -> None:
    model = peft.get_peft_model(base(), peft.LoraConfig(target_modules=["q_proj"], r=2, bias=trained))
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    stock = saved_by_peft(model, tmp_path / "stock")
    (tmp_path / "config").mkdir()
    known = json.loads((stock / CONFIG).read_text())
    (tmp_path / "config" / CONFIG).write_text(json.dumps(known | {"bias": configured}))
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    with pytest.raises(holdfast.IncompatibleError, match="bias was trained") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=tmp_path / "config")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "made").exists()
    holdfast.export(tmp_path / "run", tmp_path / "right", "peft", config=stock)
    assert files_of(tmp_path / "right") == files_of(stock)
    options: dict[str, Any] = {"config": tmp_path / "config", "select": "model/**lora_*"}
    holdfast.export(tmp_path / "run", tmp_path / "chosen", "peft", **options)
    assert files_of(tmp_path / "chosen") == {name: item for name, item in files_of(stock).items() if "lora_" in name}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_peft_fills_a_live_model_as_peft_does(tmp_path: Path, kind: str) -> None:
    stock = saved_by_peft(adapted(kind, 1), tmp_path / "stock")
    model = adapted(kind, 2)
    report = holdfast.load(stock, {"model": model}, strict=False)
    assert report.unexpected == ()
    assert len(report.loaded) == len(files_of(stock))
    wanted = adapted(kind, 2)
    peft.set_peft_model_state_dict(wanted, peft.utils.load_peft_weights(str(stock), device="cpu"))
    assert state_of(model) == state_of(wanted)
    saved_by_peft(model, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(stock)


def test_a_strict_load_takes_the_adapter_by_its_names_and_refuses_another_one(tmp_path: Path) -> None:
    kind = "a head and an embedding"
    stock, model = saved_by_peft(adapted(kind, 1), tmp_path / "stock"), adapted(kind, 2)
    holdfast.load(stock, {"model": model}, select=["model/**lora_*", "model/**modules_to_save*"])
    saved_by_peft(model, tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(stock)
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(stock, {"model": adapted("lora", 2)}, select="model/**lora_*")
    assert caught.value.code == "incompatible.names"


def load_divided(folder: str, run: str) -> dict[str, Bits]:
    """Load an adapter into a divided model, save that, and return the adapter's weights, whole."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = adapted("lora", 2)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    report = holdfast.load(folder, {"model": model}, select="model/**lora_*")
    holdfast.save(run, {"model": model}, 1)
    items = dict(model.named_parameters())
    return {name: bits(items[name.removeprefix("model/")].full_tensor().detach()) for name in report.loaded}


def test_an_adapter_is_loaded_into_fsdp2_and_exported_from_other_ranks(tmp_path: Path) -> None:
    trained = adapted("lora", 1)
    stock = saved_by_peft(trained, tmp_path / "stock")
    expected = {f"model/{name}": bits(item.detach()) for name, item in trained.named_parameters() if "lora_" in name}
    for world_size in (2, 3):
        run = tmp_path / f"run-{world_size}"
        assert run_ranks(world_size, load_divided, str(stock), str(run)) == [expected] * world_size
        holdfast.export(run, tmp_path / f"made-{world_size}", "peft", config=stock)
        assert files_of(tmp_path / f"made-{world_size}") == files_of(stock)


def test_of_two_adapters_the_caller_chooses_one(tmp_path: Path) -> None:
    model = adapted("lora", 1)
    model.add_adapter("style", KINDS["lora"]())
    model.set_adapter("style")
    randomized(model, 4)
    stock = saved_by_peft(model, tmp_path / "stock")
    assert files_of(stock) != files_of(stock / "style")
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    with pytest.raises(ConfigurationError, match="several adapters: 'default', 'style'") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock)
    assert caught.value.code == "config.export"
    with pytest.raises(ConfigurationError, match="no adapter 'other'"):
        holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=stock, adapter="other")
    assert not (tmp_path / "made").exists()
    for name, folder in (("default", stock), ("style", stock / "style")):
        options = ["--to", "peft", "--config", str(stock), "--adapter", name]
        assert holdfast_command("export", tmp_path / "run", tmp_path / name, *options).status == 0
        assert files_of(tmp_path / name) == files_of(folder)
    # a folder does not know how the model calls its adapter
    rules = [Rename("model/{x:**}.default{leaf:**}", "model/{x}.style{leaf}")]
    randomized(model, 5)
    holdfast.load(stock / "style", {"model": model}, mapping=rules, select="model/**lora_*.style*")
    saved_by_peft(model, tmp_path / "again")
    assert files_of(tmp_path / "again" / "style") == files_of(stock / "style")
    assert files_of(tmp_path / "again") == files_of(stock)


def test_a_checkpoint_without_adapter_weights_and_a_wrong_configuration_are_refused(tmp_path: Path) -> None:
    model = adapted("a head and an embedding", 1)
    stock = saved_by_peft(model, tmp_path / "stock")
    holdfast.save(tmp_path / "plain", {"model": base()}, 1)
    holdfast.save(tmp_path / "run", {"model": model}, 1)
    known = json.loads((stock / CONFIG).read_text())
    for name, changed in (("without", {"modules_to_save": None}), ("method", {"peft_type": "LOHA"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_text(json.dumps(known | changed))
    (tmp_path / "none").mkdir()
    refused: list[tuple[str, Path | None, str, str]] = [
        ("plain", stock, "incompatible.export", "no weights of an adapter"),
        ("run", None, "config.export", "needs its configuration"),
        ("run", tmp_path / "none", "config.export", r"holds no adapter_config\.json"),
        ("run", tmp_path / "method", "config.export", "an adapter of LOHA"),
        ("run", tmp_path / "without", "incompatible.export", "would be read as"),
    ]
    for run, config, code, message in refused:
        with pytest.raises(HoldfastError, match=message) as caught:
            holdfast.export(tmp_path / run, tmp_path / "made", "peft", config=config)
        assert caught.value.code == code
        assert not (tmp_path / "made").exists()
    with pytest.raises(ConfigurationError, match="not that of an adapter"):
        holdfast.export(tmp_path / "run", tmp_path / "made", adapter="default")


@pytest.mark.parametrize(
    ("saved", "configuration"),
    [
        ("dora", "lora"),
        ("lora", "dora"),
        ("lora", "ia3"),
        ("ia3", "lora"),
        ("a head and an embedding", "lora"),
        ("lora", "some tokens"),
        ("some tokens", "lora"),
    ],
)
def test_the_configuration_of_another_adapter_is_refused_before_peft_leaves_weights_out(
    tmp_path: Path, saved: str, configuration: str
) -> None:
    config = saved_by_peft(adapted(configuration, 1), tmp_path / "config")
    holdfast.save(tmp_path / "run", {"model": adapted(saved, 2)}, 1)
    with pytest.raises(HoldfastError) as caught:
        holdfast.export(tmp_path / "run", tmp_path / "made", "peft", config=config)
    assert caught.value.code in {"incompatible.export", "config.export"}
    assert not (tmp_path / "made").exists()


def test_folders_of_other_methods_have_their_own_names_and_a_malformed_configuration_is_refused(tmp_path: Path) -> None:
    tensors = {"base_model.model.a.hada_w1_a": torch.ones(2)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text('{"peft_type": "LOHA"}')
    assert holdfast.open(tmp_path).names() == ["model/base_model.model.a.hada_w1_a"]
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(holdfast.CorruptError, match="is malformed") as caught:
        holdfast.open(tmp_path)
    assert caught.value.code == "corrupt.foreign"
