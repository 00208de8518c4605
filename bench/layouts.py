"""Simulated layouts of a Llama-3-405B-like training state, as what ranks send to the coordinator of a save."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from holdfast.geometry import FlatRange, Shape
from holdfast.plan.body import RankLayout
from holdfast.plan.layout import Mesh, Pieces, Placed, Replicate, Shard, Spec, TensorLayout
from holdfast.plan.save import RankMessage

NUM_LAYERS = 126
HIDDEN, FFN, KV, VOCAB = 16384, 53248, 1024, 128256
#: Shape and tensor-parallel axis (-1: replicated) of each weight of a layer.
LAYER: dict[str, tuple[Shape, int]] = {
    "attention.wq": ((HIDDEN, HIDDEN), 0),
    "attention.wk": ((KV, HIDDEN), 0),
    "attention.wv": ((KV, HIDDEN), 0),
    "attention.wo": ((HIDDEN, HIDDEN), 1),
    "feed_forward.w1": ((FFN, HIDDEN), 0),
    "feed_forward.w2": ((HIDDEN, FFN), 1),
    "feed_forward.w3": ((FFN, HIDDEN), 0),
    "attention_norm": ((HIDDEN,), -1),
    "ffn_norm": ((HIDDEN,), -1),
}
#: The tensors of each parameter: bf16 weight, fp32 master, two moments.
SLOTS = (
    ("model/{}", "bfloat16"),
    ("optimizer/state/model/{}/master", "float32"),
    ("optimizer/state/model/{}/exp_avg", "float32"),
    ("optimizer/state/model/{}/exp_avg_sq", "float32"),
)


class Sent(NamedTuple):
    """The messages and the bodies of layouts that arrive at the coordinator."""

    messages: list[RankMessage]
    bodies: dict[bytes, bytes]


def parameters(layers: range, *, ends: bool = True) -> Iterator[tuple[str, Shape, int]]:
    """Name, shape and tensor-parallel axis of each parameter."""
    if ends:
        yield "tok_embeddings.weight", (VOCAB, HIDDEN), 0
    for layer in layers:
        for name, (shape, tp_axis) in LAYER.items():
            yield f"layers.{layer}.{name}.weight", shape, tp_axis
    if ends:
        yield "norm.weight", (HIDDEN,), -1
        yield "output.weight", (VOCAB, HIDDEN), 0


def fsdp_layout(world_size: int) -> list[TensorLayout]:
    """Everything `Shard(0)` over one mesh axis: the same on all ranks."""
    spec = Placed(Mesh((world_size,), tuple(range(world_size))), (Shard(0),))
    return _layouts(parameters(range(NUM_LAYERS)), lambda _: (spec, spec))


def fsdp(world_size: int) -> Sent:
    return _sent([(fsdp_layout(world_size), range(world_size))])


def stage_layout(stage: int, *, tp: int, pp: int, dp: int) -> tuple[list[TensorLayout], range]:
    """One pipeline stage: weights tensor-parallel and replicated over DP, optimizer sharded over DP per tensor too."""
    ranks = range(stage * dp * tp, (stage + 1) * dp * tp)
    mesh = Mesh((dp, tp), tuple(ranks))
    layers = range(NUM_LAYERS * stage // pp, NUM_LAYERS * (stage + 1) // pp)

    def specs(tp_axis: int) -> tuple[Spec, Spec]:
        across = Replicate() if tp_axis < 0 else Shard(tp_axis)
        slot_axis = 1 if tp_axis == 0 else 0  # the data-parallel cut goes along the other axis
        return Placed(mesh, (Replicate(), across)), Placed(mesh, (Shard(slot_axis), across))

    return _layouts(parameters(layers, ends=stage in (0, pp - 1)), specs, suffix=str(stage)), ranks


def three_d(world_size: int) -> Sent:
    """TP 8 x PP 16 x DP, the optimizer sharded per tensor."""
    tp, pp = 8, 16
    return _sent([stage_layout(stage, tp=tp, pp=pp, dp=world_size // (tp * pp)) for stage in range(pp)])


def flat_random(world_size: int, seed: int = 0) -> Sent:
    """Every parameter cut at random into flat ranges, one per rank; its four tensors are cut alike."""
    rng = np.random.default_rng(seed)
    shapes = list(parameters(range(NUM_LAYERS)))
    ends = {name: np.sort(rng.integers(0, math.prod(shape) + 1, world_size - 1)) for name, shape, _ in shapes}
    cuts = {name: np.concatenate([[0], ends[name], [math.prod(shape)]]) for name, shape, _ in shapes}
    parameter = {slot.format(name): name for name in cuts for slot, _ in SLOTS}
    # Any parts that differ: the body and the order of slots do not depend on them.
    parts = {name: Pieces.ranges(FlatRange(number, number + 1)) for number, name in enumerate(cuts)}
    every = (
        TensorLayout(slot.format(name), dtype, shape, parts[name]) for name, shape, _ in shapes for slot, dtype in SLOTS
    )
    tensors = sorted(every, key=lambda tensor: tensor.name)
    first = RankLayout.of(tensors, {})
    # All other ranks send the same body and columns of the same form: build those at once.
    by_slot = np.stack([cuts[name] for name in dict.fromkeys(parameter[tensor.name] for tensor in tensors)])
    numbers = np.stack([by_slot[:, :-1], by_slot[:, 1:]], axis=-1).transpose(1, 0, 2).reshape(world_size, -1)
    columns = np.concatenate([np.ones((world_size, len(by_slot)), np.int64), numbers], axis=1)
    before = first.columns[: -columns[0].nbytes]
    return Sent([RankMessage(first.digest, before + row.tobytes()) for row in columns], {first.digest: first.body})


def _layouts(
    tensors: Iterator[tuple[str, Shape, int]], specs: Callable[[int], tuple[Spec, Spec]], suffix: str = ""
) -> list[TensorLayout]:
    layouts = []
    for name, shape, tp_axis in tensors:
        weight, slot = specs(tp_axis)
        full = name if name.startswith("layers.") else name + suffix
        for number, (pattern, dtype) in enumerate(SLOTS):
            layouts.append(TensorLayout(pattern.format(full), dtype, shape, slot if number else weight))
    return sorted(layouts, key=lambda tensor: tensor.name)


def _sent(layouts: list[tuple[list[TensorLayout], range]]) -> Sent:
    """The messages of ranks that hold `layouts`; each range of ranks follows the one before."""
    sent = Sent([], {})
    for tensors, ranks in layouts:
        layout = RankLayout.of(tensors, {})
        sent.messages.extend(RankMessage(layout.digest, layout.columns) for _ in ranks)
        sent.bodies[layout.digest] = layout.body
    return sent
