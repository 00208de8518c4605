"""Backend ``holdfast`` of vLLM's weight transfer: the engine's worker and the trainer's engine, in vLLM's own classes.

vLLM calls `register` in each of its processes (an entry point of the group ``vllm.general_plugins``). It needs vLLM.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

import torch
import torch.distributed as dist
from torch import nn

import holdfast.view
from holdfast.errors import HoldfastError
from holdfast.frameworks.tested_versions import imports_of, warn_untested
from holdfast.inference.needs import EngineNeeds, StagedVersion, discover
from holdfast.inference.publisher import Publisher
from holdfast.inference.weights import PublishedTensor, StoredWeights, Weights, live_table
from holdfast.inference.worker import InferenceWorker

with imports_of("vllm"):
    from vllm.config import set_current_vllm_config
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightSource,
        WeightTransferEngine,
        materialize_full_tensor,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

BACKEND: Final = "holdfast"

_log = logging.getLogger(__name__)


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
        self.worker = InferenceWorker(_VLLMModel(self), index=index, num_workers=parallel.world_size_across_dp)
        self._failure: HoldfastError | None = None

    def init_transfer_engine(self, init_info: Mapping[str, object]) -> None:
        """As `InferenceWorker.init`, but raises no error of holdfast: all trainer ranks have it. (After an error of one
        worker, vLLM mistakes the answers of the others for those to its next call.)"""
        self._failure = None
        self._keep(lambda: self.worker.init(init_info))

    def start_weight_update(self) -> None:
        """As `InferenceWorker.start`."""
        self._failure = None
        self.worker.start()

    def receive_weights(self, update_info: Mapping[str, object]) -> None:
        """As `InferenceWorker.update`, but its errors are raised by `finish_weight_update`."""
        self._failure = None
        self._keep(lambda: self.worker.update(update_info))

    def update_weights(self, update_info: Mapping[str, object]) -> None:
        """As `receive_weights`. The device has nothing to wait for: what arrives waits on the host."""
        self.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """As `InferenceWorker.finish`; raises the error of an update that failed, so that no label is given to it."""
        if self._failure is not None:
            raise self._failure
        self.worker.finish()

    def _keep(self, work: Callable[[], None]) -> None:
        try:
            work()
        except HoldfastError as error:
            _log.warning("The last version of the weights stays: %s", error)
            self._failure = error

    def shutdown(self) -> None:
        """Forget the trainer."""


class PublishedSource(WeightSource):  # type: ignore[misc]
    """vLLM's `WeightSource` over `weights`, as `Publisher` takes them: a module, tensors by name, or a checkpoint.

    Backend ``holdfast`` takes the weights out of it and sends parts. vLLM's other backends send whole tensors; for
    them, the source gathers or reads one tensor at a time, as their interface asks.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def metadata(self) -> list[ParamMeta]:
        """The names, dtypes and whole shapes of all weights; reads and gathers nothing."""
        if isinstance(self.weights, StoredWeights):
            table = self.weights.table()
        else:
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            table = live_table(self.weights, rank=rank, world_size=size)
        return [ParamMeta(each.name, each.dtype, each.shape) for each in table]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight, whole, in the order of `metadata`. Collective for weights that are divided."""
        names = [each.name for each in self.metadata()]
        if isinstance(self.weights, StoredWeights):
            view = holdfast.view.open(self.weights.path)
            for name in names:
                yield name, view[f"{self.weights.under}/{name}"][...]
            return
        held = self.weights.state_dict() if isinstance(self.weights, nn.Module) else self.weights
        for name in names:
            tensor = held[name]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name!r} is no tensor: this backend of vLLM sends whole tensors only")
            yield name, materialize_full_tensor(tensor.detach())


@dataclass
class HoldfastTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The settings of the trainer's side: the number of the engine's workers, and a host and a deadline as in
    `Publisher`."""

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
            raise TypeError("backend holdfast publishes a PublishedSource")
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
    warn_untested("vllm")
    if BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it refuses a name that it has
        WeightTransferEngineFactory.register_engine(BACKEND, HoldfastWeightTransferEngine)
        WeightTransferTrainerFactory.register_engine(BACKEND, HoldfastTrainerEngine)
