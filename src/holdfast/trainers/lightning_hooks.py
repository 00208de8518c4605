"""The hooks of a callback for Lightning's `Trainer`, whichever of Lightning's two packages the trainer is of."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Literal, Protocol

from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer.events import EventListener
from holdfast.checkpointer.memory_option import Memory
from holdfast.checkpointer.option_checks import check_options, checked_disk
from holdfast.errors import ConfigurationError
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.tested_versions import warn_untested
from holdfast.options import checked_number
from holdfast.policy.keep import KeepBest, KeepPolicy, parts_of
from holdfast.policy.stop import StopAfter
from holdfast.policy.when import Auto, OnPreemption, OnRequest, SavePolicy
from holdfast.state.per_rank import PerRank
from holdfast.state.random_state import RandomState
from holdfast.store.base import Location
from holdfast.trainers.lightning_fit import LightningFit
from holdfast.trainers.lightning_parts import LightningParts

_log = logging.getLogger(__name__)

#: Callbacks that change the optimizers in the middle of the training. Lightning loads their state before the strategy
#: makes the optimizers, and Holdfast loads everything at once, after that.
_TOO_EARLY: Final = frozenset({"StochasticWeightAveraging", "BaseFinetuning"})


class DataOrder(Protocol):
    """An order of `holdfast.data`, which is the batch sampler of the training's loader."""

    def advance(self) -> None:
        """Say that the next batch was trained on."""


