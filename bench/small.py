"""``python -m bench small``: the cost of many small tensors, in saves and loads, and in the walk of live objects with
which a save finds its state, beside usual ways to get the same tensors."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.benchmark import Bar, Benchmark, Options, verdicts
from bench.contenders import LATER
from bench.markdown import table, text, whereabouts
from bench.runner import TORCH_THREADS, Job, in_a_process, in_turns, measure, timed
from bench.save_load import MEASURES, SAVE, Many, copies
from bench.schema import Part, Result, Sample, Scenario, StateSize, measured
from bench.state import SMALL_LOCAL_SHAPE, ManySmall
from holdfast.state.collect import WalkCache
from holdfast.state.flatten import FlatState, flatten

#: What the bars hold for, and the bars.
BAR_NUM_TENSORS, BAR_WORLD, BAR_S = 10_000, 8, 1.0
BAR_WALK_NUM_TENSORS, BAR_WALK_S = 3_000, 0.010

SAVES = "saves"
_LABELS = {
    "dcp": "dcp",
    "holdfast": "holdfast, first save into a new run (loads verified)",
    LATER: "holdfast, later saves into one run (loads verified)",
}
NAMES = tuple(_LABELS)

MODEL_KINDS = {"plain": "plain", "fsdp2": "FSDP2"}
FIRST_WALK, LATER_WALK = "holdfast-first", "holdfast-later"
STATE_DICTS, GET_STATE_DICT = "state_dict", "get_state_dict"
_WALK_LABELS = {
    LATER_WALK: "holdfast, later save",
    FIRST_WALK: "holdfast, first save",
    STATE_DICTS: "`model.state_dict()` and `optimizer.state_dict()`",
    GET_STATE_DICT: "dcp `get_state_dict`",
}
NUM_LAYERS = 75
#: Each with a weight and a bias, to which AdamW adds three slots each.
LINEARS_PER_LAYER = 5
TENSORS_PER_LAYER = LINEARS_PER_LAYER * 2 * 4


def measure_saves(options: Options) -> Part:
    world, num_tensors = options.world or BAR_WORLD, options.number(BAR_NUM_TENSORS, least=20)
    facts = {"local_shape": [*SMALL_LOCAL_SHAPE]}
    scenario = Scenario(name=SAVES, world=world, rounds=options.rounds or 5, facts=facts)
    recipe = ManySmall(num_tensors, 4 * num_tensors * world * math.prod(SMALL_LOCAL_SHAPE))
    return measure(options, Job(scenario=scenario, turns=Many, recipe=recipe, contenders=NAMES, copies=copies(NAMES)))


def measure_walks(kind: str, options: Options) -> Part:
    """Walks of one kind of model with AdamW, in a process of its own."""
    layers, rounds = options.number(NUM_LAYERS), options.rounds or 30
    samples = in_a_process(time_walks, kind, layers, rounds)
    size = StateSize(num_tensors=layers * TENSORS_PER_LAYER)
    return measured(Scenario(name=kind, rounds=rounds, state=size), samples, options.folder)


def time_walks(kind: str, layers: int, rounds: int) -> tuple[Sample, ...]:
    """Interleaved walks of one kind of model by the only rank of a job, after one walk each that is not counted."""
    torch.set_num_threads(TORCH_THREADS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = _trained(kind, layers)
    state = {"model": model, "optimizer": optimizer, "progress": {"step": 1}}
    remembered: Sequence[WalkCache] = ()

    def later() -> FlatState:
        nonlocal remembered
        flat = flatten(state, last=remembered)
        remembered = flat.remembered
        return flat

    found, expected = len(flatten(state).tensors), layers * TENSORS_PER_LAYER
    assert found == expected, f"{found} tensors instead of {expected}"
    contenders: dict[str, Callable[[], object]] = {
        FIRST_WALK: lambda: flatten(state),
        LATER_WALK: later,
        STATE_DICTS: lambda: (model.state_dict(), optimizer.state_dict()),
        GET_STATE_DICT: lambda: get_state_dict(model, optimizer),
    }
    for call in contenders.values():
        call()
    gc.disable()
    samples = in_turns(range(1, rounds + 1), {name: partial(timed, call) for name, call in contenders.items()})
    dist.destroy_process_group()
    return samples


def _trained(kind: str, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW after one step."""
    model = nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(LINEARS_PER_LAYER))) for _ in range(layers)))
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def bars(result: Result) -> Iterator[Bar]:
    part = result.find(SAVES)
    if part and (part.scenario.state.num_tensors, part.scenario.world) == (BAR_NUM_TENSORS, BAR_WORLD):
        for measure in MEASURES:
            for name in NAMES[1:]:
                what, seconds = f"{measure} {name}", median(part.series(name, measure=measure))
                yield Bar(what, seconds, BAR_S, f"{what} {seconds:.2f} s")
    for kind in MODEL_KINDS:
        walked = result.find(kind)
        if walked and walked.scenario.state.num_tensors == BAR_WALK_NUM_TENSORS:
            what, seconds = f"later walk, {kind}", median(walked.series(LATER_WALK))
            yield Bar(what, seconds, BAR_WALK_S, f"{what} {1e3 * seconds:.1f} ms")


