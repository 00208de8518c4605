"""`LightningCheckpoint`: the callback that saves and restores the training of a `lightning.Trainer`."""

from __future__ import annotations

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import _TunerExitException

from holdfast.trainers.lightning_hooks import LightningHooks

__all__ = ["LightningCheckpoint"]


class LightningCheckpoint(LightningHooks, Checkpoint):  # type: ignore[misc] # Lightning is not checked
    """Saves the training of a `Trainer` into `run`, and restores it at the start of `fit`, on any number of ranks: the
    model as the strategy wraps it, optimizers, schedulers, the loop, random generators, callbacks, data module and
    precision plugin. It takes the place of `ModelCheckpoint`: leave `enable_checkpointing` as it is.

    A step is a batch after which an optimizer has stepped, and it ends with the validation that follows, if one does.
    `save` says after which steps to save (default: as often as it pays, and before a preemption), `keep` which
    checkpoints stay. The last step of `fit` is always saved. With `every_epochs`, the end of every so many epochs is
    saved too. A checkpoint records the metrics that were logged in its step; where `keep` has a ``KeepBest(metric)``,
    each validation or epoch that logs the metric is saved.

    `order` is the order of `holdfast.data` that the loader has as its batch sampler: it is saved, and advances with
    each batch. `extra` is a dict of further entries of the state, which a load fills. `select` are globs of names, as
    in `holdfast.save`. `at`, such as ``"step=700"``, is the checkpoint that the first `fit` begins with, in place of
    the newest one. `memory`, `local`, `listeners`, `on_failed_save`, `max_resumes` and `timeout_s` are those of the
    `Checkpointer`.

    After a preemption `fit` returns early, on all ranks after the same step, and without the hooks of the end of the
    epoch and of the training: end the script with ``sys.exit(callback.exit_code)``.

    `fit` raises what the `Checkpointer` raises, and `ConfigurationError`, code ``config.trainer``: it was given a
    `ckpt_path`, and the run has a checkpoint; the trainer has a callback that cannot be restored; a hook asks for the
    weights in the dict of ``on_save_checkpoint``; or the callback is of the other package of Lightning.
    """

    _quiet_end = _TunerExitException  # Lightning's own callbacks end a fit with it; there is no public one
    _package = "lightning"
