"""Checkpoints by ``megatron.core.dist_checkpointing``, as Megatron-LM's training calls it, for jobs of `megatron_job`.

    python -m tests.trainers.megatron_folders tests/interop/fixtures/megatron full-on-4 buckets-on-4 gathered-on-4

writes fixtures of `test_megatron_folders`, in the environment of ``make test-megatron``. That of ``ranges-on-4`` is in
a format that Megatron-core 0.16 does not write: put 0.14.0 first on ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import sys
import tarfile
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns of packages that are not installed
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnBackend

from tests.support.ranks import run_ranks
from tests.trainers.megatron_job import Job, Kind, Layout, fill, gather_weights, megatron_job, train

_set_states_of_megatron = DistributedOptimizer._set_main_param_and_optimizer_states
FULL, BUCKETS, GATHERED = "fully_reshardable", "dp_reshardable", "dp_zero_gather_scatter"
RANGES = "fully_sharded_model_space"
#: `FULL`, gathered by gloo on the first data-parallel rank alone.
ON_FIRST = "fully_reshardable, mem_efficient"
TRACKER = "latest_checkpointed_iteration.txt"
#: For each fixture, the number of ranks, their layout, and the format of the distributed optimizer.
CASES = {
    "full-on-4": (4, Layout(tp=2, bucket=None), FULL),
    "buckets-on-4": (4, Layout(tp=2), BUCKETS),
    "gathered-on-4": (4, Layout(tp=2, bucket=None), GATHERED),
    "ranges-on-4": (4, Layout(tp=2), RANGES),
}


def save_folder(job: Job, folder: str, iteration: int, sharding: str | None) -> None:
    """Save a job into the folder of an iteration, and then name it in the tracker file."""
    place = f"{folder}/iter_{iteration:07d}"
    if dist.get_rank() == 0:
        Path(place).mkdir(parents=True)
    dist.barrier()
    metadata = _metadata(sharding)
    tree = sharded_tree(job, sharding) | {
        "iteration": iteration,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(
            world_size=dist.get_world_size(), params_dtype=torch.bfloat16, attention_backend=AttnBackend.auto
        ),
    }
    # Megatron writes in processes of its own, which a daemonic process may not have, and leaves one running.
    daemon = patch.dict(multiprocessing.current_process()._config, daemon=False)  # type: ignore[attr-defined]
    with daemon, patch.object(filesystem_async, "_results_queue", None):
        dist_checkpointing.save(tree, place, content_metadata=metadata)
    gc.collect()
    if dist.get_rank() == 0:
        Path(folder, TRACKER).write_text(str(iteration))


def load_folder(job: Job, folder: str, sharding: str | None) -> None:
    """Load a job from a folder, as Megatron-LM's training does: that of the iteration that the tracker file names."""
    train(job, 1)  # without Transformer Engine, Megatron describes no distributed optimizer before its first step
    job.scheduler.num_steps = 0
    iteration = int(Path(folder, TRACKER).read_text())
    tree = sharded_tree(job, sharding, is_loading=True)
    loaded = dist_checkpointing.load(tree, f"{folder}/iter_{iteration:07d}", strict="raise_unexpected")
    for number, chunk in enumerate(job.chunks):
        chunk.module.load_state_dict(loaded["model" if len(job.chunks) == 1 else f"model{number}"], strict=False)
    with patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", _set_states):
        job.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer in job.optimizer.chained_optimizers:
        for state in optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()  # torch's Adam gets one tensor for all weights, and counts in place
    job.scheduler.load_state_dict(loaded["opt_param_scheduler"])


def _set_states(optimizer: Any, weight: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    """As Megatron's own, which 0.16.1 calls without the count of steps that torch's Adam has beside its moments."""
    group, place = optimizer.model_param_group_index_map[weight]
    main = optimizer.optimizer.param_groups[group]["params"][place]
    _set_states_of_megatron(optimizer, weight, {"step": optimizer.optimizer.state[main]["step"], **tensors})


def sharded_tree(job: Job, sharding: str | None, *, is_loading: bool = False) -> dict[str, Any]:
    """The descriptors of a job, and its scheduler."""
    metadata = _metadata(sharding)
    several = len(job.chunks) > 1
    models = {
        f"model{number}" if several else "model": chunk.module.sharded_state_dict(metadata=dict(metadata))
        for number, chunk in enumerate(job.chunks)
    }
    optimizer = job.optimizer.sharded_state_dict(dict(models), is_loading, metadata=dict(metadata))
    tree = {**models, "optimizer": optimizer}
    return tree if is_loading else {**tree, "opt_param_scheduler": job.scheduler.state_dict(), "rng_state": _random()}


def _metadata(sharding: str | None) -> dict[str, Any]:
    """The metadata of Megatron-LM's training about the content."""
    common = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if sharding is None:
        return common
    kind, _, way = sharding.partition(", ")
    ways = {f"distrib_optim_{kind}_{way}": True} if way else {}
    return {**common, "distrib_optim_sharding_type": kind, **ways}


def _random() -> Any:
    """The random numbers of the rank, as Megatron-LM's training stores them."""
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),  # noqa: NPY002 - the global generator is the legacy one
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    ranks = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], sizes, ranks, replica_id=replica)


def save_fixture(folder: str, layout: Layout, sharding: str) -> None:
    """Save the weights that follow from their keys, and an optimizer after one step."""
    with megatron_job(layout, Kind(vocabulary=16)) as job:
        fill(job)
        train(job, 1)
        fill(job)
        gather_weights(job)
        column = parallel_state.get_tensor_model_parallel_rank()
        random.seed(column)
        np.random.seed(column)  # noqa: NPY002 - the global generator is the legacy one
        torch.manual_seed(column)
        get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.full((16,), column, dtype=torch.uint8)})
        with patch.object(np, "product", np.prod, create=True):  # 0.14 calls it, and numpy 2 has none
            save_folder(job, folder, 1, sharding)


def main() -> None:
    """Write fixtures into the folder that the command line names first."""
    for name in sys.argv[2:]:
        ranks, layout, sharding = CASES[name]
        with TemporaryDirectory() as above:
            run_ranks(ranks, save_fixture, f"{above}/{name}", layout, sharding)
            with tarfile.open(Path(sys.argv[1], f"{name}.tar.xz"), "w:xz") as archive:
                archive.add(f"{above}/{name}", name)


if __name__ == "__main__":
    main()