def render_small(result: Result) -> str:
    part, walked = result.part(SAVES), result.part("plain").scenario
    scenario = part.scenario
    num_saved, num_walked = (f"{each.state.num_tensors:,}" for each in (scenario, walked))
    rows, width = scenario.facts["local_shape"]
    durable = "; ".join(f"{contender.name}: {contender.durable}" for contender in part.contenders[:2])
    how = (
        f"{num_saved} DTensors (Shard(0), float32, {rows * scenario.world} x {width}), "
        f"{scenario.world} ranks, gloo; from the first rank's start to the last rank's end. Medians of "
        f"{scenario.rounds} interleaved rounds (lowest to highest) after a warm-up; dcp takes so long that it takes "
        f"part in {len(part.series('dcp', measure=SAVE))} of them, without a warm-up. Saves are durable ({durable}), "
        f"caches are cold ({part.caches}), and every load is compared with what was saved."
    )
    walk = (
        f"Walks: {num_walked} tensors (parameters and AdamW's slots), one rank, medians of {walked.rounds}, Python's "
        f"garbage collector paused for all. {whereabouts(result.name, part)}"
    )

    def costs(name: str) -> Iterator[str]:
        for each in MEASURES:
            series = part.series(name, measure=each)
            yield text(series) if len(series) > 1 else f"{series[0]:.2f}"
        cpu_s = (median(part.series(name, "cpu_s", measure=each, of=sum)) for each in MEASURES)
        yield ", ".join(f"{each:.1f}" for each in cpu_s)

    def walk_ms(name: str) -> Iterator[str]:
        return (text(result.part(kind).series(name), 1, scale=1e3) for kind in MODEL_KINDS)

    saves = table(
        (f"{num_saved} tensors", "save, s", "load, s", "CPU of all ranks, s save, load"),
        *((label, *costs(name)) for name, label in _LABELS.items()),
    )
    found = table(
        (f"finding {num_walked} tensors, ms", *MODEL_KINDS.values()),
        *((label, *walk_ms(name)) for name, label in _WALK_LABELS.items()),
    )
    head = f"({BAR_S:.2f} s and {1e3 * BAR_WALK_S:.1f} ms)"
    return "\n\n".join([saves, how, found, *verdicts(bars(result), head), walk])


# Walks first: their processes start faster before the ranks have dropped the caches.
WALKS = {kind: partial(measure_walks, kind) for kind in MODEL_KINDS}
SMALL = Benchmark("small", {**WALKS, SAVES: measure_saves}, render_small, bars)
