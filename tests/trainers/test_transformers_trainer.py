"""Jobs of transformers' `Trainer` in one process: what a resumed job does that an uninterrupted one does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import holdfast
from holdfast.data import GlobalOrder
from holdfast.errors import ConfigurationError, IncompatibleError
from tests.project.test_docs import ARGUMENT, signature_rows
from tests.support.bound import bits
from tests.support.models import start_new_job

with warnings.catch_warnings():  # this library's warnings at its import are not ours
    warnings.simplefilter("ignore")
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    from holdfast.trainers.transformers_data import CountedSampler
    from holdfast.trainers.transformers_trainer import HoldfastCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # nor are those while it runs


#: The default suite has one test of each kind.
more = pytest.mark.frameworks

State = dict[str, Any]


class Regression(nn.Module):
    """A model with dropout that notes the samples that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        return {"loss": (self.layers(x)[:, 0] - labels).square().mean()}


ROWS = [{"x": torch.tensor([float(n)]), "labels": torch.tensor(float(n % 3))} for n in range(22)]


class StopError(Exception):
    """The end of a job in the middle of its steps."""


class StoppedTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that an exception stops when `stop` steps have ended."""

    stop = -1

    def training_step(self, *arguments: Any) -> Tensor:
        if self.state.global_step == self.stop:
            raise StopError
        loss: Tensor = super().training_step(*arguments)
        return loss


class Job:
    """One job on `run`, which has been trained when it is made; an exception stops it when `stop` steps have ended.

    22 samples are 6 batches, the last of 2 samples."""

    def __init__(
        self, run: str, max_steps: int = -1, resume: str | None = None, stop: int = -1, **options: Any
    ) -> None:
        start_new_job()
        self.model = Regression()
        own = ("save", "keep", "extra", "at", "select", "on_failed_save")
        saves = {name: options.pop(name) for name in own if name in options}
        callbacks = options.pop("callbacks", [])
        datasets = {"train_dataset": options.pop("train", ROWS), "eval_dataset": options.pop("evaluate", ROWS[:8])}
        kind = options.pop("trainer", StoppedTrainer)
        arguments: State = {"save_steps": 2, "lr_scheduler_type": "constant", "logging_steps": 1}
        arguments |= {"max_steps": max_steps, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
        arguments |= {"disable_tqdm": True, "per_device_eval_batch_size": 8} | options
        self.saves = HoldfastCallback(run, memory=None, **saves)
        folder = str(Path(run).parent / "output")
        self.trainer = kind(
            model=self.model,
            args=TrainingArguments(folder, **arguments),
            **datasets,
            callbacks=[*callbacks, self.saves],
        )
        self.trainer.stop = stop
        with self.saves, pytest.raises(StopError) if stop >= 0 else nullcontext():
            self.trainer.train(resume_from_checkpoint=resume)
        assert not [*Path(folder).glob("checkpoint-*")] or resume

    @property
    def found(self) -> State:
        """The weights and the moments of the optimizer, as bits, and the position."""
        slots = self.trainer.optimizer.state_dict()["state"]
        tensors = [*self.model.state_dict().values(), *(value for slot in slots.values() for value in slot.values())]
        return {
            "bits": [*map(bits, tensors)],
            "step": self.trainer.state.global_step,
            "epoch": self.trainer.state.epoch,
        }


class Breaking(StoppedTrainer):
    """A Trainer whose run can hold no further checkpoint after three steps."""

    def training_step(self, *arguments: Any) -> Tensor:
        if self.state.global_step == 3:
            checkpoints = Path(self.args.output_dir).parent / "run/checkpoints"
            checkpoints.rename(checkpoints.parent.parent / "kept")
            checkpoints.touch()
        return super().training_step(*arguments)


def test_a_job_went_on_for_ever_on_a_store_that_failed(tmp_path: Path) -> None:
    """The callback did not take what a `Checkpointer` takes against that."""
    options: State = {"trainer": Breaking, "on_failed_save": holdfast.StopAfter(missed=2), "max_steps": 30}
    with pytest.raises(holdfast.StorageError, match=r"storage\.stopped.*2 saves in a row.*that of step 1"):
        Job(str(tmp_path / "run"), **options)


def steps_of(run: str) -> list[int]:
    return sorted(checkpoint.step for checkpoint in holdfast.ls(run))


@pytest.mark.parametrize(  # in the first epoch, between epochs, in a later one
    "stop", [pytest.param(3, marks=more), pytest.param(6, marks=more), 8, pytest.param(12, marks=more)]
)
def test_a_resumed_job_ends_with_the_bits_of_an_uninterrupted_one(stop: int, tmp_path: Path) -> None:
    evaluating: State = {"eval_strategy": "steps", "eval_steps": 2}
    whole = Job(str(tmp_path / "whole"), 15, save_steps=20, **evaluating)
    first = Job(str(tmp_path / "parts"), 15, stop=stop, save_steps=stop, **evaluating)
    second = Job(str(tmp_path / "parts"), 15, save_steps=20, **evaluating)
    assert first.model.seen + second.model.seen == whole.model.seen
    assert second.found == whole.found
    assert second.saves.report is not None
    assert second.saves.report.next_step == stop
    assert steps_of(str(tmp_path / "parts")) == [stop - 1, 14]


@more
def test_the_log_of_a_resumed_job_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = Job(str(tmp_path / "whole"), 9, logging_steps=3)
    Job(str(tmp_path / "parts"), 5, logging_steps=5)
    second = Job(str(tmp_path / "parts"), 9, logging_steps=3)
    losses = {entry["step"]: entry["loss"] for entry in whole.trainer.state.log_history if "loss" in entry}
    log = [entry for entry in second.trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in log] == [5, 6, 9]
    assert log[2]["loss"] == losses[9]
    assert log[1]["epoch"] == 1.0


@more
def test_a_job_of_epochs_goes_on_to_the_same_last_step(tmp_path: Path) -> None:
    epochs: State = {"num_train_epochs": 2.5, "save_strategy": "epoch"}
    whole = Job(str(tmp_path / "whole"), **epochs)
    Job(str(tmp_path / "parts"), 8)
    second = Job(str(tmp_path / "parts"), **epochs)
    assert second.found == whole.found
    assert (whole.trainer.state.global_step, whole.trainer.state.epoch) == (15, 2.5)
    assert steps_of(str(tmp_path / "whole")) == [5, 11, 14]


def test_a_finished_job_that_is_started_again_trains_no_step(run: str) -> None:
    first = Job(run, 8)
    second = Job(run, 8)
    assert second.model.seen == []
    assert second.found == first.found
    assert second.trainer.state.global_step == 8
    assert steps_of(run) == [1, 3, 5, 7]


@more
def test_a_step_of_several_batches_goes_on_at_its_first_batch(tmp_path: Path) -> None:
    accumulating: State = {"gradient_accumulation_steps": 3}
    whole = Job(str(tmp_path / "whole"), 7, **accumulating)
    first = Job(str(tmp_path / "parts"), 3, **accumulating)
    second = Job(str(tmp_path / "parts"), 7, **accumulating)
    assert first.model.seen + second.model.seen == whole.model.seen
    assert second.found == whole.found


@more
@pytest.mark.parametrize("stop", [1, 2])  # of two steps of 4 and 2 batches in an epoch
def test_no_sample_is_left_out_where_an_epoch_ends_with_a_shorter_step(stop: int, run: str) -> None:
    accumulating: State = {"gradient_accumulation_steps": 4, "save_steps": 1, "num_train_epochs": 3}
    first = Job(run, stop=stop, **accumulating)
    second = Job(run, **accumulating)
    seen = first.model.seen + second.model.seen
    assert [sorted(seen[start : start + 22]) for start in (0, 22, 44)] == [[*range(22)]] * 3
    assert 3 <= second.trainer.state.epoch < 3 + 16 / 22  # the last step is a whole one


def test_another_size_of_batches_goes_on_at_the_next_sample(run: str) -> None:
    first = Job(run, 8)
    second = Job(run, 20, per_device_train_batch_size=5)
    seen = first.model.seen + second.model.seen
    assert [sorted(seen[start : start + 22]) for start in (0, 22, 44)] == [[*range(22)]] * 3
    third = Job(run, 22, per_device_train_batch_size=5)
    assert third.trainer.state.epoch == pytest.approx((8 * 4 - 2 + 14 * 5) / 22)


def test_training_arguments_say_how_often_to_save_and_what_to_keep(run: str) -> None:
    job = Job(
        run,
        12,
        save_steps=3,
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=3,
        load_best_model_at_end=True,
        learning_rate=0.5,
    )
    measured = {
        entry["step"] - 1: entry["eval_loss"] for entry in job.trainer.state.log_history if "eval_loss" in entry
    }
    best = min(measured, key=lambda step: measured[step])
    assert steps_of(run) == sorted({best, 11})
    (checkpoint,) = (each for each in holdfast.ls(run) if each.step == best)
    assert checkpoint.metrics == {"eval_loss": measured[best]}
    assert job.trainer.evaluate()["eval_loss"] == measured[best]


@more
def test_policies_take_the_place_of_training_arguments(run: str) -> None:
    job = Job(
        run, 12, save=holdfast.EverySteps(5), eval_strategy="steps", eval_steps=4, keep=holdfast.KeepBest("eval_loss")
    )
    kept = steps_of(run)
    assert 11 in kept
    assert len(kept) <= 2
    assert job.saves.exit_code == 0


@more
def test_the_counter_of_early_stopping_goes_on(run: str) -> None:
    def job(steps: int) -> EarlyStoppingCallback:
        stopping = EarlyStoppingCallback(early_stopping_patience=5)
        stopping.early_stopping_patience_counter = 3 if steps == 2 else 0
        Job(run, steps, extra={"stopping": stopping}, save_steps=2)
        return stopping

    job(2)
    assert job(3).early_stopping_patience_counter == 3


class OrderedTrainer(StoppedTrainer):
    """A Trainer whose loader has an order of ours."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        order = GlobalOrder(len(ROWS), global_batch_size=4, seed=7)
        return DataLoader(ROWS, batch_sampler=order, collate_fn=self.data_collator)  # type: ignore[arg-type]