class LightningHooks:
    """The hooks of `LightningCheckpoint` and `PytorchLightningCheckpoint`, which say what they do."""

    #: The exception after which `fit` returns.
    _quiet_end: ClassVar[type[BaseException]]
    #: The package of the trainer.
    _package: ClassVar[str]

    def __init__(
        self,
        run: str | os.PathLike[str] | Location,
        *,
        save: SavePolicy = Auto() | OnPreemption(),  # noqa: B008 - a frozen value
        keep: KeepPolicy | None = None,
        memory: Memory | None = Memory(),  # noqa: B008 - a frozen value
        local: str | os.PathLike[str] | None = None,
        every_epochs: int | None = None,
        order: DataOrder | None = None,
        extra: dict[str, object] | None = None,
        select: str | Sequence[str] | None = None,
        at: str | None = None,
        listeners: Sequence[EventListener] = (),
        on_failed_save: Literal["warn"] | StopAfter = "warn",
        max_resumes: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        warn_untested(self._package)
        check_options(
            memory=memory,
            save=save,
            keep=keep,
            initial=None,
            fork=False,
            max_resumes=max_resumes,
            takeover=False,
            when_full="wait",
            on_failed_save=on_failed_save,
            timeout_s=timeout_s,
        )
        checked_disk(local, memory=memory, takeover=False)
        if not isinstance(save, SavePolicy):
            raise TypeError("save must be a policy, such as holdfast.EverySteps(1000), not None")
        if every_epochs is not None:
            once = "an epoch is saved at most once"
            every_epochs = checked_number("every_epochs", every_epochs, least=1, reason=once)
        self._run = run
        self._save_policy = save
        self._keep = keep
        self._memory = memory
        self._local = local
        self._every_epochs = every_epochs
        self._order = order
        self._extra = extra
        self._select = select
        self._at = at
        self._listeners = listeners
        self._on_failed_save = on_failed_save
        self._max_resumes = max_resumes
        self._timeout_s = timeout_s
        #: The fit that is running; None between fits.
        self._fit: LightningFit | None = None
        self._exit_code = 0

    @property
    def exit_code(self) -> int:
        """The code with which the script should exit: 75 (try again later) if a preemption ended `fit`, else 0."""
        return self._exit_code

    @property
    def best_model_path(self) -> str:
        """Lightning asks for this where it shall open the "best" checkpoint. There is no such file."""
        raise AttributeError(
            f"Lightning cannot open the checkpoints of '{self._run}'. Pass the model without ckpt_path; "
            "holdfast.load(run, into={'model': model}, select='model', continues=False) loads weights into it."
        )

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Restore the training."""
        if trainer.fast_dev_run:
            return  # which is to leave nothing behind
        _check_trainer(trainer, self)
        checkpointer = Checkpointer(
            self._run,
            self._state(trainer, parts := LightningParts(trainer)),
            memory=self._memory,
            local=self._local,
            save=self._save_policy,
            keep=self._keep,
            select=self._select,
            listeners=self._listeners,
            on_failed_save=self._on_failed_save,
            max_resumes=self._max_resumes,
            timeout_s=self._timeout_s,
        )
        self._fit = LightningFit(
            trainer,
            checkpointer,
            parts,
            signums=tuple(_signums(self._save_policy)),
            watched=frozenset(_watched(self._keep)),
            every_epochs=self._every_epochs,
        )
        at, self._at = self._at, None
        self._fit.restore(at=at)

    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        """Take the signals back."""
        if self._fit is not None:
            self._fit.take_signals_back()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Bring back the random generators, from which loaders have drawn meanwhile."""
        if self._fit is not None:
            self._fit.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save, if an optimizer has stepped and the policy says so."""
        if self._order is not None:
            self._order.advance()
        if self._fit is not None:
            self._fit.batch_ends(outputs)
            self._end_if_preempted(self._fit)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Note which metrics are older than the validation."""
        if self._fit is not None:
            self._fit.validation_begins()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Save, if the policy says so, or `KeepBest` judges a metric of the validation."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.validation_ends()
            self._end_if_preempted(self._fit)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Save, if the epoch is to be saved."""
        if self._fit is not None:
            self._fit.epoch_ends()
            self._end_if_preempted(self._fit)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Save the last step, and wait until all saves are durable."""
        if self._fit is not None:
            self._fit.save_last()
            self._close()

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """Wait until all saves are durable, where nothing was left to train."""
        if self._fit is not None:
            self._close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """Wait for no save. The keeper goes on."""
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.give_up(exception)

    def _end_if_preempted(self, fit: LightningFit) -> None:
        """End the fit at once: with `trainer.should_stop`, Lightning would validate first, and call the hooks of the
        end of an epoch that has not ended."""
        if fit.is_preempted:
            self._close()
            raise self._quiet_end

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        assert fit is not None
        self._exit_code = fit.close()

    def _state(self, trainer: Any, parts: LightningParts) -> dict[str, object]:
        averages = {each.state_key: each for each in trainer.callbacks if unwrapped(each) is not each}
        return {
            "model": trainer.model,
            "optimizers": trainer.optimizers,
            "schedulers": trainer.lr_scheduler_configs,
            "loop": PerRank(trainer.fit_loop, on_resize="first"),
            "trainer": PerRank(parts, on_resize="first"),
            "random": RandomState(),
            **({"averages": averages} if averages else {}),
            **({} if self._order is None else {"data": self._order}),
            **({} if self._extra is None else {"extra": self._extra}),
        }


def _check_trainer(trainer: Any, callback: object) -> None:
    """Raise `ConfigurationError`, code ``config.trainer``, where the trainer does not go with the callback. Warns of a
    `ModelCheckpoint` beside it."""
    checkpoints = trainer.checkpoint_callbacks
    if callback not in checkpoints:
        package, other = ("pytorch_lightning", "lightning")
        if type(trainer.fit_loop).__module__.startswith("lightning"):
            package, other = other, package
        raise _trainer_error(
            f"the Trainer is of the package {package}, and {type(callback).__name__} of {other}.",
            "Take LightningCheckpoint of holdfast.trainers.lightning_trainer for lightning, and "
            "PytorchLightningCheckpoint of holdfast.trainers.pytorch_lightning_trainer for pytorch_lightning.",
        )
    for each in trainer.callbacks:
        if _TOO_EARLY & {base.__name__ for base in type(each).__mro__}:
            raise _trainer_error(
                f"{type(each).__name__} changes the optimizers in the middle of the training, so the training cannot "
                "be restored into the optimizers that the module makes at its start.",
                "Take the callback out; WeightAveraging is one that averages weights and can be restored.",
            )
    others = [type(each).__name__ for each in checkpoints if each is not callback]
    if others and trainer.is_global_zero:
        _log.warning(
            "%s saves beside %s, into files of its own that holdfast does not read; take it out of the callbacks",
            " and ".join(others),
            type(callback).__name__,
        )


def _trainer_error(message: str, action: str) -> ConfigurationError:
    return ConfigurationError(message, code="config.trainer", action=action)


def _signums(policy: SavePolicy) -> Iterator[int]:
    """The signals that the policy waits for."""
    for part in policy.parts():
        match part:
            case OnPreemption():
                yield from part.signums
            case OnRequest(signum=int(signum)):
                yield signum


def _watched(policy: KeepPolicy | None) -> Iterator[str]:
    """The metrics that the policy judges checkpoints by."""
    for part in () if policy is None else parts_of(policy):
        if isinstance(part, KeepBest):
            yield part.metric
