"""Types of other libraries that need more than the common protocols: one table, by the names of the types.

It imports none of these libraries. A type is found under its own name or that of a base class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from holdfast.frameworks import metrics, titan_counts
from holdfast.frameworks.random_generators import (
    RandomGenerators,
    read_numpy,
    read_python,
    write_numpy,
    write_python,
)


@dataclass(frozen=True)
class Wrapper:
    """An object without state of its own: the object in `attribute` is saved and loaded in its place."""

    attribute: str


@dataclass(frozen=True)
class WholeObject:
    """An object whose whole state `read` returns and `write` puts back.

    With `is_random`, it is restored after everything else. `in_module` is for an object inside a module: it returns the
    part that belongs to the module's state, beside its parameters, its buffers and the modules inside it, or None.
    """

    read: Callable[[Any], object]
    write: Callable[[Any, Any], object]
    is_random: bool = False
    in_module: Callable[[Any], WholeObject | None] = lambda _: None


@dataclass(frozen=True)
class Transparent:
    """A module or optimizer that overrides ``state_dict``, but keeps its whole state where torch's own types do."""


@dataclass(frozen=True)
class Refused:
    """An object that cannot be saved: `problem` completes "it ...", `action` says what works instead.

    `applies` tells whether an object of the type is refused. With `is_local`, only the module's own parameters are
    refused, and not those of modules below it.
    """

    problem: str
    action: str
    applies: Callable[[Any], bool] = lambda _: True
    is_local: bool = False


KnownType = Wrapper | WholeObject | Transparent | Refused


@lru_cache(maxsize=1024)
def known_type(kind: type) -> KnownType | None:
    """The table's entry for a type or one of its bases; None for most types."""
    names = ((base.__module__, base.__qualname__) for base in kind.__mro__)
    return next((_KNOWN_TYPES[name] for name in names if name in _KNOWN_TYPES), None)


def type_of(item: object) -> type:
    """The type of `item`, in a form that mypy takes as hashable: it doubts that types of any metaclass are."""
    return type(item)


def unwrapped(item: object) -> object:
    """The object inside all wrappers around `item`: mostly `item` itself."""
    while isinstance(known := known_type(type_of(item)), Wrapper):
        item = getattr(item, known.attribute)
    return item


def refusal_of(item: object) -> Refused | None:
    """The refusal of `item`, which says why it cannot be saved and what works instead; None if it can be saved."""
    known = known_type(type_of(item))
    return known if isinstance(known, Refused) and known.applies(item) else None


def _write_bit_generator(generator: Any, state: Any) -> None:
    generator.state = state


def _in_parts(action: str) -> Refused:
    return Refused("runs the job, and is not part of its state", action)


_OWN_PART_OF_A_METRIC = WholeObject(metrics.read_own, metrics.write_own)
_ADAPTERS_ONLY = (
    "Load these weights from their source, and save only the trained ones: select= takes globs, such as "
    'select="**lora_*".'
)
_WEIGHTS_OF_4_BITS = Refused(
    "has packed its weight as only this machine reads it, which an evaluation on a CPU does",
    f"Call state_dict() of the module, which unpacks the weight. Or: {_ADAPTERS_ONLY}",
    applies=lambda module: (
        not hasattr(module.weight, "quant_state") or getattr(module.weight.quant_state, "packing_format_for_cpu", False)
    ),
    is_local=True,
)
_WEIGHTS_OF_8_BITS = Refused("keeps the scales of its weight outside of it", _ADAPTERS_ONLY, is_local=True)
_LIGHTNING_TRAINER = _in_parts(
    "Put trainer.model, trainer.optimizers, trainer.lr_scheduler_configs and holdfast.PerRank(trainer.fit_loop) into "
    "the state, in on_fit_start of a callback."
)
_OF_MEGATRON = Refused(
    "has names and parts that depend on the layout of the ranks",
    "Put what holdfast.trainers.megatron.megatron_state(model, optimizer) returns into the state instead.",
)
_SILENT_LOADER = Refused(
    "does not report its position in the data",
    "Use a loader with a state_dict, such as torchdata's StatefulDataLoader (accelerate: use_stateful_dataloader=True) "
    "in a holdfast.PerRank; or put the position itself, the epoch and the number of batches, into the state.",
)