class Stream(IterableDataset[State]):
    """The samples as a stream."""

    def __iter__(self) -> Iterator[State]:
        return iter(ROWS)


@more
@pytest.mark.parametrize("options", [{"trainer": OrderedTrainer}, {"train": Stream()}], ids=["order", "stream"])
def test_loaders_without_a_length_go_on_where_they_were(options: State, tmp_path: Path) -> None:
    whole = Job(str(tmp_path / "whole"), 15, **options)
    first = Job(str(tmp_path / "parts"), 15, stop=8, save_steps=8, **options)
    second = Job(str(tmp_path / "parts"), 15, **options)
    assert first.model.seen + second.model.seen == whole.model.seen
    assert second.found["bits"] == whole.found["bits"]
    assert Job(str(tmp_path / "parts"), 15, **options).model.seen == []


@more
def test_a_step_that_several_evaluations_measure_is_saved_with_all_their_metrics(run: str) -> None:
    datasets: State = {"evaluate": {"few": ROWS[:4], "many": ROWS}, "eval_strategy": "steps", "eval_steps": 2}
    Job(run, 4, **datasets, keep=holdfast.KeepBest("eval_many_loss", 9) | holdfast.KeepLast(9))
    last = next(iter(holdfast.ls(run)))
    assert last.step == 3
    assert last.metrics.keys() == {"eval_few_loss", "eval_many_loss"}


