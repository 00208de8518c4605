"""One call of ``Trainer.fit``: its steps, and the saves that follow them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from holdfast.checkpointer import Checkpointer
from holdfast.errors import ConfigurationError
from holdfast.frameworks.random_generators import GeneratorStates, RandomGenerators
from holdfast.trainers.callback_restore import restore_in_callback
from holdfast.trainers.lightning_parts import LightningParts

_log = logging.getLogger(__name__)


class LightningFit:
    """The steps of one `fit` of a trainer.

    A step ends with the validation that follows its batch, and the last one of an epoch with the epoch: from a state in
    between, Lightning would go on without that validation, and count the epoch twice. Steps are counted here, because
    `trainer.global_step` grows by one for each optimizer.
    """

    def __init__(
        self,
        trainer: Any,
        checkpointer: Checkpointer,
        parts: LightningParts,
        *,
        signums: tuple[int, ...],
        watched: frozenset[str],
        every_epochs: int | None,
    ) -> None:
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._parts = parts
        #: The handlers that the Checkpointer has set. Lightning puts its own in their place, which ends without a save.
        self._handlers = {signum: signal.getsignal(signum) for signum in signums}
        self._watched = watched
        self._every_epochs = every_epochs
        self._is_restored = False
        #: The random generators as they were restored in the middle of an epoch: to make the iterator, the loader draws
        #: from them once more. At its end, the iterator of the next epoch is yet to draw.
        self._generators: GeneratorStates | None = None
        #: The last step that ended, and the last one that was saved.
        self._last = self._saved = -1
        self._global_step = 0
        #: The step that ends with the validation that is to come; None if there is none.
        self._pending: int | None = None
        #: The names of the metrics that the last save has.
        self._recorded: frozenset[str] = frozenset()
        #: Whether an optimizer has stepped in the last batch.
        self._has_stepped = False
        self._has_warned = False
        #: The metrics when the last validation began, and the names of those that validations log.
        self._before: dict[str, Tensor] = {}
        self._of_validation: set[str] = set()
        #: The metrics of the validation that followed the last batch, and the loss of the last step.
        self._new: dict[str, Tensor] = {}
        self._loss: dict[str, Tensor] = {}

    @property
    def is_preempted(self) -> bool:
        """Whether the training has to end after the last step, which is being saved."""
        return self._checkpointer.preempted

    def restore(self, *, at: str | None) -> None:
        """Fill the state."""
        report = restore_in_callback(self._checkpointer, at=at)
        if report.load is not None:
            self._is_restored = True
            self._last = self._saved = report.next_step - 1
            if self._is_between_epochs():
                self._begin_epoch()
            else:
                self._generators = RandomGenerators().read()

    def take_signals_back(self) -> None:
        """Put the handlers of the Checkpointer in the place of Lightning's."""
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def begin(self) -> None:
        """The first batch is next."""
        trainer = self._trainer
        self.take_signals_back()
        self._global_step = trainer.global_step
        if not self._is_restored:
            self._last = self._saved = trainer.global_step - 1  # of a file of Lightning that it has loaded
            return
        if trainer.ckpt_path:
            raise ConfigurationError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) has loaded another checkpoint over step {self._last}, "
                "which was restored.",
                code="config.trainer",
                action="Leave out ckpt_path; the option at= of the callback chooses another checkpoint of the run.",
            )
        trainer.callback_metrics.update(self._parts.metrics)  # which the sanity check has cleared
        if self._generators is not None:
            RandomGenerators().write(self._generators)

    def batch_ends(self, outputs: object) -> None:
        """A batch has been trained on; an optimizer may have stepped."""
        trainer = self._trainer
        self._new = {}
        self._has_stepped = trainer.global_step != self._global_step
        if not self._has_stepped:
            return
        self._global_step = trainer.global_step
        self._last += 1
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        self._loss = {"loss": loss} if isinstance(loss, Tensor) else {}
        if self._is_last_batch() or self._is_validation_due():
            self._pending = self._last
        else:
            self._step_ends(self._last, self._loss | self._logged_in_training())

    def validation_begins(self) -> None:
        """A validation begins."""
        self._before = dict(self._trainer.callback_metrics)

    def validation_ends(self) -> None:
        """A validation has ended, and all other callbacks have heard of it."""
        metrics = self._trainer.callback_metrics
        new = {name: value for name, value in metrics.items() if value is not self._before.get(name)}
        self._of_validation |= new.keys()
        self._new = new
        if not self._is_last_batch():
            self._pending_step_ends(new)

    def epoch_ends(self) -> None:
        """An epoch has ended, and all other callbacks have heard of it."""
        self._pending_step_ends(self._new | self._logged_in_training())
        num_epochs = self._trainer.current_epoch + 1
        if (self._every_epochs is not None and num_epochs % self._every_epochs == 0) or self._ends_here():
            self._save_unless_saved(self._loss | self._new | self._logged_in_training())

    def save_last(self) -> None:
        """The training has ended: save its last step, unless it is saved."""
        self._save_unless_saved(self._loss)

    def close(self) -> int:
        """Wait until all saves are durable. Returns the exit code of the script."""
        self._checkpointer.close()
        return self._checkpointer.exit_code

    def give_up(self, error: BaseException) -> None:
        """An exception has ended the training."""
        self._checkpointer.__exit__(type(error), error, error.__traceback__)

    def _pending_step_ends(self, metrics: dict[str, Tensor]) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._step_ends(pending, self._loss | metrics)
        self._judge(metrics)

    def _step_ends(self, step: int, metrics: Mapping[str, Tensor]) -> None:
        handle = self._checkpointer.step(step, metrics=metrics)
        if handle is not None and not handle.memory_only:
            self._saved, self._recorded = step, frozenset(metrics)
        if self._ends_here():
            self._save_unless_saved(metrics)

    def _judge(self, metrics: dict[str, Tensor]) -> None:
        """Save the step with these metrics if `KeepBest` judges by one of them, unless it is saved with that one."""
        recorded = self._recorded if self._saved == self._last else frozenset()
        if self._watched.isdisjoint(metrics.keys() - recorded) or self.is_preempted:
            return
        if self._has_stepped:
            self._save(self._loss | metrics)
        elif not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a validation came between two steps of the optimizer, where nothing can be saved, so KeepBest does "
                "not judge it: make val_check_interval a multiple of accumulate_grad_batches"
            )

    def _save_unless_saved(self, metrics: Mapping[str, Tensor]) -> None:
        if self._saved != self._last and not self.is_preempted:
            self._save(metrics)

    def _save(self, metrics: Mapping[str, Tensor]) -> None:
        self._checkpointer.save(self._last, metrics=metrics)
        self._saved, self._recorded = self._last, frozenset(metrics)

    def _logged_in_training(self) -> dict[str, Tensor]:
        """The metrics of the last step, without those of an earlier validation."""
        old = self._parts.metrics
        metrics = self._trainer.callback_metrics.items()
        return {k: v for k, v in metrics if k not in self._of_validation and v is not old.get(k)}

    def _is_validation_due(self) -> bool:
        """Whether a validation follows the batch that ends."""
        loop = self._trainer.fit_loop
        if self._trainer._val_check_time_interval is not None:  # noqa: SLF001 - see below
            return False  # ranks may come to different answers
        # Lightning says it nowhere else.
        return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # noqa: SLF001

    def _is_last_batch(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return bool(progress.is_last_batch or progress.current.ready == self._trainer.num_training_batches)

    def _ends_here(self) -> bool:
        """Whether the training ends with the last step."""
        trainer = self._trainer
        if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
            return True
        num_epochs = trainer.current_epoch + self._is_last_batch()
        if trainer.should_stop:
            return bool(num_epochs >= (trainer.min_epochs or 0) and trainer.global_step >= (trainer.min_steps or 0))
        return trainer.max_epochs not in (None, -1) and bool(num_epochs >= trainer.max_epochs)

    def _is_between_epochs(self) -> bool:
        """Whether the restored step is the last one of its epoch."""
        progress = self._trainer.fit_loop.epoch_progress.current
        return bool(progress.ready == progress.processed)

    def _begin_epoch(self) -> None:
        """Go on with a whole epoch. With `max_steps`, Lightning would first go on with the one that has ended. It also
        leaves out the step of schedulers that wait for a metric, which follows the end of an epoch."""
        loop = self._trainer.fit_loop
        if loop.epoch_progress.current.completed < loop.epoch_progress.current.processed:
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        base: Any = super(type(loop), type(loop))
        base.restarting.fset(loop, False)  # with max_steps, the property of the loop itself stays True
