"""States of accelerate, Lightning, transformers, peft and torchmetrics: saved, loaded, and trained on.

One file, so that these libraries are imported once. Models are tiny and random; nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import holdfast
from holdfast import IncompatibleError, PerRank, StateError
from holdfast.frameworks.known_types import unwrapped
from holdfast.mapping import Rename
from tests.support.bound import assert_same, bits

with warnings.catch_warnings():  # these libraries' warnings at their import are not ours
    warnings.simplefilter("ignore")
    import lightning
    import torchmetrics
    from accelerate import Accelerator, init_empty_weights
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from peft import LoraConfig, get_peft_model
    from torchmetrics import wrappers
    from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerState,
        TrainingArguments,
        get_cosine_schedule_with_warmup,
    )

pytestmark = pytest.mark.filterwarnings("ignore")  # nor are those while they run

State = dict[str, Any]
Make = Callable[[int], State]


def parts(seed: int) -> tuple[nn.Module, AdamW, LambdaLR]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), lr=0.01)
    return model, optimizer, get_cosine_schedule_with_warmup(optimizer, 2, 20)


def plain(seed: int) -> State:
    return dict(zip(("model", "optimizer", "scheduler"), parts(seed), strict=True))


def accelerated(seed: int) -> State:
    return dict(zip(("model", "optimizer", "scheduler"), Accelerator(cpu=True).prepare(*parts(seed)), strict=True))


def with_fabric(seed: int) -> State:
    model, optimizer, scheduler = parts(seed)
    model, optimizer = lightning.Fabric(accelerator="cpu", devices=1).setup(model, optimizer)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def with_lightning(seed: int) -> State:
    state = plain(seed)
    return state | {"optimizer": LightningOptimizer(state["optimizer"])}


def train(state: State, num_steps: int = 3) -> None:
    """Step the wrapped optimizer, because the wrapper would ask its Trainer."""
    optimizer = state["optimizer"]
    step = optimizer.optimizer.step if isinstance(optimizer, LightningOptimizer) else optimizer.step
    for number in range(num_steps):
        optimizer.zero_grad()
        state["model"](torch.linspace(-1, 1 + number, 20).reshape(5, 4)).square().mean().backward()
        step()
        state["scheduler"].step()


# --- wrappers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [accelerated, with_fabric, with_lightning])
def test_wrapped_objects_go_on_as_they_would_have(make: Make, tmp_path: Path) -> None:
    state, into = make(1), make(2)
    train(state)
    held = dict(into)
    holdfast.save(tmp_path / "run", state, 3)
    report = holdfast.load(tmp_path / "run", into)
    assert report.missing == report.unexpected == ()
    assert all(into[name] is item for name, item in held.items())
    assert_same(state, into)
    train(state)
    train(into)
    assert_same(state, into)


@pytest.mark.parametrize("make", [accelerated, with_fabric, with_lightning])
def test_a_checkpoint_of_wrapped_objects_loads_without_the_library_and_back(make: Make, tmp_path: Path) -> None:
    state, bare, again = make(1), plain(2), make(3)
    train(state)
    holdfast.save(tmp_path / "run", state, 3)
    holdfast.load(tmp_path / "run", bare)
    assert_same({name: unwrapped(item) for name, item in state.items()}, bare)
    holdfast.save(tmp_path / "bare", bare, 3)
    holdfast.load(tmp_path / "bare", again)
    assert_same(state, again)


@pytest.mark.parametrize("make", [accelerated, with_fabric, with_lightning])
def test_saves_in_the_background_hold_back_the_steps_of_wrapped_optimizers(make: Make, tmp_path: Path) -> None:
    state = make(1)
    with holdfast.Checkpointer(tmp_path / "run", state, memory=None) as checkpointer:
        train(state)
        checkpointer.save(3)
    assert_same({"model": unwrapped(state["model"])}, _loaded_model(tmp_path / "run"))


def _loaded_model(path: Path) -> State:
    into = plain(5)
    holdfast.load(path, into)
    return {"model": into["model"]}


def test_loaders_without_a_state_are_refused_with_those_that_have_one() -> None:
    for loader in (
        Accelerator(cpu=True).prepare(DataLoader([1, 2])),  # type: ignore[arg-type]
        lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader([1, 2])),  # type: ignore[arg-type]
    ):
        with pytest.raises(StateError, match="StatefulDataLoader") as caught:
            holdfast.save("/never", {"loader": loader}, 1)
        assert caught.value.code == "state.unsupported_leaf"


def runners(folder: Path) -> dict[str, tuple[object, str]]:
    """Objects that run a job, which may write into `folder`, and what the error says goes into the state instead."""
    model = nn.Linear(2, 1)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none")
    return {
        "accelerator": (Accelerator(cpu=True), "accelerator.prepare"),
        "fabric": (lightning.Fabric(accelerator="cpu", devices=1), "fabric.setup"),
        "lightning": (lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), "trainer.model"),
        "transformers": (Trainer(model, arguments), "on_train_begin"),
        "numbers": (TrainerState(), "state.best_metric"),
        "sampler": (RandomSampler([1, 2]), "the number of batches"),
    }


def test_what_runs_a_job_is_refused_with_what_goes_into_the_state_instead(tmp_path: Path) -> None:
    for runner, said in runners(tmp_path).values():
        with pytest.raises(StateError) as caught:
            holdfast.save("/never", {"runner": runner}, 1)
        assert caught.value.code == "state.unsupported_leaf"
        assert said in caught.value.action


class Positioned(DataLoader[Any]):
    """A loader that says where it is in the data."""

    def __init__(self, position: int) -> None:
        super().__init__(TensorDataset(torch.arange(8)))
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_wrapped_loaders_in_a_list_are_filled_and_not_replaced_by_their_state(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    state, into = ({"loaders": [fabric.setup_dataloaders(Positioned(at))]} for at in (3, 0))
    (loader,) = into["loaders"]
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.load(tmp_path / "run", into)
    assert into["loaders"] == [loader]
    assert loader._dataloader.position == 3


class Averaged(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> State:
        optimizer = AdamW(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))}


def trained_by_lightning(seed: int, num_steps: int) -> State:
    """The objects that a callback finds in a Trainer when a job has ended."""
    lightning.seed_everything(seed, verbose=False)
    average = WeightAveraging()
    trainer = lightning.Trainer(
        max_steps=num_steps,
        accelerator="cpu",
        callbacks=[average],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Averaged(), DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2))
    return {
        "model": trainer.model,
        "optimizers": trainer.optimizers,
        "schedulers": trainer.lr_scheduler_configs,
        "average": average,
        "loop": PerRank(trainer.fit_loop),
    }


def test_a_lightning_trainers_averaged_weights_and_loop_are_saved_whole(tmp_path: Path) -> None:
    state, into = trained_by_lightning(1, 6), trained_by_lightning(2, 2)
    averages = [bits(item.detach()) for item in state["average"]._average_model.parameters()]
    holdfast.save(tmp_path / "run", state, 5)
    report = holdfast.load(tmp_path / "run", into)
    assert report.missing == report.unexpected == ()
    assert [bits(item.detach()) for item in into["average"]._average_model.parameters()] == averages
    assert into["average"]._average_model.n_averaged == 6
    assert into["loop"].value.epoch_loop.global_step == 6
    assert into["schedulers"][0].scheduler.state_dict() == state["schedulers"][0].scheduler.state_dict()


# --- metrics ---------------------------------------------------------------------------------------------------------


def metrics(seed: int) -> State:
    accuracy, mean, own = BinaryAccuracy(), torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    listing = torchmetrics.CatMetric()
    collection = torchmetrics.MetricCollection([BinaryAccuracy(), BinaryF1Score()])
    torch.manual_seed(seed)
    for _ in range(seed):
        predictions, targets = torch.rand(6), torch.randint(2, (6,))
        accuracy.update(predictions, targets)
        collection.update(predictions, targets)
        mean.update(predictions)
        own.update(targets)
        listing.update(predictions)
    return {"accuracy": accuracy, "mean": mean, "listing": listing, "collection": collection, "own": PerRank(own)}


def results(state: State) -> str:
    own = state["own"].value
    return repr([state[name].compute() for name in ("accuracy", "mean", "listing", "collection")] + [own.compute()])


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_metrics_go_on_in_the_middle_of_an_epoch(num_before: int, tmp_path: Path) -> None:
    state, into = metrics(3), metrics(num_before)
    if num_before:
        results(into)  # a result that was computed is kept
    expected = results(state)
    holdfast.save(tmp_path / "run", state, 1)
    holdfast.load(tmp_path / "run", into)
    assert results(into) == expected
    for one in (state, into):
        one["collection"].update(torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
        one["accuracy"].update(torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
    assert results(into) == results(state)


def updated(metric: Any, seed: int) -> None:
    torch.manual_seed(seed)
    metric.update(torch.rand(8), torch.randint(2, (8,)))


def in_steps(metric: Any, seed: int) -> None:
    metric.increment()
    updated(metric, seed)


HOLDERS_OF_METRICS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None]]] = {
    "bootstrap": (lambda: wrappers.BootStrapper(BinaryAccuracy(), num_bootstraps=3), updated),
    "extremes": (lambda: wrappers.MinMaxMetric(BinaryAccuracy()), updated),
    "sum": (lambda: BinaryAccuracy() + 2 * BinaryF1Score(), updated),
    "window": (lambda: wrappers.Running(BinaryAccuracy(), window=3), updated),
    "in a collection": (
        lambda: torchmetrics.MetricCollection({"one": BinaryAccuracy(), "more": BinaryAccuracy() + BinaryF1Score()}),
        updated,
    ),
    "tracker": (lambda: wrappers.MetricTracker(BinaryAccuracy()), in_steps),
    "tracker of a collection": (
        lambda: wrappers.MetricTracker(torchmetrics.MetricCollection([BinaryAccuracy(), BinaryF1Score()])),
        in_steps,
    ),
}


@pytest.mark.parametrize("name", HOLDERS_OF_METRICS)
def test_metrics_that_hold_others_do_not_begin_anew(name: str, tmp_path: Path) -> None:
    make, update = HOLDERS_OF_METRICS[name]
    state, into = make(), make()
    for seed in range(4):
        update(state, seed)
        computed(state)  # some note what they computed
    holdfast.save(tmp_path / "run", {"metric": state}, 1)
    holdfast.load(tmp_path / "run", {"metric": into})
    assert computed(into) == computed(state)
    update(state, 9)
    update(into, 9)
    assert computed(into) == computed(state)


def computed(metric: Any) -> str:
    torch.manual_seed(0)
    return repr(metric.compute_all() if hasattr(metric, "compute_all") else metric.compute())


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.accuracy = BinaryAccuracy()
        self.accuracy.persistent(persistent)


def test_a_metric_in_a_module_is_saved_where_it_is_persistent(tmp_path: Path) -> None:
    for persistent in (False, True):
        path = tmp_path / f"run-{persistent}"
        state, into = Module(persistent=persistent), Module(persistent=persistent)
        state.accuracy.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
        holdfast.save(path, {"model": state}, 1)
        holdfast.load(path, {"model": into})
        assert bits(into.layer.weight.detach()) == bits(state.layer.weight.detach())
        assert into.accuracy.update_count == int(persistent)


# --- transformers and peft -------------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    tokens = torch.arange(12).reshape(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


def test_a_model_with_tied_weights_goes_on_as_it_would_have(tmp_path: Path) -> None:
    states: list[State] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = llama()
        states.append({"model": model, "optimizer": AdamW(model.parameters())})
    trained, into = states
    step(**trained)
    holdfast.save(tmp_path / "run", trained, 1)
    assert holdfast.open(tmp_path / "run").aliases == {"model/model.embed_tokens.weight": "model/lm_head.weight"}
    holdfast.load(tmp_path / "run", into)
    step(**trained)
    step(**into)
    assert_same(trained, into)


def test_rotary_buffers_on_meta_are_refused_with_the_way_that_works(tmp_path: Path) -> None:
    trained = llama()
    holdfast.save(tmp_path / "run", {"model": trained}, 1)
    with torch.device("meta"):
        bare = llama()
    with pytest.raises(IncompatibleError, match="inv_freq") as caught:
        holdfast.load(tmp_path / "run", {"model": bare})
    assert caught.value.code == "incompatible.meta"
    assert "include_buffers=False" in caught.value.action
    assert all(parameter.is_meta for parameter in bare.parameters())
    with init_empty_weights(include_buffers=False):
        model = llama()
    report = holdfast.load(tmp_path / "run", {"model": model})
    assert report.on_meta == ()
    tokens = torch.arange(6).reshape(1, 6)
    assert bits(model(tokens).logits.detach()) == bits(trained(tokens).logits.detach())


def adapted(model: nn.Module) -> Any:
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


def test_adapters_are_saved_alone_and_base_weights_are_loaded_under_them(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = llama()
    trained = AdamW(base.parameters())
    step(base, trained)
    holdfast.save(tmp_path / "base", {"model": base, "optimizer": trained}, 1)
    model = adapted(base)
    optimizer = AdamW([item for item in model.parameters() if item.requires_grad])
    step(model, optimizer)
    lora = ["model/**lora_*", "optimizer"]
    report = holdfast.save(tmp_path / "lora", {"model": model, "optimizer": optimizer}, 1, select=lora)
    assert report.num_tensors == 8 * (1 + 3)
    assert report.nbytes < sum(item.nbytes for item in base.parameters())

    torch.manual_seed(2)
    again = adapted(llama())
    into: State = {"model": again, "optimizer": AdamW([item for item in again.parameters() if item.requires_grad])}
    holdfast.load(
        tmp_path / "base",
        {"model": again.get_base_model()},
        select=["model", "!**lora_*"],
        mapping=[
            Rename(f"model/{{path:**}}.{name}.{{leaf}}", f"model/{{path}}.{name}.base_layer.{{leaf}}")
            for name in ("q_proj", "v_proj")
        ],
    )
    holdfast.load(tmp_path / "lora", into, select=lora)
    assert_same({"model": model, "optimizer": optimizer}, into)
