"""States of an `Accelerator` in one process: what a resumed job does that an uninterrupted one does, and refusals."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast
from holdfast.data import GlobalOrder
from holdfast.errors import ConfigurationError, IncompatibleError, StateError
from tests.project.test_docs import ARGUMENT, signature_rows
from tests.support.bound import assert_same, bits

with warnings.catch_warnings():  # this library's warnings at its import are not ours
    warnings.simplefilter("ignore")
    import accelerate
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DistributedType, set_seed

    from holdfast.trainers.accelerate_state import state_of

pytestmark = pytest.mark.filterwarnings("ignore")  # nor are those while it runs

DOCS = Path(__file__).parents[2] / "docs"
State = dict[str, Any]
Rows = TensorDataset | IterableDataset[Any]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Numbers(IterableDataset[torch.Tensor]):
    """Rows that can only be read one after another."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(22))


class Job:
    """A job with dropout, in epochs of 6 batches. `seedable` is the sampler that accelerate recommends."""

    def __init__(
        self, *, seedable: bool = True, batch_size: int = 4, rows: Rows | None = None, length: int = 22
    ) -> None:
        set_seed(3)
        data = DataLoaderConfiguration(use_seedable_sampler=seedable, dispatch_batches=False)
        self.accelerator = Accelerator(cpu=True, dataloader_config=data)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        dataset = rows or TensorDataset(torch.arange(float(length)).unsqueeze(1))
        loader = DataLoader(dataset, batch_size=batch_size, shuffle=None if rows else True)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.state: State = state_of(self.accelerator)
        self.seen: list[list[int]] = []
        self.batches = self._passes()

    def train(self, num_batches: int) -> None:
        """Train on so many batches more."""
        for batch in islice(self.batches, num_batches):
            rows = batch[0] if isinstance(batch, list) else batch
            self.accelerator.backward(self.model(rows).square().mean())
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.seen.append(rows.flatten().int().tolist())

    def _passes(self) -> Iterator[Any]:
        while True:
            yield from self.loader


def whole(num_batches: int, **options: Any) -> Job:
    """A job that is not interrupted."""
    job = Job(**options)
    job.train(num_batches)
    return job