_KNOWN_TYPES: dict[tuple[str, str], KnownType] = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): Wrapper("optimizer"),
    ("accelerate.scheduler", "AcceleratedScheduler"): Wrapper("scheduler"),
    **{
        (f"{package}.wrappers", name): Wrapper(attribute)
        for package in ("lightning.fabric", "lightning_fabric")
        for name, attribute in (
            ("_FabricModule", "_forward_module"),
            ("_FabricOptimizer", "_optimizer"),
            ("_FabricDataLoader", "_dataloader"),
        )
    },
    **{
        (f"{package}.{module}", name): known
        for package in ("lightning.pytorch", "pytorch_lightning")
        for module, name, known in (
            ("core.optimizer", "LightningOptimizer", Wrapper("_optimizer")),
            ("utilities.types", "LRSchedulerConfig", Wrapper("scheduler")),
            # Its state_dict leaves out the averages; the averaged model holds them and their count.
            ("callbacks.weight_averaging", "WeightAveraging", Wrapper("_average_model")),
            ("trainer.trainer", "Trainer", _LIGHTNING_TRAINER),
        )
    },
    ("accelerate.accelerator", "Accelerator"): _in_parts(
        "Save the state that holdfast.trainers.accelerate_state.state_of(accelerator) makes, or put what "
        "accelerator.prepare returned into the state."
    ),
    **{
        (f"{package}.fabric", "Fabric"): _in_parts("Put what fabric.setup returned into the state.")
        for package in ("lightning.fabric", "lightning_fabric")
    },
    ("transformers.trainer", "Trainer"): _in_parts(
        "Put the model, the optimizer and the lr_scheduler into the state that a callback's on_train_begin gets."
    ),
    ("transformers.trainer_callback", "TrainerState"): Refused(
        "has parts that differ between ranks and between jobs",
        "Put the numbers that you need into the state, such as state.best_metric; state.global_step is the "
        "next_step of a report.",
    ),
    ("holdfast.frameworks.random_generators", "RandomGenerators"): WholeObject(
        RandomGenerators.read, RandomGenerators.write, is_random=True
    ),
    ("random", "Random"): WholeObject(read_python, write_python, is_random=True),
    ("numpy.random._generator", "Generator"): WholeObject(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: _write_bit_generator(generator.bit_generator, state),
        is_random=True,
    ),
    ("numpy.random.bit_generator", "BitGenerator"): WholeObject(
        lambda generator: generator.state, _write_bit_generator, is_random=True
    ),
    ("numpy.random.mtrand", "RandomState"): WholeObject(read_numpy, write_numpy, is_random=True),
    ("torchmetrics.metric", "Metric"): WholeObject(
        metrics.read_metric,
        metrics.write_metric,
        in_module=lambda metric: _OWN_PART_OF_A_METRIC if metrics.is_persistent(metric) else None,
    ),
    ("torchmetrics.collections", "MetricCollection"): WholeObject(
        metrics.read_collection, metrics.write_collection, in_module=metrics.share_states
    ),
    ("torchmetrics.wrappers.tracker", "MetricTracker"): WholeObject(metrics.read_tracker, metrics.write_tracker),
    ("torchft.optim", "OptimizerWrapper"): Wrapper("optim"),
    ("holdfast.frameworks.still", "Still"): Wrapper("value"),
    # Its hooks split the one weight that it has, and gather it for that.
    ("torchtitan.models.common.attention", "FusedQKVLinear"): Transparent(),
    ("torchtitan.trainer", "Trainer"): WholeObject(titan_counts.read_counts, titan_counts.write_counts),
    ("bitsandbytes.optim.optimizer", "Optimizer8bit"): Transparent(),
    ("bitsandbytes.nn.modules", "Linear4bit"): _WEIGHTS_OF_4_BITS,
    ("bitsandbytes.nn.modules", "Linear8bitLt"): _WEIGHTS_OF_8_BITS,
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"): Refused(
        "holds the state of different parameters on each rank",
        "Shard the model with torch.distributed.fsdp.fully_shard (FSDP2), and use the optimizer itself.",
    ),
    ("deepspeed.runtime.base_optimizer", "DeepSpeedOptimizer"): Refused(
        "trains flat tensors of its own, and does not know the names of the parameters in them",
        'Put the engine itself into the state, as {"engine": engine}.',
    ),
    ("megatron.core.transformer.module", "MegatronModule"): _OF_MEGATRON,
    ("megatron.core.optimizer.optimizer", "MegatronOptimizer"): _OF_MEGATRON,
    ("accelerate.data_loader", "DataLoaderAdapter"): replace(
        _SILENT_LOADER, applies=lambda loader: not hasattr(loader.base_dataloader, "state_dict")
    ),
    **{
        (f"torch.utils.data.{module}", name): replace(
            _SILENT_LOADER, applies=lambda loader: not hasattr(loader, "state_dict")
        )
        for module, name in (("dataloader", "DataLoader"), ("sampler", "Sampler"))
    },
    ("torch.nn.modules.lazy", "LazyModuleMixin"): Transparent(),
}
