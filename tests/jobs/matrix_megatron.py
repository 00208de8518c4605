"""The Megatron side of the cross-framework matrix: Megatron-core's own GPT on tensor and pipeline parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe import moe_utils

from holdfast.trainers.megatron import megatron_state
from tests.jobs.matrix_gpt import GROUPS, HEAD, HEADS, LENGTH, SLOTS, Whole, batch
from tests.trainers.megatron_job import Job, Kind, Layout, megatron_job, shards

VOCABULARY = 64


class Case(NamedTuple):
    """The layout and the precision of a job."""

    layout: Layout
    kind: Kind = Kind()


#: By the name of the case; the ranks that are left are data parallel.
CASES = {
    "megatron-tp2": Case(Layout(tp=2)),
    "megatron-pp2": Case(Layout(pp=2)),
    "megatron-tp2pp2": Case(Layout(tp=2, pp=2)),
    "megatron-vpp": Case(Layout(pp=2, vpp=2)),
    "megatron-tp2-fp32": Case(Layout(tp=2), Kind(bf16=False)),
    "megatron-tp2-undistributed": Case(Layout(tp=2, distributed=False)),
    "megatron-tp2-late": Case(Layout(tp=2, late=True)),
    "megatron-pp2-fp16": Case(Layout(pp=2), Kind(bf16=False, fp16=True)),
    "megatron-ep2-moe": Case(Layout(ep=2), Kind(experts=4)),
    "megatron-pp2ep2-moe": Case(Layout(pp=2, ep=2), Kind(experts=4)),
}


class MegatronJob:
    """A job of Megatron-core."""

    def __init__(self, job: Job) -> None:
        self.job = job
        for chunk in job.chunks:
            chunk.broadcast_params()  # the ranks drew different ones
        job.optimizer.reload_model_params()
        self.state: dict[str, Any] = megatron_state(job.chunks, job.optimizer, job.scheduler)
        self.cast: str | None = "model"

    def train(self, steps: int, *, first: int) -> float:
        """As `TorchJob.train`, by Megatron's own schedule of the pipeline; the loss is that of the last stage."""
        loss = 0.0
        for step in range(first, first + steps):
            for chunk in self.job.chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            loss = self._run(batch(step, parallel_state.get_data_parallel_rank(), VOCABULARY), forward_only=False)
            finalize_model_grads(self.job.chunks)
            done, *_ = self.job.optimizer.step()
            assert done
            self.job.scheduler.step(increment=1)
        return loss

    def loss(self) -> float:
        """As `TorchJob.loss`."""
        for chunk in self.job.chunks:
            chunk.eval()
        with torch.no_grad():
            return self._run(batch(1000, 0, VOCABULARY), forward_only=True)

    def _run(self, tokens: torch.Tensor, *, forward_only: bool) -> float:
        mask = ~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
        places = torch.arange(LENGTH).repeat(len(tokens), 1)

        def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = losses.float().mean()
            return loss, {"loss": loss.detach().clone()}

        def forward(_: Any, chunk: Any) -> Any:
            return chunk(tokens, places, mask, labels=tokens), loss_of

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(()) for _ in self.job.chunks] if len(self.job.chunks) > 1 else None,
            model=self.job.chunks,
            num_microbatches=2 if len(self.job.chunks) > 1 else 1,
            seq_length=LENGTH,
            micro_batch_size=len(tokens),
            forward_only=forward_only,
        )
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [float(each["loss"]) for each in found])
        return float(next(losses[0] for losses in every if losses))

    def steps(self) -> set[float]:
        """As `TorchJob.steps`."""
        inner = [each.optimizer for each in self.job.optimizer.chained_optimizers]
        return {float(slots["step"]) for each in inner for slots in each.state.values()}

    def whole(self) -> Whole:
        """The state in global coordinates: what the ranks of data parallelism hold of a parameter, joined, at the
        places that Megatron's descriptors give."""
        found: Whole = {}
        for slot in SLOTS:
            local = _local_values(self.job, slot)
            for key, place, shape, value in _everywhere(list(_placed(self.job, local))):
                found.setdefault(f"{key}/{slot}", torch.full(shape, torch.nan))[place] = value
        return dict(_our_names(found))

    def low_precision_faults(self) -> list[str]:
        """The parameters that are no casts of their master weights."""
        masters = _local_values(self.job, "master")
        named = [pair for chunk in self.job.chunks for pair in chunk.named_parameters()]
        return [
            name
            for name, parameter in named
            if not torch.equal(parameter.detach(), masters[id(parameter)].to(parameter.dtype))
        ]

    def catch_up(self, steps: int) -> None:
        """Let Megatron's scheduler go on, as its rates do not come from another framework."""
        self.job.scheduler.step(increment=steps)