@more
def test_a_selection_of_weights_goes_on_at_the_same_position(tmp_path: Path) -> None:
    chosen = ["model", "scheduler", "random", "trainer"]
    first = Job(str(tmp_path / "run"), 15, stop=8, save_steps=8, select=chosen)
    second = Job(str(tmp_path / "run"), 15, select=chosen)
    assert first.model.seen + second.model.seen == Job(str(tmp_path / "whole"), 15).model.seen


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (
            {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "epoch"},
            "config.trainer_arguments",
        ),
        ({"enable_jit_checkpoint": True}, "config.trainer_arguments"),
        ({"save_strategy": "no"}, "config.no_policy"),
    ],
)
def test_arguments_that_contradict_the_callback_are_refused(options: dict[str, Any], code: str, run: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Job(run, 2, **options)
    assert caught.value.code == code


@more
def test_a_folder_of_the_trainer_is_brought_along_once(tmp_path: Path) -> None:
    run, folder = str(tmp_path / "run"), str(tmp_path / "output")
    start_new_job()
    quiet: State = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    old = Trainer(
        model=Regression(),
        args=TrainingArguments(folder, max_steps=4, save_steps=4, per_device_train_batch_size=4, **quiet),
        train_dataset=ROWS,
    )
    old.train()
    job = Job(run, 8, resume=f"{folder}/checkpoint-4")
    assert steps_of(run) == [7]
    with pytest.raises(ConfigurationError) as caught:
        Job(run, 10, resume=f"{folder}/checkpoint-4")
    assert caught.value.code == "config.trainer_resume"
    for path in Path(folder).glob("checkpoint-*"):
        path.rename(tmp_path / path.name)
    last = Job(run, 13)
    assert (old.model.seen[:16] + job.model.seen + last.model.seen)[:22] == Job(str(tmp_path / "other"), 6).model.seen


@more
def test_a_job_that_an_exception_ends_can_be_started_again_in_the_same_process(run: str) -> None:
    Job(run, 6, stop=3)
    again = Job(run, 6)
    assert again.saves.report is not None
    assert again.saves.report.next_step == 2


def test_a_checkpoint_that_does_not_fit_got_advice_that_no_callback_can_follow(run: str, tmp_path: Path) -> None:
    Job(run, 2)
    with pytest.raises(IncompatibleError, match="class SGD here, but of class AdamW") as caught:
        Job(run, 4, optim="sgd")
    assert 'into={"model": model} and select="model", and give the callback a new run' in caught.value.action
    model = Regression()
    holdfast.load(run, into={"model": model}, select="model")
    again = Job(str(tmp_path / "new"), 4, optim="sgd")
    assert again.found["step"] == 4


def test_the_reference_has_every_argument_of_the_callback() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    section = page.partition("## `HoldfastCallback`\n")[2].partition("\n## ")[0]
    rows = [(name, kind.replace("\\|", "|"), default) for name, kind, default in ARGUMENT.findall(section)]
    assert rows == signature_rows(HoldfastCallback)


def order_of(epoch: int) -> list[int]:
    return [10 * epoch + sample for sample in (1, 0, 2)]


class Orders:
    """A sampler with another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(order_of(self.epoch))


def test_counted_samples_go_on_in_the_next_epochs() -> None:
    sampler = CountedSampler(Orders(), start=4, size=4)
    first = [*sampler]
    sampler.next_pass(1)
    assert [*first, *sampler] == [10, 12, 21, 20, 22, 31, 30, 32]
