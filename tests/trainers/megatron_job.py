"""A small job of Megatron-core: a GPT with grouped queries, fused SwiGLU and tied embeddings, or experts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns of packages that are not installed
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.interop.megatron_state import gradient, named_weight
    from tests.trainers.megatron_on_cpu import megatron_on_cpu

WIDTH, LAYERS = 16, 4


class Layout(NamedTuple):
    """The division of a job among the ranks: sizes of the parallel axes (the rest of the ranks is data parallel),
    whether the optimizer is distributed, the least number of elements in a bucket of it, whether the weights are
    gathered in the next forward, and the number of parts of each expert."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    distributed: bool = True
    bucket: int | None = 500
    late: bool = False
    expert_tp: int = 1


class Kind(NamedTuple):
    """The model of a job."""

    bf16: bool = True
    fp16: bool = False
    experts: int | None = None
    grouped: bool = False
    tied: bool = True
    vocabulary: int = 64


class Job(NamedTuple):
    chunks: list[Any]
    optimizer: Any
    scheduler: Any


@contextmanager
def megatron_job(layout: Layout, kind: Kind, *, seed: int = 0) -> Iterator[Job]:
    """A job in a fresh layout of the ranks. Its weights depend on `seed` and the rank."""
    with megatron_on_cpu():
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
        )
        try:
            torch.manual_seed(seed + 1000 * dist.get_rank())
            chunks = _chunks(layout, kind)
            optimizer = _optimizer(chunks, layout, kind)
            yield Job(chunks, optimizer, _scheduler(optimizer))
        finally:
            destroy_layout()


def destroy_layout() -> None:
    """Forget the process groups of the layout."""
    parallel_state.destroy_model_parallel()


def _chunks(layout: Layout, kind: Kind) -> list[Any]:
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,  # the ranks of tensor parallelism would need one seed for it
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        num_moe_experts=kind.experts,
        pipeline_dtype=_dtype(kind),
        params_dtype=_dtype(kind),
        bf16=kind.bf16,
        fp16=kind.fp16,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=kind.experts, moe_grouped_gemm=kind.grouped)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed,
        overlap_grad_reduce=True,
        overlap_param_gather=layout.late,
        bucket_size=layout.bucket,
    )
    chunks = []
    for stage in range(layout.vpp or 1):
        virtual = {} if layout.vpp is None else {"ignore_virtual": False, "vp_stage": stage}
        chunk = GPTModel(
            config,
            spec,
            vocab_size=kind.vocabulary,
            max_sequence_length=8,
            pre_process=parallel_state.is_pipeline_first_stage(**virtual),
            post_process=parallel_state.is_pipeline_last_stage(**virtual),
            share_embeddings_and_output_weights=kind.tied,
            position_embedding_type="rope",
            vp_stage=None if layout.vpp is None else stage,
        ).to(_dtype(kind))
        chunks.append(DistributedDataParallel(config, ddp, chunk, disable_bucketing=stage > 0))
    return chunks


def _dtype(kind: Kind) -> torch.dtype:
    return torch.bfloat16 if kind.bf16 else torch.float16 if kind.fp16 else torch.float32


def _optimizer(chunks: list[Any], layout: Layout, kind: Kind) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        min_lr=0.001,
        weight_decay=0.1,
        bf16=kind.bf16,
        fp16=kind.fp16,
        params_dtype=_dtype(kind),
        use_distributed_optimizer=layout.distributed,
        overlap_param_gather=layout.late,
        clip_grad=0.0,
        initial_loss_scale=1024.0,
    )
    return get_megatron_optimizer(config, chunks)


def _scheduler(optimizer: Any) -> Any:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=2,
        lr_decay_steps=20,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20,
        wd_incr_style="constant",
    )


def train(job: Job, steps: int, *, first: int = 0) -> None:
    """Steps whose gradients are functions of the weights, so that all layouts compute the same."""
    for step in range(first, first + steps):
        gather_weights(job)
        for chunk in job.chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(gradient(parameter, step))
        with torch.no_grad():
            done, *_ = job.optimizer.step()
        assert done
        job.scheduler.step(increment=1)


def gather_weights(job: Job) -> None:
    """Gather the weights, as a forward does, where a step of the optimizer does not."""
    for chunk in job.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def fill(job: Job) -> None:
    """Give each weight a value that follows from its key and its global coordinates, and the masters the same."""
    for chunk in job.chunks:
        for item in chunk.module.sharded_state_dict().values():
            if isinstance(item, ShardedTensorFactory):
                made = item.build()
                made = [_value(shard) for shard in made] if isinstance(made, list) else _value(made)
                item.data.detach().copy_(item.merge_fn(made).view_as(item.data))
            elif isinstance(item, ShardedTensor):
                item.data.detach().copy_(_value(item))
    job.optimizer.reload_model_params()


def _value(shard: ShardedTensor) -> torch.Tensor:
    values = named_weight(shard.key, tuple(shard.global_shape))
    return values[shard.global_slice()].view(shard.local_shape).to(shard.dtype)


def shards(tree: Any) -> list[Any]:
    """The descriptors of tensors in a sharded state dict of Megatron, with fused ones taken apart."""
    apply_factories(tree)
    return [item for item in nested_values(tree) if isinstance(item, ShardedTensor)]


def weights(job: Job) -> dict[str, Any]:
    """The sharded state dict of all chunks."""
    return {str(number): chunk.module.sharded_state_dict() for number, chunk in enumerate(job.chunks)}


def whole_state(job: Job) -> dict[str, torch.Tensor]:
    """The state of a job on one rank without a distributed optimizer, by Megatron's own description: each logical
    tensor by its key."""
    metadata = {"chained_optim_avoid_prefix": True}
    tree = {"model": weights(job), "optimizer": job.optimizer.sharded_state_dict(weights(job), metadata=metadata)}
    found: dict[str, torch.Tensor] = {}
    for shard in shards(tree):
        tensor = found.setdefault(shard.key, torch.full(shard.global_shape, torch.nan, dtype=shard.dtype))
        tensor[shard.global_slice()] = shard.data.detach()
    return found