def rows_of(batches: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def resumed(run: Path, saved: Job, **options: Any) -> Job:
    """A new job that goes on where the first one is."""
    holdfast.save(run, saved.state, 0)
    job = Job(**options)
    torch.rand(5)
    report = holdfast.load(run, job.state)
    assert report.missing == report.unexpected == ()
    return job


def parts(state: State) -> State:
    return {name: state[name] for name in ("model", "optimizer", "scheduler")}


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("num_batches", [4, 6, 9])
def test_a_resumed_job_goes_on_bit_for_bit(seedable: bool, num_batches: int, tmp_path: Path) -> None:
    expected = whole(num_batches + 7, seedable=seedable)
    job = resumed(tmp_path / "run", whole(num_batches, seedable=seedable), seedable=seedable)
    job.train(7)
    assert job.seen == expected.seen[num_batches:]
    assert_same(parts(expected.state), parts(job.state))


def test_a_job_that_resumes_twice_goes_on_bit_for_bit(tmp_path: Path) -> None:
    second = resumed(tmp_path / "first", whole(2))
    second.train(2)
    third = resumed(tmp_path / "second", second)
    again = resumed(tmp_path / "third", third)  # saved again before a pass began
    again.train(6)
    expected = whole(10)
    assert again.seen == expected.seen[4:]
    assert_same(parts(expected.state), parts(again.state))


def test_another_size_of_batches_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    job = resumed(tmp_path / "run", whole(4), batch_size=3)
    job.train(2)  # the 6 samples that are left
    again = resumed(tmp_path / "again", job)
    again.train(6)
    expected = whole(12).seen
    assert rows_of(job.seen) == rows_of(expected[4:6])
    assert again.seen == expected[6:]


def test_a_pass_of_the_samples_that_are_left_resumes_in_its_middle(tmp_path: Path) -> None:
    job = resumed(tmp_path / "run", whole(3), batch_size=3)
    job.train(1)
    again = resumed(tmp_path / "again", job, batch_size=3)
    again.train(3)
    assert rows_of(job.seen + again.seen) == rows_of(whole(6).seen[3:])


def test_rows_that_are_read_one_after_another_are_skipped(tmp_path: Path) -> None:
    job = resumed(tmp_path / "run", whole(4, rows=Numbers()), rows=Numbers())
    job.train(4)
    assert job.seen == whole(8, rows=Numbers()).seen[4:]


def test_a_restore_in_the_middle_of_a_pass_asks_for_a_new_one(run: str) -> None:
    job = Job()
    job.train(2)
    holdfast.save(run, job.state, 0)
    batches = iter(job.loader)
    next(batches)
    holdfast.load(run, job.state)
    with pytest.raises(ConfigurationError, match="Begin a new iteration") as caught:
        next(batches)
    assert caught.value.code == "config.batch"
    job.batches = iter(job.loader)
    job.train(4)
    assert sorted(rows_of(job.seen)) == [*range(22)]


def test_another_length_of_the_dataset_is_refused(run: str) -> None:
    with pytest.raises(IncompatibleError, match="num_samples: 22 in the checkpoint, 23 here") as caught:
        resumed(Path(run), Job(), length=23)
    assert caught.value.code == "incompatible.dataset"


def test_a_batch_is_counted_once_however_often_the_state_is_made() -> None:
    job = Job()
    again: State = state_of(job.accelerator)
    job.train(3)
    assert again["loader"]["position"] is job.state["loader"]["position"]
    assert again["loader"]["position"].state_dict()["batches"] == 3


def test_a_save_between_two_micro_batches_is_refused(run: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*trained())
    state = state_of(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)))
    with pytest.raises(StateError, match="a step that is not finished") as caught:
        holdfast.save(run, state, 0)
    assert caught.value.code == "state.gradients"
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1)))
        optimizer.step()
    holdfast.save(run, state, 0)
    accelerator.step = 0
    holdfast.load(run, state)
    assert accelerator.step == 2


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_the_calls_with_names_in_the_guide_name_models_and_loaders() -> None:
    (code,) = re.findall(r"```py\n(.*?)```", (DOCS / "guides" / "accelerate.md").read_text(), re.DOTALL)
    models, loaders = code.splitlines()
    accelerator = Accelerator(cpu=True)
    (g, of_g), (c, of_c) = (accelerator.prepare(*trained()) for _ in range(2))
    names = {"state_of": state_of, "accelerator": accelerator, "g": g, "c": c, "of_g": of_g, "of_c": of_c}
    exec(models, names)
    entries = {"generator", "critic", "generator_optimizer", "critic_optimizer", "accelerator", "random"}
    assert {*names["state"]} == entries
    accelerator = Accelerator(cpu=True)
    two_loaders(accelerator)
    names = {"state_of": state_of, "accelerator": accelerator, "train_loader": accelerator._dataloaders[0]}
    exec(loaders, names)
    assert {*names["state"]} == {"model", "optimizer", "loader", "accelerator", "random"}


def test_several_models_have_the_names_that_they_are_given(run: str) -> None:
    accelerator = Accelerator(cpu=True)
    (first, of_first), (second, of_second) = (accelerator.prepare(*trained()) for _ in range(2))
    names = {"generator": first, "critic": second, "of_generator": of_first, "of_critic": of_second}
    state = state_of(accelerator, names=names)
    assert {*state} == {*names, "accelerator", "random"}
    holdfast.save(run, state, 0)
    assert "critic/weight" in holdfast.open(run).names()
    assert bits(holdfast.open(run)["critic/weight"][...]) == bits(second.weight)


def test_registered_objects_have_the_names_of_their_classes_and_belong_to_the_state_once(run: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    average, counter = nn.Linear(1, 1), Counter()
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(scheduler, average, counter)
    state = state_of(accelerator)
    assert state["registered"] == {"Linear": average, "Counter": counter}
    counter.count = 5
    holdfast.save(run, state, 0)
    counter.count = 0
    holdfast.load(run, state)
    assert counter.count == 5
    assert {"registered/Linear/weight", "model/weight"} <= {*holdfast.open(run).names()}


def test_a_gradient_scaler_belongs_to_the_state(run: str) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*trained())
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # accelerate makes one where there is a GPU
    accelerator.scaler.scale(torch.ones(1))
    state = state_of(accelerator)
    holdfast.save(run, state, 0)
    accelerator.scaler.update(2.0)
    holdfast.load(run, state)
    assert accelerator.scaler.state_dict()["scale"] == 8.0


