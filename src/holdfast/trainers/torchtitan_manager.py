"""`TorchtitanManager`: what torchtitan's `Trainer` builds in place of its own checkpoint manager."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import tyro

from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer.events import EventListener
from holdfast.checkpointer.memory_option import Memory
from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.frameworks.tested_versions import imports_of, warn_untested
from holdfast.frameworks.titan_containers import TitanParts
from holdfast.loading import load
from holdfast.policy.keep import KeepLast, KeepPolicy
from holdfast.policy.stop import StopAfter
from holdfast.policy.when import EverySteps, OnPreemption, SavePolicy
from holdfast.state.random_state import RandomState

with imports_of("torchtitan"):
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        CheckpointManager,
    )
    from torchtitan.tools import filesystem

__all__ = ["TorchtitanManager"]

#: The fields of the config that torchtitan does not have.
_OWN: Final = ("save", "keep", "memory", "local", "listeners", "on_failed_save", "max_resumes", "timeout_s")
_RANDOM: Final = "random"
_ALONE: Final = "Leave it out; `holdfast export` writes weights alone, in another dtype and for Hugging Face."
#: Options of torchtitan that have no place here, and what to do instead.
_REFUSED: Final = {
    "last_save_model_only": _ALONE,
    "last_save_in_hf": _ALONE,
    "create_seed_checkpoint": "Leave it out: any job may begin a run, and any layout loads what it saves.",
}


class TorchtitanManager(BaseCheckpointManager):  # type: ignore[misc] # torchtitan is not checked
    """Saves the training of torchtitan's `Trainer` into a run, and restores it, on any number of ranks and with any
    parallelism: model, optimizers, schedulers, data loader, counts and random generators.

    Set ``config.checkpoint = TorchtitanManager.Config(enable=True)``. Checkpoints are those of a `Checkpointer`: steps
    go on while they are copied, and nothing is gathered. Steps have torchtitan's numbers, which begin at 1. The last
    step is always saved, whole.

    Fields of torchtitan: `folder` below the dump folder is the run; `interval`, unless `save` is a policy;
    `keep_latest_k`, unless `keep` is one; `load_step`; `exclude_from_loading`; `enable_first_step_checkpoint`;
    `load_only`. In a run without checkpoints, the options `initial_load_...` load what torchtitan's own manager loads.
    Fields of our own, which the command line does not show: `save`, `keep`, `memory`, `local`, `listeners`,
    `on_failed_save`, `max_resumes` and `timeout_s`, as for `Checkpointer`.

    After a preemption, `train` ends on all ranks after the same step, with `SystemExit` and code 75.

    Raises `ConfigurationError`, code ``config.trainer``, for options that write weights alone or a seed checkpoint, and
    what `Checkpointer` and `load` raise. A data loader of torchtitan does not load on another number of data-parallel
    ranks (`IncompatibleError`, code ``incompatible.per_rank``): exclude it, or take one that has an order of
    ``holdfast.data``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc] # as above
        """The options of the manager."""

        last_save_model_only: bool = False
        save: Annotated[SavePolicy | None, tyro.conf.Suppress] = None
        keep: Annotated[KeepPolicy | None, tyro.conf.Suppress] = None
        memory: Annotated[Memory | None, tyro.conf.Suppress] = field(default_factory=Memory)
        local: Annotated[str | None, tyro.conf.Suppress] = None
        listeners: Annotated[Sequence[EventListener], tyro.conf.Suppress] = ()
        on_failed_save: Annotated[Literal["warn"] | StopAfter, tyro.conf.Suppress] = "warn"
        max_resumes: Annotated[int | None, tyro.conf.Suppress] = None
        timeout_s: Annotated[float, tyro.conf.Suppress] = 600.0

        def to_dict(self) -> dict[str, Any]:
            """The options as plain values, for logs."""
            found: dict[str, Any] = BaseCheckpointManager.Config.to_dict(self)
            return found | {name: repr(getattr(self, name)) for name in _OWN}

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: Sequence[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        if not self.enable:
            return
        warn_untested("torchtitan")
        self.save_future = None  # torchtitan waits for it
        for option, action in _REFUSED.items():
            if getattr(config, option):
                raise ConfigurationError(f"checkpoint.{option} is set.", code="config.trainer", action=action)
        self._config = config
        self._run = filesystem.join(base_folder, config.folder)
        self._built = {
            "dataloader": dataloader,
            "model_parts": model_parts,
            "optimizers": optimizers,
            "lr_schedulers": lr_schedulers,
            "sd_adapter": sd_adapter,
        }
        self.states = states
        self.states |= {MODEL: TitanParts(list(model_parts)), OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers}
        self.states |= {} if dataloader is None else {DATALOADER: dataloader}
        self.states[_RANDOM] = RandomState()
        self._checkpointer = None if config.load_only else self._checkpointer_of(self.states)

    def _checkpointer_of(self, state: Mapping[str, object]) -> Checkpointer:
        config = self._config
        kept = KeepLast(config.keep_latest_k) if config.keep_latest_k else None
        return Checkpointer(
            self._run,
            state,
            memory=config.memory,
            local=config.local,
            save=EverySteps(config.interval) | OnPreemption() if config.save is None else config.save,
            keep=kept if config.keep is None else config.keep,
            listeners=config.listeners,
            on_failed_save=config.on_failed_save,
            max_resumes=config.max_resumes,
            timeout_s=config.timeout_s,
        )

    def _load(self, step: int = -1) -> bool:
        at = None if step == -1 else f"step={step}"
        excluded = [f"!{name}" for name in self._config.exclude_from_loading]
        if self._checkpointer is None or excluded:
            is_loaded = self._load_part(at, excluded)
        else:
            is_loaded = self._checkpointer.restore(at=at).step is not None
        return is_loaded or self._load_initial()

    def _load_part(self, at: str | None, excluded: Sequence[str]) -> bool:
        """Load without what is `excluded`. Returns whether there was a checkpoint."""
        path = self._run if at is None else f"{self._run}@{at}"
        try:
            load(path, into=self.states, select=excluded or None, continues=not self._config.load_only)
        except NotFoundError:
            if at is not None:
                raise
            return False
        return True

    def _load_initial(self) -> bool:
        """Load what torchtitan's own manager begins a training with: weights of Hugging Face, or its own folder."""
        config = self._config
        if not (config.initial_load_path or config.initial_load_in_hf):
            return False
        initial = {name: getattr(config, name) for name in dir(config) if name.startswith("initial_load_")}
        own = CheckpointManager.Config(enable=True, folder=config.folder, load_only=True, keep_latest_k=0, **initial)
        ours = (MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER, _RANDOM)
        others = {name: each for name, each in self.states.items() if name not in ours}
        manager = CheckpointManager(own, states=others, base_folder=self._run, **self._built)
        return bool(manager.load())

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        checkpointer = self._checkpointer
        if checkpointer is None:
            return False
        handle = checkpointer.step(curr_step)
        is_saved = handle is not None and not handle.memory_only
        if checkpointer.preempted:
            checkpointer.close()
            sys.exit(checkpointer.exit_code)
        is_first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if not is_saved and (last_step or is_first):
            checkpointer.save(curr_step)
            is_saved = True
        return is_saved

    def _maybe_wait_for_staging(self) -> None:
        """Nothing: the optimizers of the container wait for a copy themselves."""

    def _wait_for_saving(self) -> None:
        """Nothing: torchtitan calls this for a ``save_future`` only."""

    def _close(self) -> None:
        """Wait until all saves are durable; where an exception ends the job, leave that to the keeper."""
        if self._checkpointer is not None:
            self._checkpointer.__exit__(*sys.exc_info())
