"""`LightningCheckpoint` in one process: fits that are interrupted at any step, and what goes with the callback."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast import ConfigurationError, StateError, StopAfter, StorageError
from holdfast.data import GlobalOrder
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.trainers.stored import contents

with warnings.catch_warnings():  # Lightning's warnings at its import are not ours
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging

    from holdfast.trainers.lightning_trainer import LightningCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # nor are those while it runs

DATA = TensorDataset(torch.arange(24.0)[:, None] / 24)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class FitStoppedError(Exception):
    """The end of a job in the middle of a step."""


class Noisy(lightning.LightningModule):  # type: ignore[misc]
    """A model whose training draws random numbers, and whose validations do, too. It is interrupted in step `stop`."""

    def __init__(self, stop: int = -1, *, plateau: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="stop")
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.stop = stop
        self.num_batches = self.num_validations = 0

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        if self.trainer.global_step == self.stop:
            raise FitStoppedError
        self.num_batches += 1
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.num_validations += 1
        self.log("val_loss", self.layers(batch[0]).square().mean() + torch.rand(()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_batches"] = self.num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_batches = checkpoint["num_batches"]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedulers = torch.optim.lr_scheduler
        if self.hparams["plateau"]:
            on_plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": on_plateau, "monitor": "val_loss"}}
        return {"optimizer": optimizer, "lr_scheduler": schedulers.CosineAnnealingLR(optimizer, 100)}


def fit(
    run: Path,
    model: Noisy,
    *,
    limits: dict[str, Any] | None = None,
    order: GlobalOrder | None = None,
    has_validation: bool = False,
    **options: Any,
) -> LightningCheckpoint:
    """A job, which ends early where the model is interrupted. Its loader shuffles, unless there is an order."""
    torch.manual_seed(1)
    saves = LightningCheckpoint(run, order=order, **{"memory": None, **options})
    shuffled = DataLoader(DATA, batch_size=4, shuffle=True)
    loader = shuffled if order is None else DataLoader(DATA, batch_sampler=order)
    callbacks = [saves, *([EarlyStopping("val_loss", patience=100)] if has_validation else [])]
    trainer = lightning.Trainer(callbacks=callbacks, **QUIET, **(limits or {"max_epochs": 2}))
    try:
        trainer.fit(model, loader, DataLoader(DATA, batch_size=12) if has_validation else None)
    except FitStoppedError:
        assert model.stop >= 0
    return saves


def test_a_fit_went_on_for_ever_on_a_store_that_failed(tmp_path: Path) -> None:
    """The callback did not take what a `Checkpointer` takes against that."""

    class Breaking(Noisy):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            if self.trainer.global_step == 2:
                (tmp_path / "run/checkpoints").rename(tmp_path / "kept")
                (tmp_path / "run/checkpoints").touch()
            return super().training_step(batch)

    model = Breaking()
    with pytest.raises(StorageError, match=r"storage\.stopped.*2 saves in a row"):
        fit(tmp_path / "run", model, save=holdfast.EverySteps(1), on_failed_save=StopAfter(missed=2))
    assert model.num_batches == 4


def test_a_fit_goes_on_from_the_disk_of_the_node(tmp_path: Path, node_dir: Path) -> None:
    """The callback did not take local=, which saves scripts that write their loop themselves."""
    options: dict[str, Any] = {"memory": holdfast.Memory(node_dir=node_dir), "local": tmp_path / "disk"}
    first, second = Noisy(), Noisy()
    fit(tmp_path / "run", first, limits={"max_steps": 3}, **options)
    end_keepers(node_dir)
    shutil.rmtree(node_dir)
    node_dir.mkdir()
    start_new_job()
    for file in tmp_path.glob("run/checkpoints/*/*.safetensors"):
        file.unlink()
    fit(tmp_path / "run", second, limits={"max_steps": 3}, **options)
    assert second.num_batches == first.num_batches == 3  # the second one is restored, and trains no step
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_options_of_the_checkpointer_are_checked_before_the_fit(tmp_path: Path) -> None:
    for options in ({"max_resumes": 0}, {"local": tmp_path / "disk", "memory": None}):
        with pytest.raises(ValueError, match=r"max_resumes|local="):
            LightningCheckpoint(tmp_path / "run", **options)


@pytest.mark.parametrize(
    ("limits", "stops"),
    [
        ({"max_steps": 11, "val_check_interval": 3}, [3, 4, 8]),
        ({"max_steps": 7, "accumulate_grad_batches": 2}, [4]),
    ],
    ids=["validations between", "gradient accumulation"],
)
def test_an_interrupted_fit_over_an_order_goes_on_bit_for_bit(
    limits: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    has_validation = "val_check_interval" in limits
    job: dict[str, Any] = {"limits": limits, "save": holdfast.EverySteps(1), "has_validation": has_validation}

    def train(run: str, stop: int) -> None:
        order = GlobalOrder(24, global_batch_size=4, seed=7)
        fit(tmp_path / run, Noisy(stop), order=order, **job)

    train("whole", -1)
    whole = contents(tmp_path / "whole")
    assert whole["step"] == limits["max_steps"] - 1
    for stop in stops:
        train(f"parts-{stop}", stop)
        assert holdfast.open(tmp_path / f"parts-{stop}").step == stop - 1
        train(f"parts-{stop}", -1)
        assert contents(tmp_path / f"parts-{stop}") == whole


@pytest.mark.parametrize(
    ("limits", "has_validation", "plateau"),
    [
        ({"max_epochs": 3}, True, True),
        ({"max_epochs": 3}, False, False),
        ({"max_steps": 15}, True, False),
        ({"max_steps": 15}, False, False),
        ({"max_epochs": 3, "val_check_interval": 2}, True, False),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, True, False),
    ],
)
def test_a_fit_that_saves_whole_epochs_goes_on_with_the_next_epoch_bit_for_bit(
    limits: dict[str, Any], has_validation: bool, plateau: bool, tmp_path: Path
) -> None:
    job: dict[str, Any] = {"limits": limits, "save": holdfast.OnPreemption(), "has_validation": has_validation}
    fit(tmp_path / "whole", Noisy(plateau=plateau), every_epochs=1, **job)
    whole = contents(tmp_path / "whole")
    fit(tmp_path / "parts", Noisy(7, plateau=plateau), every_epochs=1, **job)
    assert holdfast.open(tmp_path / "parts").step == 5  # the end of the first epoch
    fit(tmp_path / "parts", Noisy(13, plateau=plateau), every_epochs=1, **job)
    assert holdfast.open(tmp_path / "parts").step == 11
    fit(tmp_path / "parts", Noisy(plateau=plateau), every_epochs=1, **job)
    found = contents(tmp_path / "parts")
    # With max_steps, the third epoch ends without a validation, whose count is then that of the second.
    counts = {name for name in found if "val_loop.batch_progress" in name}
    assert {name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name)} <= counts


def test_a_finished_fit_trains_nothing_more_and_goes_on_when_it_may(tmp_path: Path) -> None:
    model = Noisy()
    fit(tmp_path / "run", model, save=holdfast.OnPreemption())
    again = Noisy()
    fit(tmp_path / "run", again, save=holdfast.OnPreemption())
    assert (model.num_batches, again.num_batches) == (12, 12)
    assert [each.step for each in holdfast.ls(tmp_path / "run")] == [11]
    fit(tmp_path / "run", Noisy(), limits={"max_epochs": 3}, save=holdfast.OnPreemption())
    assert [each.step for each in holdfast.ls(tmp_path / "run")] == [17, 11]


def test_the_checkpoints_with_the_best_validations_stay(tmp_path: Path) -> None:
    order = GlobalOrder(24, global_batch_size=4, seed=7)
    keep = holdfast.KeepBest("val_loss", 2)
    limits = {"max_steps": 11, "val_check_interval": 2}
    job: dict[str, Any] = {"limits": limits, "save": holdfast.EverySteps(3), "has_validation": True}
    fit(tmp_path / "all", Noisy(), order=order, **job, keep=keep | holdfast.KeepEvery(1))
    everything = {each.step: dict(each.metrics) for each in holdfast.ls(tmp_path / "all")}
    validated = {step: metrics["val_loss"] for step, metrics in everything.items() if "val_loss" in metrics}
    assert sorted(validated) == [1, 3, 5, 7, 9]
    # Steps 6 and 10, the last one, have no validation, and not the metrics of an earlier one.
    assert sorted(everything) == [1, 3, 5, 6, 7, 9, 10]
    fit(tmp_path / "best", Noisy(), order=GlobalOrder(24, global_batch_size=4, seed=7), **job, keep=keep)
    best = sorted(validated, key=lambda step: validated[step])[:2]
    assert {each.step for each in holdfast.ls(tmp_path / "best")} == {*best, 10}


def test_a_preemption_ends_a_fit_without_a_validation_after_the_step_that_it_saves(tmp_path: Path) -> None:
    class Preempted(Noisy):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            if self.trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch)

    model = Preempted()
    limits = {"max_epochs": 2, "min_epochs": 2, "num_sanity_val_steps": 0}
    saves = fit(tmp_path / "run", model, limits=limits, has_validation=True, save=holdfast.OnPreemption())
    assert saves.exit_code == os.EX_TEMPFAIL
    assert holdfast.open(tmp_path / "run").step == model.num_batches - 1 == 2
    assert model.num_validations == 0
    assert fit(tmp_path / "run", Noisy(), save=holdfast.OnPreemption()).exit_code == 0
    assert holdfast.open(tmp_path / "run").step == 11


def test_a_fit_begins_with_the_checkpoint_that_at_names_and_fills_the_extra_entries(tmp_path: Path) -> None:
    fit(tmp_path / "run", Noisy(), save=holdfast.EverySteps(1), extra={"name": "first"})
    extra: dict[str, object] = {"name": "second"}
    model = Noisy()
    fit(tmp_path / "run", model, save=holdfast.OnPreemption(), at="step=5", extra=extra)
    assert extra == {"name": "first"}
    assert [each.step for each in holdfast.ls(tmp_path / "run")][:2] == [11, 5]


def test_what_on_save_checkpoint_adds_has_to_be_values(tmp_path: Path) -> None:
    class Adds(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["odd"] = object()

    class Asks(Noisy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"].pop("layers.0.weight")

    with pytest.raises(StateError, match="odd"):
        fit(tmp_path / "run", Adds(), save=holdfast.EverySteps(1))
    with pytest.raises(ConfigurationError, match="if 'state_dict' in checkpoint") as caught:
        fit(tmp_path / "run", Asks(), save=holdfast.EverySteps(1))
    assert caught.value.code == "config.trainer"


def test_a_file_of_lightning_begins_a_run_and_is_refused_in_one_that_has_begun(tmp_path: Path) -> None:
    old = ModelCheckpoint(tmp_path / "old", save_last=True)
    loader = DataLoader(DATA, batch_size=4)
    lightning.Trainer(max_epochs=1, callbacks=[old], **QUIET).fit(Noisy(), loader)
    for max_epochs in (2, 3):
        saves = LightningCheckpoint(tmp_path / "run", memory=None)
        trainer = lightning.Trainer(max_epochs=max_epochs, callbacks=[saves], **QUIET)
        if max_epochs == 2:
            trainer.fit(Noisy(), loader, ckpt_path=tmp_path / "old" / "last.ckpt")
            assert [each.step for each in holdfast.ls(tmp_path / "run")] == [11]
        else:
            with pytest.raises(ConfigurationError, match="at=") as caught:
                trainer.fit(Noisy(), loader, ckpt_path=tmp_path / "old" / "last.ckpt")
            assert caught.value.code == "config.trainer"


def test_lightning_makes_no_checkpoints_of_its_own_beside_the_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = lightning.Trainer(callbacks=[saves := LightningCheckpoint(tmp_path / "run")], **QUIET)
    assert trainer.checkpoint_callbacks == [saves]
    with pytest.raises(AttributeError, match=r"holdfast\.load"):
        trainer.test(Noisy(), ckpt_path="best")
    callbacks = [LightningCheckpoint(tmp_path / "run", memory=None), ModelCheckpoint(tmp_path / "files")]
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        lightning.Trainer(max_epochs=1, callbacks=callbacks, **QUIET).fit(Noisy(), DataLoader(DATA, batch_size=4))
    assert "ModelCheckpoint saves beside LightningCheckpoint" in caplog.text


def test_a_callback_that_changes_optimizers_in_the_middle_is_refused(tmp_path: Path) -> None:
    callbacks = [LightningCheckpoint(tmp_path / "run"), StochasticWeightAveraging(0.1)]
    trainer = lightning.Trainer(max_epochs=2, callbacks=callbacks, **QUIET)
    with pytest.raises(ConfigurationError, match="StochasticWeightAveraging") as caught:
        trainer.fit(Noisy(), DataLoader(DATA, batch_size=4))
    assert caught.value.code == "config.trainer"


def test_a_fast_run_of_lightning_leaves_nothing_behind(tmp_path: Path) -> None:
    fit(tmp_path / "run", Noisy(), limits={"fast_dev_run": True})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"save": None}, TypeError), ({"keep": 3}, TypeError), ({"every_epochs": 0}, ValueError)],
)
def test_wrong_options_are_refused_where_the_callback_is_made(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        LightningCheckpoint("runs/any", **options)