def test_only_the_named_loader_is_followed() -> None:
    accelerator = Accelerator(cpu=True)
    rows = TensorDataset(torch.zeros(4, 1))
    accelerator.prepare(*trained())
    train_loader, _ = accelerator.prepare(DataLoader(rows), DataLoader(rows))
    state: State = state_of(accelerator, names={"loader": train_loader})
    next(iter(train_loader))
    assert state["loader"]["position"].state_dict()["batches"] == 1


def two_models(accelerator: Accelerator) -> None:
    for _ in range(2):
        accelerator.prepare(*trained())


def two_loaders(accelerator: Accelerator) -> None:
    rows = TensorDataset(torch.zeros(4, 1))
    accelerator.prepare(*trained(), DataLoader(rows), DataLoader(rows))


def two_of_a_class(accelerator: Accelerator) -> None:
    accelerator.prepare(*trained())
    accelerator.register_for_checkpointing(Counter(), Counter())


def no_state(accelerator: Accelerator) -> None:
    accelerator.prepare(*trained())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    vars(accelerator)["_custom_objects"].append(object())


def an_order(accelerator: Accelerator) -> None:
    order = GlobalOrder(4, global_batch_size=2, seed=1)
    accelerator.prepare(*trained(), DataLoader(TensorDataset(torch.zeros(4, 1)), batch_sampler=order))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda accelerator: None, "has prepared no model and no optimizer"),
        (two_models, r"has 2 models, and nothing says which is which.*names=\{'first_model'"),
        (two_loaders, r"has 2 loaders.*names=\{'loader': train_loader\}"),
        (two_of_a_class, "has 2 registered Counters"),
        (no_state, "an object is registered for checkpointing, and has no state_dict"),
        (an_order, "batch sampler GlobalOrder went through accelerator.prepare"),
    ],
)
def test_an_accelerator_whose_parts_are_not_clear_is_refused(make: Callable[[Accelerator], None], text: str) -> None:
    accelerator = Accelerator(cpu=True)
    make(accelerator)
    with pytest.raises(ConfigurationError, match=f"(?s){text}") as caught:
        state_of(accelerator)
    assert caught.value.code == "config.accelerator"


def test_names_of_other_objects_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(*trained())
    with pytest.raises(ConfigurationError, match="'critic', a Linear that the accelerator has neither prepared"):
        state_of(accelerator, names={"critic": nn.Linear(1, 1)})
    with pytest.raises(ConfigurationError, match="'random', an entry that state_of makes itself"):
        state_of(accelerator, names={"random": model})


def test_versions_and_plugins_without_a_test_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*trained())
    with monkeypatch.context() as patch:
        patch.setattr(accelerate, "__version__", "1.16.0")
        with pytest.raises(ConfigurationError, match=r"accelerate 1\.16\.0 is installed.*Install accelerate 1\.15"):
            state_of(accelerator)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MEGATRON_LM)
    with pytest.raises(ConfigurationError, match="trains with MEGATRON_LM"):
        state_of(accelerator)


def test_the_reference_has_every_argument() -> None:
    page = (DOCS / "reference.md").read_text()
    text = page.split("## `state_of`")[1].split("\n## ")[0]
    rows = [(argument, kind.replace("\\|", "|"), default) for argument, kind, default in ARGUMENT.findall(text)]
    assert rows == signature_rows(state_of)


def test_a_model_with_buffers_whose_ddp_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(accelerator.state, "distributed_type", DistributedType.MULTI_CPU)
    with pytest.raises(ConfigurationError, match=r"'model' has buffers.*names=\{'model': model\}") as caught:
        state_of(accelerator)
    assert caught.value.code == "config.accelerator"
