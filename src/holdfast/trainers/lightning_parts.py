"""The state of a Lightning `Trainer` beside its model, optimizers, schedulers and loop."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from holdfast.errors import ConfigurationError

_log = logging.getLogger(__name__)

_PACKAGES: Final = ("lightning", "pytorch_lightning")
#: The entries of a checkpoint of Lightning that its hooks find here, too.
_GIVEN: Final = ("epoch", "global_step")
_PLAIN: Final = (bool, int, float, str, type(None))


class LightningParts:
    """The states of callbacks, of the data module and of the precision plugin, the last metrics, and what
    ``on_save_checkpoint`` of the module and of the user's callbacks adds. Plain hyper-parameters are saved for readers,
    and not loaded.

    A load passes over the state of a part that the trainer does not have, with a warning, as Lightning does.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: The restored metrics that callbacks and schedulers may ask for.
        self.metrics: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, object]:
        """The states by kind of part and by name."""
        trainer = self._trainer
        states: dict[str, object] = {}
        for kind, parts in self._parts().items():
            states[kind] = {name: state for name, part in parts.items() if (state := part.state_dict())}
        file = _LightningFile(trainer, {})
        for callback in _with_own("on_save_checkpoint", trainer.callbacks):
            callback.on_save_checkpoint(trainer, trainer.lightning_module, file)
        for module in _with_own("on_save_checkpoint", [trainer.lightning_module]):
            module.on_save_checkpoint(file)
        states["added"] = {name: value for name, value in file.items() if name not in _GIVEN}
        states["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        hyper_parameters = dict(trainer.lightning_module.hparams)
        states["hyper_parameters"] = {name: value for name, value in hyper_parameters.items() if _is_plain(value)}
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Give each part its state."""
        trainer = self._trainer
        for kind, parts in self._parts().items():
            for name, state in states[kind].items():
                if name in parts:
                    parts[name].load_state_dict(state)
                else:
                    _log.warning("the checkpoint has a state in %s that this Trainer has no part for: %s", kind, name)
        # Schedulers and EarlyStopping may ask for the metrics of an earlier validation before there is a new one.
        self.metrics = {name: torch.tensor(value, dtype=torch.float64) for name, value in states["metrics"].items()}
        trainer.callback_metrics.update(self.metrics)
        file = _LightningFile(trainer, states["added"])
        for module in _with_own("on_load_checkpoint", [trainer.lightning_module]):
            module.on_load_checkpoint(file)
        for callback in _with_own("on_load_checkpoint", trainer.callbacks):
            callback.on_load_checkpoint(trainer, trainer.lightning_module, file)

    def _parts(self) -> dict[str, dict[str, Any]]:
        trainer = self._trainer
        callbacks = {each.state_key: each for each in trainer.callbacks if each not in trainer.checkpoint_callbacks}
        others = {"data_module": trainer.datamodule, "precision": trainer.precision_plugin}
        named = {kind: {} if part is None else {type(part).__qualname__: part} for kind, part in others.items()}
        return {"callbacks": callbacks, **named}


class _LightningFile(dict[str, Any]):
    """The dict that ``on_save_checkpoint`` and ``on_load_checkpoint`` get: without the weights that Lightning puts into
    its own."""

    def __init__(self, trainer: Any, added: Mapping[str, Any]) -> None:
        super().__init__(epoch=trainer.current_epoch, global_step=trainer.global_step, **added)

    def __missing__(self, name: str) -> Any:
        raise ConfigurationError(
            f"on_save_checkpoint or on_load_checkpoint asks for {name!r}, which the checkpoint does not have. Holdfast "
            "saves the tensors of the model and of the optimizers from where they are, and makes no dict of them.",
            code="config.trainer",
            action=f"Ask only `if {name!r} in checkpoint`; the option select= leaves weights out.",
        )


def _with_own(hook: str, items: Iterable[Any]) -> list[Any]:
    """The items that have a `hook` of the user's, and not one of Lightning's."""
    return [item for item in items if getattr(type(item), hook).__module__.partition(".")[0] not in _PACKAGES]


def _is_plain(value: object) -> bool:
    """Whether `value` consists of values that every checkpoint can hold."""
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, _PLAIN)
