"""`HoldfastCallback`: checkpoints of a job of transformers' `Trainer`."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer.events import EventListener
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.memory_option import Memory
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.errors import ConfigurationError
from holdfast.frameworks.random_generators import GeneratorStates, RandomGenerators
from holdfast.frameworks.tested_versions import warn_untested
from holdfast.loading import load
from holdfast.phases import LOG
from holdfast.policy.keep import KeepBest, KeepLast, KeepPolicy, parts_of
from holdfast.policy.stop import StopAfter
from holdfast.policy.when import OnPreemption, SavePolicy
from holdfast.run.manage import ls
from holdfast.saving import run_location
from holdfast.state.per_rank import PerRank
from holdfast.state.random_state import RandomState
from holdfast.store.base import Location
from holdfast.trainers.callback_restore import restore_in_callback
from holdfast.trainers.transformers_data import LoaderPosition
from holdfast.trainers.transformers_state import TrainerRecords, with_records

__all__ = ["HoldfastCallback"]

_log = logging.getLogger(__name__)

#: Endings of the names of metrics that measure the machine, and not the model.
_OF_THE_MACHINE = ("_runtime", "_per_second", "_time")


class HoldfastCallback(TrainerCallback):  # type: ignore[misc] # transformers is not checked
    """A callback that saves the job of a `Trainer` into `run`, and has the next job go on from there: on any number of
    ranks, at the next sample, with the same random numbers.

        >>> saves = HoldfastCallback("runs/bert")
        >>> trainer = Trainer(model=model, args=args, train_dataset=dataset, callbacks=[saves])
        >>> trainer.train()
        >>> sys.exit(saves.exit_code)

    It restores when training begins, so `train` needs no ``resume_from_checkpoint``. The state has the model, the
    optimizer, the scheduler, the gradient scaler if there is one, the random generators, the position in the data, the
    `TrainerState`, and the entries `extra`; a callback of transformers among those is saved with the attributes that it
    exports, such as the counter of an `EarlyStoppingCallback`.

    It saves instead of the Trainer, which writes no folders of its own: whenever `TrainingArguments` say so
    (`save_strategy`, `save_steps`), or by the policies `save`; in any case after the last step and on a preemption. A
    save that meets an evaluation follows it, and has its metrics. `keep` says which checkpoints stay (default:
    `save_total_limit` of them, and the best one by `metric_for_best_model`). With `load_best_model_at_end`, the model
    is that of the best checkpoint when training ends. A finished job that is started again trains no step.

    With `at`, such as ``"step=700"``, it goes on from that checkpoint. `memory`, `local`, `select`, `listeners`,
    `on_failed_save`, `max_resumes` and `timeout_s` are those of the `Checkpointer`.

    If an exception ends training, the newest snapshot in memory becomes durable by itself. As a context manager, it
    also lets go of signals and memory then.

    Training raises what `Checkpointer.restore`, `step`, `save` and `close` raise, and `ConfigurationError`:
    ``config.trainer_arguments``, for `TrainingArguments` that contradict it; ``config.trainer_resume``, if `train` got
    ``resume_from_checkpoint`` and the run has a checkpoint; ``config.no_policy``, if nothing says when to save.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Location,
        *,
        save: SavePolicy | None = None,
        keep: KeepPolicy | None = None,
        memory: Memory | None = Memory(),  # noqa: B008 - a frozen value
        local: str | os.PathLike[str] | None = None,
        select: str | Sequence[str] | None = None,
        extra: Mapping[str, object] | None = None,
        at: str | None = None,
        listeners: Sequence[EventListener] = (),
        on_failed_save: Literal["warn"] | StopAfter = "warn",
        max_resumes: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        warn_untested("transformers")
        self._run = run
        self._save = save
        self._keep = keep
        self._memory = memory
        self._local = local
        self._select = select
        self._extra = extra or {}
        self._at = at
        self._listeners = listeners
        self._on_failed_save = on_failed_save
        self._max_resumes = max_resumes
        self._timeout_s = timeout_s
        self._checkpointer: Checkpointer | None = None
        self._exit_code = 0
        self._job: _Job | None = None
        #: The report of the restore with which training began; None before.
        self.report: RestoreReport | None = None

    @property
    def exit_code(self) -> int:
        """The code with which the script should exit: 75 if a preemption ended training, else 0."""
        return self._exit_code if self._checkpointer is None else self._checkpointer.exit_code

    @property
    def preempted(self) -> bool:
        """Whether a preemption ended training."""
        return self.exit_code != 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        checkpointer = self._let_go()
        if checkpointer is not None:
            checkpointer.__exit__(kind, error, trace)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Restore the state, and have the loader go on from there."""
        if self._checkpointer is not None:  # training was broken off in this process, and begins anew
            error = RuntimeError("training begins anew")
            self.__exit__(RuntimeError, error, None)
        _check_arguments(args, state)
        keep = _keep_of(args) if self._keep is None else self._keep
        position = LoaderPosition(
            parts["train_dataloader"],
            group=args.gradient_accumulation_steps,
            world_size=args.world_size,
            per_rank=args.train_batch_size,
        )
        records = TrainerRecords(state)
        self._checkpointer = Checkpointer(
            self._run,
            self._state_of(parts, position, records),
            memory=self._memory,
            local=self._local,
            save=self._policy(args),
            keep=keep,
            select=self._select,
            listeners=self._listeners,
            on_failed_save=self._on_failed_save,
            max_resumes=self._max_resumes,
            timeout_s=self._timeout_s,
        )
        with self._giving_up():
            best = {part.metric for part in parts_of(keep) if isinstance(part, KeepBest)} if keep is not None else set()
            self._job = _Job(self._checkpointer, position, records, best, is_given=self._save is not None)
            self.report = self._job.begin(args, state, at=self._at)

    def _state_of(
        self, parts: Mapping[str, Any], position: LoaderPosition, records: TrainerRecords
    ) -> dict[str, object]:
        state = {"model": parts["model"], "optimizer": parts["optimizer"], "scheduler": parts["lr_scheduler"]}
        scaler = getattr(parts["optimizer"], "scaler", None)
        if scaler is not None and scaler.is_enabled():
            state["scaler"] = scaler
        state["random"] = RandomState()
        state["trainer"] = {"data": position, "records": PerRank(records, on_resize="first")}
        if position.order is not None and all(item is not position.order for item in self._extra.values()):
            state["data"] = position.order
        if twice := state.keys() & self._extra.keys():
            raise ValueError(f"extra has entries that the callback has itself: {', '.join(sorted(twice))}; rename them")
        return state | with_records(self._extra)

    def _policy(self, args: TrainingArguments) -> SavePolicy:
        if self._save is None:
            if args.save_strategy == "no":
                raise ConfigurationError(
                    'nothing says when to save: save_strategy is "no", and the callback has no policy.',
                    code="config.no_policy",
                    action="Give it one, such as save=holdfast.EverySteps(500) or save=holdfast.Auto(), or set "
                    'save_strategy="steps" and save_steps: the callback saves then, and the Trainer does not.',
                )
            return OnPreemption()
        if any(isinstance(part, OnPreemption) for part in self._save.parts()):
            return self._save
        return self._save | OnPreemption()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Have the loader begin its pass at the position of the job."""
        if self._job is not None:
            with self._giving_up():
                self._job.pass_begins(control)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Bring back the random generators, after the batches were skipped."""
        if self._job is not None:
            with self._giving_up():
                self._job.step_begins(control)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count a batch."""
        if self._job is not None:
            self._job.position.batch_ends()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save, if it is time; on a preemption, end training."""
        if self._job is not None:
            with self._giving_up():
                self._job.step_ends(state, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save, if `save_strategy` is "epoch"."""
        if self._job is not None:
            with self._giving_up():
                self._job.note_wish(control)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Save the step that was evaluated, with its metrics, if it is to be saved."""
        if self._job is not None:
            with self._giving_up():
                self._job.evaluated(control, _of_the_model(metrics or {}))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Correct losses that Trainer has divided by all steps, instead of those of this job; save, if it is time."""
        if self._job is not None:
            with self._giving_up():
                self._job.correct(state, logs or {})
                if not control.should_evaluate:
                    self._job.settle(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any) -> None:
        """Save the last step, wait until all saves are durable, and load the best model if that is wanted."""
        if self._job is None:
            return
        with self._giving_up():
            self._job.end(control)
            checkpointer = self._let_go()
            assert checkpointer is not None
            checkpointer.close()
        self._exit_code = checkpointer.exit_code
        if args.load_best_model_at_end and not self.preempted:
            self._load_best(args, parts["model"])

    def _load_best(self, args: TrainingArguments, model: Any) -> None:
        metric = _best_metric_of(args)
        run = run_location(self._run).url
        rows = [(row.metrics.get(metric), row.place) for row in ls(self._run) if not row.abandoned]
        measured = [(value, place) for value, place in rows if isinstance(value, float) and not math.isnan(value)]
        if not measured:
            _log.warning(
                "no checkpoint of '%s' has the metric %s, so the model stays that of the last step", run, metric
            )
            return
        value, place = (max if args.greater_is_better else min)(measured, key=lambda each: each[0])
        load(f"{run}@{place}", {"model": model}, select="model", strict=self._select is None, continues=False)
        if args.process_index == 0:
            LOG.info("the model is that of %s, which is the best one: %s is %s", place, metric, value)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Let go of the `Checkpointer` if a call of it raises: training ends then, and nobody closes it."""
        try:
            yield
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def _let_go(self) -> Checkpointer | None:
        checkpointer, self._checkpointer, self._job = self._checkpointer, None, None
        if checkpointer is not None:
            self._exit_code = checkpointer.exit_code
        return checkpointer


class _Job:
    """The steps of one call of `train`."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        position: LoaderPosition,
        records: TrainerRecords,
        best: set[str],
        *,
        is_given: bool,
    ) -> None:
        self._checkpointer = checkpointer
        self.position = position
        self._records = records
        #: The metrics that say which checkpoints stay.
        self._best = best
        #: Whether policies say when to save, and not Trainer.
        self._is_given = is_given
        #: The random generators of the restored checkpoint, until they are brought back.
        self._random: GeneratorStates | None = None
        #: The number of steps before this job; None if Trainer knows them itself.
        self._start: int | None = None
        self._has_logged = False
        #: The last step that ended, its metrics, and what is known of its save.
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._is_told = self._is_saved = self._is_wished = False

    def begin(self, args: TrainingArguments, state: TrainerState, *, at: str | None) -> RestoreReport:
        """Restore the state, and go on from there."""
        resumed = state.global_step
        report = restore_in_callback(self._checkpointer, at=at)
        skip = not args.ignore_data_skip
        if report.step is None:
            self.position.count_steps(resumed, skip=skip)
            return report
        if resumed:
            raise _two_sources(report)
        state.global_step = self._start = report.next_step
        self._random = RandomGenerators().read()
        if not self.position.has_loaded:
            self.position.count_steps(report.next_step, skip=skip)
        self.position.resume(skip=skip)
        self._note_epochs(state)
        if args.max_steps <= 0:
            _plan_steps(args, state, self.position)
        if state.global_step >= state.max_steps:
            LOG.info("all %d steps are done, so none is trained", state.max_steps)
            self.position.finish()
        return report

    def pass_begins(self, control: TrainerControl) -> None:
        """Trainer begins an epoch."""
        self.settle(control)
        if self._random is None:
            self.position.pass_begins()
            self._records.epoch_random = RandomGenerators().read()
            return
        if self.position.is_at_beginning:
            RandomGenerators().write(self._random)
            self._random = None
            self._records.epoch_random = RandomGenerators().read()
        elif self.position.is_of_this_shape:  # a sampler that draws its order from them draws the same order again
            RandomGenerators().write(self._records.epoch_random)
        self.position.pass_begins()

    def step_begins(self, control: TrainerControl) -> None:
        """Trainer begins a step, whose batches it has."""
        self.settle(control)
        if self._random is not None:
            RandomGenerators().write(self._random)
            self._random = None

    def step_ends(self, state: TrainerState, control: TrainerControl) -> None:
        """A step has ended."""
        self.position.batch_ends()
        self._note_epochs(state)
        if self.position.is_last_batch:
            control.should_epoch_stop = True
        self._step, self._metrics = state.global_step - 1, {}
        self._is_told = self._is_saved = self._is_wished = False
        self.note_wish(control)

    def _note_epochs(self, state: TrainerState) -> None:
        if self._start is not None and self.position.epochs is not None:
            state.epoch = self.position.epochs

    def note_wish(self, control: TrainerControl) -> None:
        """Save what Trainer would save, in its place: now, or after the log or the evaluation that is about to begin,
        which belong to the state and draw random numbers."""
        self._is_wished |= control.should_save and not self._is_given and not self._is_saved
        control.should_save = False
        if not control.should_evaluate and not control.should_log:
            self.settle(control)

    def evaluated(self, control: TrainerControl, metrics: Mapping[str, float]) -> None:
        """The last step has these metrics."""
        if self._step is None:
            return
        self._metrics |= metrics
        is_watched = not self._best.isdisjoint(metrics)
        if self._is_saved:
            # Save again, with the metrics, when training goes on: there may be more evaluations of this step.
            self._is_wished |= is_watched
        else:
            self._is_wished |= is_watched and self._is_given
            self.settle(control)

    def settle(self, control: TrainerControl) -> None:
        """Save the last step, if a policy or Trainer wants that, and has not got it."""
        if self._step is None:
            return
        if not self._is_told:
            self._is_told = True
            self._note(self._checkpointer.step(self._step, metrics=self._metrics))
            self._is_wished &= not self._is_saved
        if self._is_wished and not self._checkpointer.preempted:
            self._note(self._checkpointer.save(self._step, metrics=self._metrics))
        self._is_wished = False
        control.should_training_stop |= self._checkpointer.preempted

    def _note(self, handle: Handle | None) -> None:
        self._is_saved |= handle is not None and not handle.memory_only and not handle.skipped

    def correct(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Correct the losses in `logs`: Trainer has divided them by all steps, instead of those of this job."""
        if not self._start or state.global_step <= self._start:
            return
        factor = state.global_step / (state.global_step - self._start)
        names = ["train_loss"] if self._has_logged else ["train_loss", "loss"]
        for name in names:
            if name in logs:
                logs[name] *= factor
                state.log_history[-1][name] = logs[name]
                self._has_logged = True

    def end(self, control: TrainerControl) -> None:
        """Training ends: save the last step, if nothing has."""
        self.settle(control)
        if self._step is not None and not self._is_saved and not self._checkpointer.preempted:
            self._note(self._checkpointer.save(self._step, metrics=self._metrics))


def _plan_steps(args: TrainingArguments, state: TrainerState, position: LoaderPosition) -> None:
    """Count the steps of the epochs that are left, which another number of ranks may have changed."""
    left = position.steps_left(args.num_train_epochs, state.max_steps)
    if left is None or state.global_step + left == state.max_steps:
        return
    _log.warning(
        "%g epochs end with step %d now, and not with step %d, for which the learning rates are planned; keep the "
        "number of samples in a step (per_device_train_batch_size, gradient_accumulation_steps) on another number of "
        "ranks, or set max_steps",
        args.num_train_epochs,
        state.global_step + left,
        state.max_steps,
    )
    state.max_steps = state.global_step + left


def _check_arguments(args: TrainingArguments, state: TrainerState) -> None:
    """Raise `ConfigurationError` for arguments that contradict the callback."""
    if args.save_strategy == "best":
        cause = 'save_strategy is "best", so the Trainer writes folders of its own.'
        action = 'Set save_strategy="steps", as often as it evaluates: the best checkpoint stays (keep=).'
    elif getattr(args, "enable_jit_checkpoint", False):
        cause = "enable_jit_checkpoint has the Trainer write a folder of its own on SIGTERM."
        action = "Leave enable_jit_checkpoint out: the callback saves on SIGTERM."
    elif state.is_hyper_param_search:
        cause = "the trials of a hyperparameter search would all go on from one run."
        action = "Leave the callback out of hyperparameter_search, and train the best trial with it."
    else:
        return
    raise ConfigurationError(cause, code="config.trainer_arguments", action=action)


def _two_sources(report: RestoreReport) -> ConfigurationError:
    return ConfigurationError(
        f"train() has read the folder of resume_from_checkpoint, and the run has step {report.step}, too.",
        code="config.trainer_resume",
        action="Call train() without resume_from_checkpoint: the callback restores the run. To bring an old folder "
        "along, give it once, with a run that has no checkpoint yet.",
        step=report.step,
    )


def _best_metric_of(args: TrainingArguments) -> str:
    name: str = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def _keep_of(args: TrainingArguments) -> KeepPolicy | None:
    """The policy that keeps what Trainer would keep."""
    if args.save_total_limit is None or args.save_total_limit <= 0:
        return None
    last = KeepLast(args.save_total_limit)
    if args.metric_for_best_model is None or args.eval_strategy == "no":
        return last
    return last | KeepBest(_best_metric_of(args), mode="max" if args.greater_is_better else "min")


def _of_the_model(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation that measure the model."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "epoch" and not name.endswith(_OF_THE_MACHINE)
    }
