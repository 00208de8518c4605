"""`PytorchLightningCheckpoint`: `LightningCheckpoint` for those who import `pytorch_lightning`, whose
classes are others than those of `lightning`."""

from __future__ import annotations

from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities.exceptions import _TunerExitException

from holdfast.trainers.lightning_hooks import LightningHooks

__all__ = ["PytorchLightningCheckpoint"]


class PytorchLightningCheckpoint(LightningHooks, Checkpoint):  # type: ignore[misc] # Lightning is not checked
    """The same as `LightningCheckpoint`, for a `pytorch_lightning.Trainer`."""

    _quiet_end = _TunerExitException  # Lightning's own callbacks end a fit with it; there is no public one
    _package = "pytorch_lightning"
