"""Backend ``holdfast`` of vLLM's weight transfer: the engine's worker and the trainer's engine, in vLLM's own classes.

vLLM calls `register` in each of its processes (an entry point of the group ``vllm.general_plugins``). It needs vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from holdfast.inference.needs import EngineNeeds, StagedVersion, discover
from holdfast.inference.publisher import Publisher
from holdfast.inference.weight_source import PublishedSource
from holdfast.inference.weights import PublishedTensor
from holdfast.inference.worker import InferenceWorker

BACKEND: Final = "holdfast"


class _VLLMModel:
    """The `EngineModel` of a vLLM worker. It discovers with a copy of the model on the meta device, since a model that
    serves may hold its weights in another form, and loads as vLLM reloads, which makes that form again."""

    def __init__(self, owner: WeightTransferEngine[Any, Any]) -> None:
        self._owner = owner

    def discover(self, weights: Sequence[PublishedTensor]) -> EngineNeeds:
        """As `EngineModel.discover`."""
        config = copy.copy(self._owner.vllm_config)
        # Layers enter themselves there by name, and refuse a name that is taken.
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        dtype = self._owner.model_config.dtype
        with set_current_vllm_config(config), set_default_torch_dtype(dtype), torch.device("meta"):
            model: Any = initialize_model(config, model_config=self._owner.model_config)
            return discover(model.load_weights, weights, model=model)

    def apply(self, version: StagedVersion) -> None:
        """As `EngineModel.apply`."""
        model = self._owner.model
        with torch.device(self._owner.device):
            initialize_layerwise_reload(model)
            version.apply(model.load_weights)
            finalize_layerwise_reload(model, self._owner.model_config)


class HoldfastWeightTransferEngine(WeightTransferEngine[Mapping[str, object], Mapping[str, object]]):  # type: ignore[misc]
    """The worker's side, which vLLM makes for `WeightTransferConfig(backend="holdfast")`."""

    init_info_cls = dict
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.worker = InferenceWorker(_VLLMModel(self), index=index)

    def init_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """As `InferenceWorker.init`."""
        self.worker.init(init_info)

    def start_weight_update(self) -> None:
        """As `InferenceWorker.start`."""
        self.worker.start()

    def receive_weights(self, update_info: Mapping[str, object]) -> None:
        """As `InferenceWorker.update`."""
        self.worker.update(update_info)

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """As `InferenceWorker.update`. The device has nothing to wait for: what arrives waits on the host."""
        self.worker.update(update_info)

    def finish_weight_update(self) -> None:
        """As `InferenceWorker.finish`."""
        self.worker.finish()

    def shutdown(self) -> None:
        """Forget the trainer."""


@dataclass
class HoldfastTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer's side needs: the number of the engine's workers, and as `Publisher` a host and a deadline."""

    backend: ClassVar[str] = BACKEND

    num_workers: int
    host: str | None = None
    timeout_s: float = 300.0


class HoldfastTrainerEngine(TrainerWeightTransferEngine[HoldfastTrainerInitInfo]):  # type: ignore[misc]
    """The trainer's side in vLLM's own interface: a `Publisher` of the weights of a `PublishedSource`."""

    init_info_cls = HoldfastTrainerInitInfo

    def __init__(self, publisher: Publisher, *, client: Any, source: PublishedSource, rank: int) -> None:
        super().__init__(client=client, source=source, is_sender=rank == 0)
        self.publisher = publisher

    @classmethod
    def trainer_init(cls, init_info: HoldfastTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Make the publisher; collective over the trainer's ranks."""
        if not isinstance(source, PublishedSource):
            raise TypeError("backend holdfast publishes a holdfast.inference.weight_source.PublishedSource")
        publisher = Publisher(
            source.weights,
            (client,) if init_info.is_sender else (),
            (init_info.num_workers,) if init_info.is_sender else (),
            host=init_info.host,
            timeout_s=init_info.timeout_s,
        )
        return cls(publisher, client=client, source=source, rank=init_info.rank)

    def send_weights(self) -> None:
        """Publish the weights as they are now; collective over the trainer's ranks."""
        self.publisher.publish()


def register() -> None:
    """Make backend ``holdfast`` known to vLLM in this process; once more does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it refuses a name that it has
        WeightTransferEngineFactory.register_engine(BACKEND, HoldfastWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, HoldfastTrainerEngine)