@contextmanager
def job(case: str, *, seed: int) -> Iterator[MegatronJob]:
    """A job with the weights that `seed` draws."""
    layout, kind = CASES[case]
    moe_utils.te_general_gemm = None  # Megatron 0.16.1 looks it up, and defines it only with Transformer Engine
    with megatron_job(layout, kind._replace(vocabulary=VOCABULARY), seed=seed) as made:
        yield MegatronJob(made)


def _local_values(job: Job, slot: str) -> dict[int, torch.Tensor]:
    """The values of a slot for all elements of each local parameter, in fp32: those of all data parallel ranks."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in job.optimizer.chained_optimizers:
        for parameter, held, main in _trained(optimizer):
            value = main if slot == "master" else optimizer.optimizer.state[main][slot]
            whole = torch.full((parameter.numel(),), torch.nan)
            whole[held] = value.detach().reshape(-1).float()
            found[id(parameter)] = whole.view(parameter.shape)
    parameters = [parameter for chunk in job.chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        is_dense = getattr(parameter, "allreduce", True)
        groups = (parallel_state.get_expert_data_parallel_group, parallel_state.get_data_parallel_group)
        group = groups[is_dense]()
        mine = found.get(id(parameter), torch.full(parameter.shape, torch.nan))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        whole = torch.full(parameter.shape, torch.nan)
        for part in parts:
            whole = torch.where(part.isnan(), whole, part)
        found[id(parameter)] = whole
    return found


def _trained(optimizer: Any) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """The parameters, the elements that this rank trains, and the tensor that the inner optimizer knows."""
    if hasattr(optimizer, "model_param_group_index_map"):
        for parameter, (group, at) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, slice(held.start, held.end), optimizer.optimizer.param_groups[group]["params"][at]
        return
    for parameters, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        for parameter, main in zip(parameters, mains, strict=True):
            yield parameter, slice(0, parameter.numel()), main


Placed = tuple[str, Any, tuple[int, ...], torch.Tensor]


def _placed(job: Job, local: dict[int, torch.Tensor]) -> Iterator[Placed]:
    """The places that Megatron gives the values of local parameters in whole tensors: key, index, shape, values."""
    for chunk in job.chunks:
        tree = chunk.module.sharded_state_dict()
        owners = {parameter.data_ptr(): parameter for parameter in chunk.parameters()}
        dict_list_map_inplace(partial(_with_values, owners, local), tree)
        for shard in shards(tree):
            yield shard.key, shard.global_slice(), tuple(shard.global_shape), shard.data.detach().clone()


def _with_values(owners: dict[int, torch.Tensor], local: dict[int, torch.Tensor], item: Any) -> Any:
    if isinstance(item, ShardedTensor | ShardedTensorFactory) and item.data is not None:
        owner = owners.get(item.data.data_ptr())
        if owner is not None:
            item.data = local[id(owner)].view(item.data.shape)
            if isinstance(item, ShardedTensor):
                item.dtype = torch.float32
    return item


def _everywhere(mine: list[Placed]) -> list[Placed]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return [placed for placed_by_rank in every for placed in placed_by_rank]


def _our_names(whole: Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of `Gpt`, cut by hand."""
    names = {
        "self_attention.linear_qkv.layer_norm_": "input_norm.",
        "mlp.linear_fc1.layer_norm_": "mlp_norm.",
        "self_attention.linear_proj.": "o.",
        "mlp.linear_fc2.": "mlp.down.",
        "mlp.router.": "mlp.router.",
        "mlp.experts.experts.linear_fc2.weight": "mlp.down",
    }
    for key, tensor in whole.items():
        weight, _, slot = key.rpartition("/")
        if weight == "embedding.word_embeddings.weight":
            yield f"embed.weight/{slot}", tensor
        elif weight.startswith("decoder.final_layernorm."):
            yield f"norm.{weight.rpartition('.')[2]}/{slot}", tensor
        else:
            below = weight.removeprefix("decoder.layers.")
            for number, layer in enumerate(tensor):
                for name, part in _parts(below, layer, names):
                    yield f"layers.{number}.{name}/{slot}", part


def _parts(below: str, layer: torch.Tensor, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    if below == "self_attention.linear_qkv.weight":
        queries = HEADS // GROUPS * HEAD
        groups = layer.view(GROUPS, queries + 2 * HEAD, -1)
        bounds = {"q": (0, queries), "k": (queries, queries + HEAD), "v": (queries + HEAD, queries + 2 * HEAD)}
        for name, (start, stop) in bounds.items():
            yield f"{name}.weight", groups[:, start:stop].reshape(-1, layer.shape[1])
    elif below == "mlp.linear_fc1.weight":
        half = len(layer) // 2
        yield "mlp.gate.weight", layer[:half]
        yield "mlp.up.weight", layer[half:]
    elif below == "mlp.experts.experts.linear_fc1.weight":
        half = layer.shape[1] // 2
        yield "mlp.gate", layer[:, :half]
        yield "mlp.up", layer[:, half:]
    else:
        (old,) = (old for old in names if below.startswith(old))
        yield below.replace(old, names[old]), layer
