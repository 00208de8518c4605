"""Jobs of Megatron-core, saved on one layout and loaded on another, compared bit by bit with a job on one rank.

``make test-megatron`` runs these. The gradients are functions of the weights (`train`), so each layout computes what
one rank does; that one describes its state by Megatron's own descriptors, and has no distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import IncompatibleError, StateError
from holdfast.state.flatten import flatten
from holdfast.trainers.megatron import megatron_state
from tests.interop.megatron_state import SHAPES, named_weight
from tests.project.test_guides import Call, example, run_script
from tests.support.collectives import counted
from tests.support.rank_worker import HOST
from tests.support.ranks import run_processes, run_ranks
from tests.trainers.megatron_job import (
    Kind,
    Layout,
    destroy_layout,
    fill,
    gather_weights,
    megatron_job,
    shards,
    train,
    weights,
    whole_state,
)
from tests.trainers.megatron_on_cpu import megatron_on_cpu

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Megatron warns of what is not installed, and torch of old functions
]

ROOT = Path(__file__).parents[2]
MOE = Kind(experts=4, tied=False)
#: Megatron's names of the slots of an optimizer, and ours.
SLOTS = {"fp32_param": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor", "send"),
)
#: Each pair of layouts changes the degree of some axis.
PAIRS = [
    ("more stages", Kind(), 4, Layout(tp=2), 4, Layout(pp=2)),
    ("virtual stages", Kind(), 4, Layout(tp=2, pp=2), 4, Layout(pp=2, vpp=2)),
    ("virtual stages, back", Kind(), 4, Layout(pp=2, vpp=2), 2, Layout(tp=2)),
    ("one rank", Kind(), 2, Layout(tp=2), 1, Layout()),
    ("stages to columns", Kind(), 2, Layout(pp=2), 2, Layout(tp=2)),
    ("late gathers", Kind(), 4, Layout(tp=2, late=True), 4, Layout(pp=2)),
    ("late gathers, back", Kind(), 2, Layout(pp=2), 4, Layout(tp=2, late=True)),
    ("late gathers of experts", MOE, 4, Layout(ep=2, late=True), 2, Layout(tp=2, late=True)),
    ("fewer ranks", Kind(), 3, Layout(), 1, Layout()),
    ("one bucket", Kind(), 2, Layout(tp=2), 4, Layout(tp=4, bucket=None)),
    ("untied", Kind(tied=False), 2, Layout(tp=2), 4, Layout(tp=2, pp=2)),
    ("fp16 with a scaler", Kind(bf16=False, fp16=True), 4, Layout(tp=2), 2, Layout(pp=2)),
    ("fp32", Kind(bf16=False), 2, Layout(tp=2), 4, Layout(pp=2)),
    ("to a plain optimizer", Kind(), 4, Layout(tp=2), 2, Layout(pp=2, distributed=False)),
    ("from a plain optimizer", Kind(), 2, Layout(pp=2, distributed=False), 4, Layout(tp=2)),
    ("experts", MOE, 4, Layout(tp=2, ep=2), 4, Layout(pp=2)),
    ("experts, back", MOE, 2, Layout(pp=2), 4, Layout(ep=4)),
    ("experts cut by columns", MOE, 4, Layout(tp=2, expert_tp=2), 2, Layout(ep=2)),
    ("experts cut by columns, back", MOE, 2, Layout(ep=2), 4, Layout(tp=2, ep=2, expert_tp=2)),
    ("experts with scalers", MOE._replace(bf16=False, fp16=True), 2, Layout(), 4, Layout(ep=2)),
    ("experts with scalers, back", MOE._replace(bf16=False, fp16=True), 2, Layout(ep=2), 1, Layout()),
    ("grouped experts", MOE._replace(grouped=True), 4, Layout(tp=2, ep=2), 2, Layout(ep=2)),
]


def write_reference(folder: str, kind: Kind) -> None:
    """Write the state of a job on one rank after 3 and 4 steps, by Megatron's own descriptors."""
    with megatron_job(Layout(distributed=False), kind) as job:
        fill(job)
        train(job, 3)
        torch.save(whole_state(job), f"{folder}/after-3.pt")
        train(job, 1, first=3)
        torch.save(whole_state(job), f"{folder}/after-4.pt")


