"""``python -m bench small``: the cost of many small tensors, in saves and loads, and in the walk of live objects with
which a save finds its state, beside usual ways to get the same tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.benchmark import Bar, Benchmark, Options
from bench.contenders import LATER, MANY
from bench.markdown import about, labels, table, text
from bench.runner import Job, in_ranks, in_turns, measure, timed
from bench.save_load import LOAD, MEASURES, SAVE, SaveLoad
from bench.schema import OURS, Part, Result, StateSize
from bench.state import ManySmall
from holdfast.state.collect import WalkCache
from holdfast.state.flatten import FlatState, flatten

NUM_TENSORS, WORLD, BAR_S = 10_000, 8, 1.0
BAR_WALK_MS = 10.0

SAVES = "saves"
MODEL_KINDS = {"plain": "plain", "fsdp2": "FSDP2"}
FIRST_WALK, LATER_WALK = "holdfast-first", "holdfast-later"
STATE_DICTS, GET_STATE_DICT = "state_dict", "get_state_dict"
_WALK_LABELS = {
    "holdfast, later save": LATER_WALK,
    "holdfast, first save": FIRST_WALK,
    "`model.state_dict()` and `optimizer.state_dict()`": STATE_DICTS,
    "dcp `get_state_dict`": GET_STATE_DICT,
}
NUM_LAYERS = 75
#: Each with a weight and a bias, to which AdamW adds three slots each.
LINEARS_PER_LAYER = 5
TENSORS_PER_LAYER = LINEARS_PER_LAYER * 2 * 4


def measure_saves(options: Options) -> Part:
    scenario = options.scenario(SAVES, world=options.number(WORLD, least=2), rounds=5)
    return measure(options, Job(scenario, SaveLoad, ManySmall(options.number(NUM_TENSORS, least=20)), MANY))


def measure_walks(kind: str, options: Options) -> Part:
    """Interleaved walks of one kind of model with AdamW, by the only rank of a job."""
    layers = options.number(NUM_LAYERS)
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
    gc.disable()
    scenario = options.scenario(kind, rounds=30, state=StateSize(num_tensors=found))
    return in_turns(scenario, {name: partial(timed, call) for name, call in contenders.items()}, options)


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


def bars(part: Part) -> Iterator[Bar]:
    kind = part.scenario.name
    if kind in MODEL_KINDS:
        yield Bar(f"later walk, {kind}", 1e3 * part.median(LATER_WALK), BAR_WALK_MS, " ms")
    else:
        for measure in MEASURES:
            for name in (OURS, LATER):
                yield Bar(f"{measure} {name}", part.median(name, measure=measure), BAR_S, " s")


def tables(result: Result) -> Iterator[str]:
    part, walked = result.part(SAVES), result.part("plain")

    def cpu_s(name: str, measure: str) -> float:
        return median(part.series(name, "cpu_s", measure=measure, of=sum))

    yield table(
        f"{part.scenario.state.num_tensors:,} tensors",
        labels(part.able),
        ("save, s", lambda name: text(part.series(name, measure=SAVE))),
        ("load, s", lambda name: text(part.series(name, measure=LOAD))),
        ("CPU of all ranks, s save, load", lambda name: f"{cpu_s(name, SAVE):.1f}, {cpu_s(name, LOAD):.1f}"),
    )
    yield about(part)

    def walk_ms(kind: str) -> Callable[[str], str]:
        return lambda name: text(result.part(kind).series(name), 1, scale=1e3)

    head = f"finding {walked.scenario.state.num_tensors:,} tensors, ms"
    yield table(head, _WALK_LABELS, *((title, walk_ms(kind)) for kind, title in MODEL_KINDS.items()))
    yield about(walked)


# Walks first: their processes start faster before the ranks have dropped the caches.
WALKS = {kind: partial(in_ranks, 1, measure_walks, kind) for kind in MODEL_KINDS}
SMALL = Benchmark("small", {**WALKS, SAVES: measure_saves}, tables, bars)