def save(folder: str, layout: Layout, kind: Kind, metadata: dict[str, Any] | None) -> list[str]:
    """Save after three steps; returns the collectives that ran meanwhile."""
    with megatron_job(layout, kind, seed=1) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler, metadata=metadata)
        fill(job)
        train(job, 3)
        with counted() as calls:
            holdfast.save(f"{folder}/run", state, 3)
        return calls


def load(folder: str, layout: Layout, kind: Kind) -> list[str]:
    """Load, save what was loaded as another run, train on, and return the weights that differ from the reference."""
    with megatron_job(layout, kind, seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        holdfast.load(f"{folder}/run", into=state)
        holdfast.save(f"{folder}/again", state, 3)
        train(job, 1, first=3)
        gather_weights(job)
        return differing(weights(job), f"{folder}/after-4.pt")


def differing(tree: Any, expected: str) -> list[str]:
    whole = torch.load(expected, weights_only=True)
    return [
        shard.key
        for shard in shards(tree)
        if not torch.equal(shard.data.detach(), whole[shard.key][shard.global_slice()].view_as(shard.data))
    ]


def stored_differences(run: str, expected: str) -> list[str]:
    """The tensors of a checkpoint that are not those of the reference, to the bit, or that one of both lacks."""
    view = holdfast.open(run)
    whole: dict[str, torch.Tensor] = torch.load(expected, weights_only=True)
    names = {_name(key): tensor for key, tensor in whole.items()}
    differ = {name for name in names.keys() & set(view.names()) if not torch.equal(view[name][...], names[name])}
    tensors = {name for name in view.names() if "random" not in name and "grad_scaler" not in name}
    return sorted(differ | (names.keys() ^ tensors))


def _name(key: str) -> str:
    """The name in a checkpoint of ours of what Megatron stores under `key`."""
    if not key.startswith("optimizer.state."):
        return f"model/{key}"
    slot, key = key.removeprefix("optimizer.state.").split(".", 1)
    return f"optimizer/state/model/{key}/{SLOTS[slot]}"


@pytest.mark.parametrize(
    ("kind", "ranks", "layout", "ranks_after", "layout_after"),
    [pair[1:] for pair in PAIRS],
    ids=[pair[0] for pair in PAIRS],
)
def test_a_job_goes_on_bit_by_bit_on_another_layout(
    tmp_path: Path, kind: Kind, ranks: int, layout: Layout, ranks_after: int, layout_after: Layout
) -> None:
    run_ranks(1, write_reference, str(tmp_path), kind)
    assert run_ranks(ranks, save, str(tmp_path), layout, kind, None) == [[]] * ranks
    assert stored_differences(f"{tmp_path}/run", f"{tmp_path}/after-3.pt") == []
    assert run_ranks(ranks_after, load, str(tmp_path), layout_after, kind) == [[]] * ranks_after
    assert stored_differences(f"{tmp_path}/again", f"{tmp_path}/after-3.pt") == []


def describe_alone(layout: Layout, kind: Kind) -> list[str]:
    """Flatten the state while every collective call fails; returns the tensors of the model whose memory is not that
    of a weight or of the optimizer."""
    with megatron_job(layout, kind) as job, ExitStack() as stack:
        train(job, 1)
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        for call in COLLECTIVES:
            stack.enter_context(patch.object(dist, call, side_effect=AssertionError(call)))
        flat = flatten(state, rank=dist.get_rank(), world_size=dist.get_world_size())
        live = {weight.untyped_storage().data_ptr() for chunk in job.chunks for weight in chunk.parameters()}
        for optimizer in job.optimizer.chained_optimizers:
            held = (value for group in optimizer.optimizer.param_groups for value in group["params"])
            live |= {value.untyped_storage().data_ptr() for value in held}
            slots = (value for slots in optimizer.optimizer.state.values() for value in slots.values())
            live |= {value.untyped_storage().data_ptr() for value in slots}
        return [
            name
            for name, local in flat.tensors.items()
            if "random" not in name and any(memory.untyped_storage().data_ptr() not in live for memory in local.memory)
        ]


@pytest.mark.parametrize("kind", [Kind(), MOE._replace(grouped=True)], ids=["dense", "grouped experts"])
def test_a_save_copies_nothing_and_calls_no_collective(kind: Kind) -> None:
    assert run_ranks(4, describe_alone, Layout(tp=2, ep=2 if kind.experts else 1), kind) == [[]] * 4


def load_weights(folder: str, layout: Layout, kind: Kind) -> tuple[list[str], bool, int]:
    """Load the weights alone; returns the weights that differ, whether the masters are equal to the weights, and how
    many steps the optimizer has done."""
    with megatron_job(layout, kind, seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        holdfast.load(f"{folder}/run", into=state, select="model")
        found = differing(weights(job), f"{folder}/after-3.pt")
        masters = [
            torch.equal(main.to(weight.dtype).reshape(-1), weight.detach().reshape(-1)[held.start : held.stop])
            for weight, main, held in _masters(job)
        ]
        return found, all(masters) and len(masters) > 0, job.scheduler.num_steps


def _masters(job: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
    for optimizer in job.optimizer.chained_optimizers:
        for weight, (group, place) in optimizer.model_param_group_index_map.items():
            held = optimizer._get_model_param_range_map(weight)["param"]
            yield weight, optimizer.optimizer.param_groups[group]["params"][place], slice(held.start, held.end)


def test_a_load_of_the_weights_alone_renews_the_master_weights(tmp_path: Path) -> None:
    run_ranks(1, write_reference, str(tmp_path), Kind())
    run_ranks(2, save, str(tmp_path), Layout(tp=2), Kind(), None)
    assert run_ranks(4, load_weights, str(tmp_path), Layout(pp=2), Kind()) == [([], True, 0)] * 4


def load_padded(folder: str, layout: Layout, kind: Kind) -> dict[str, Any]:
    """Load into a vocabulary with other padding, and return the rows of the embedding, and of its state, that this rank
    holds: where they begin, and their values."""
    with megatron_job(layout, kind, seed=2) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        holdfast.load(f"{folder}/run", into=state)
        holdfast.save(f"{folder}/padded-{kind.vocabulary}", state, 3)
    return {}


@pytest.mark.parametrize("rows", [72, 56])
def test_a_vocabulary_may_be_padded_in_another_way(tmp_path: Path, rows: int) -> None:
    run_ranks(2, save, str(tmp_path), Layout(tp=2), Kind(), None)
    run_ranks(4, load_padded, str(tmp_path), Layout(tp=4), Kind(vocabulary=rows))
    before, after = holdfast.open(tmp_path / "run"), holdfast.open(tmp_path / f"padded-{rows}")
    names = [name for name in before.names() if "embedding.word_embeddings.weight" in name]
    assert len(names) == 4
    for name in names:
        old, new = before[name][...], after[name][...]
        common = min(len(old), rows)
        assert new.shape == (rows, 16), name
        assert torch.equal(new[:common], old[:common]), name
        assert not new[common:].any(), name
        assert old.any(dim=1).all(), name


def keep_tracker(folder: str, ranks_before: int) -> bool:
    """Save the tracker's generators with one state and load with another; returns whether the first one is back."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    saved = {"model-parallel-rng": torch.full((16,), dist.get_rank(), dtype=torch.uint8)}
    with megatron_job(Layout(), Kind()) as job:
        state = megatron_state(job.chunks)
        if dist.get_world_size() == ranks_before and not Path(folder, "run").exists():
            tracker.set_states(dict(saved))
            holdfast.save(f"{folder}/run", state, 0)
        tracker.set_states({"model-parallel-rng": torch.full((16,), 99, dtype=torch.uint8)})
        holdfast.load(f"{folder}/run", into=state)
        return torch.equal(tracker.get_states()["model-parallel-rng"], saved["model-parallel-rng"])


def test_model_parallel_generators_continue_on_as_many_ranks_and_stay_on_others(tmp_path: Path) -> None:
    assert run_ranks(2, keep_tracker, str(tmp_path), 2) == [True, True]
    assert run_ranks(1, keep_tracker, str(tmp_path), 2) == [False]


def save_per_layer(folder: str, layout: Layout, metadata: dict[str, Any]) -> list[str]:
    save(folder, layout, Kind(), metadata)
    return [name for name in holdfast.open(f"{folder}/run").names() if name.startswith("model/decoder.layers.3.")]


def load_per_layer(folder: str, layout: Layout, metadata: dict[str, Any]) -> list[str]:
    with megatron_job(layout, Kind(), seed=2) as job:
        holdfast.load(f"{folder}/run", into=megatron_state(job.chunks, job.optimizer, job.scheduler, metadata=metadata))
        train(job, 1, first=3)
        return differing(weights(job), f"{folder}/after-4.pt")


@pytest.mark.parametrize("metadata", [{"non_homogeneous_layers": True}, {"singleton_local_shards": True}])
def test_layers_may_have_tensors_of_their_own(tmp_path: Path, metadata: dict[str, Any]) -> None:
    run_ranks(1, write_reference, str(tmp_path), Kind())
    (names, *_) = run_ranks(2, save_per_layer, str(tmp_path), Layout(pp=2), metadata)
    assert len(names) >= 8
    assert run_ranks(4, load_per_layer, str(tmp_path), Layout(tp=2, pp=2), metadata) == [[]] * 4


def save_behind(folder: str, layout: Layout) -> bool:
    """Save in the background after three steps, and train on at once; returns whether the steps were to wait."""
    with megatron_job(layout, Kind(), seed=1) as job:
        state = megatron_state(job.chunks, job.optimizer, job.scheduler)
        fill(job)
        train(job, 3)
        with holdfast.Checkpointer(f"{folder}/run", state) as checkpointer:
            checkpointer.save(3)
            train(job, 2, first=3)
            inner = [each.optimizer for each in job.optimizer.chained_optimizers]
            return all(len(each._optimizer_step_pre_hooks) for each in inner)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, late=True)], ids=["at once", "late gathers"])
def test_steps_after_a_background_save_do_not_reach_it(tmp_path: Path, layout: Layout) -> None:
    run_ranks(1, write_reference, str(tmp_path), Kind())
    assert run_ranks(4, save_behind, str(tmp_path), layout) == [True] * 4
    assert stored_differences(f"{tmp_path}/run", f"{tmp_path}/after-3.pt") == []


def load_another_class(folder: str) -> str:
    """Save a plain optimizer of another class under Megatron's names, and return the error of a load into a job."""
    net = nn.Module()
    for key, shape in SHAPES.items():
        *above, last = key.split(".")
        module = net
        for name in above:
            if name not in dict(module.named_children()):
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.register_parameter(last, nn.Parameter(named_weight(key, shape).float()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    holdfast.save(f"{folder}/run", {"model": net, "optimizer": optimizer}, 1)
    with megatron_job(Layout(), Kind(bf16=False, vocabulary=16)) as job:
        state = megatron_state(job.chunks, job.optimizer)
        with pytest.raises(IncompatibleError) as caught:
            holdfast.load(f"{folder}/run", into=state, select=["model", "optimizer"])
        holdfast.load(f"{folder}/run", into=state, select="model")
        return str(caught.value)


def test_the_state_of_another_class_of_optimizers_is_refused_and_its_weights_load(tmp_path: Path) -> None:
    (error,) = run_ranks(1, load_another_class, str(tmp_path))
    assert "[incompatible.optimizer_class]" in error
    assert "is an AdamW of Megatron here, but an SGD in the checkpoint" in error


def refusals(folder: str) -> dict[str, str]:
    """The messages of the errors for all that cannot be saved."""
    import megatron.core
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class HybridDeviceOptimizer(torch.optim.SGD):
        pass

    found: dict[str, str] = {}

    def note(case: str, make: Any) -> None:
        with pytest.raises(StateError) as caught:
            make()
        found[case] = str(caught.value)

    with megatron_job(Layout(late=True), Kind()) as job:
        (optimizer,) = job.optimizer.chained_optimizers
        with patch.object(megatron.core, "__version__", "0.17.0"):
            note("version", lambda: megatron_state(job.chunks, job.optimizer))
        with patch.object(optimizer.config, "use_precision_aware_optimizer", True):
            note("precision", lambda: megatron_state(job.chunks, job.optimizer))
        with patch.object(optimizer.config, "overlap_param_gather_with_optimizer_step", True):
            note("within", lambda: megatron_state(job.chunks, job.optimizer))
        with patch.object(optimizer.ddp_config, "use_megatron_fsdp", True):
            note("fsdp", lambda: megatron_state(job.chunks, job.optimizer))
        with patch.object(optimizer, "optimizer", HybridDeviceOptimizer([torch.ones(1)], lr=1.0)):
            note("offload", lambda: megatron_state(job.chunks, job.optimizer))
        note("weights", lambda: holdfast.save(f"{folder}/weights", megatron_state(job.chunks), 0))
        note("model", lambda: holdfast.save(f"{folder}/model", {"model": job.chunks[0]}, 0))
        note("optimizer", lambda: holdfast.save(f"{folder}/optimizer", {"optimizer": job.optimizer}, 0))
        optimizer.__class__ = type("Derived", (DistributedOptimizer,), {})
        note("derived", lambda: megatron_state(job.chunks, job.optimizer))
    return found


def test_each_refusal_says_why_and_what_works_instead(tmp_path: Path) -> None:
    (found,) = run_ranks(1, refusals, str(tmp_path))
    expected = {
        "version": "tested with megatron-core 0.16.1, and this is 0.17.0",
        "precision": "is precision-aware",
        "within": "gathers weights while it steps",
        "fsdp": "trains a model of Megatron-FSDP",
        "offload": "works with a HybridDeviceOptimizer",
        "derived": "is a Derived, which holdfast does not know",
        "weights": "Give the optimizer to megatron_state",
        "model": "holdfast.trainers.megatron.megatron_state",
        "optimizer": "holdfast.trainers.megatron.megatron_state",
    }
    assert found.keys() == expected.keys()
    assert [case for case, text in expected.items() if text not in found[case]] == []
    ours = ("version", "precision", "within", "fsdp", "offload", "derived", "weights")
    assert [case for case in ours if "[state.megatron]" not in found[case]] == []


def run_guide(rank: int, folder: str, call: Call, port: int) -> str:
    """Run the example of the guide on the CPU, and return what it prints."""
    with megatron_on_cpu():
        try:
            return run_script(rank, folder, call, port)
        finally:
            destroy_layout()


def test_the_example_of_the_guide_goes_on_with_other_parallelism(tmp_path: Path) -> None:
    script, calls = example(ROOT / "docs/guides/megatron.md")
    (tmp_path / "train.py").write_text(script)
    assert len({call.num_ranks for call in calls}) == 2
    for call in calls:
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        printed = run_processes(call.num_ranks, run_guide, str(tmp_path), call, store.port)
        assert [line for line in "".join(printed).splitlines() if line in call.output] == call.output
