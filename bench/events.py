"""``python -m bench events``: the time that listeners of a `Checkpointer` take from training."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.costs import scratch
from bench.markdown import about, table
from bench.runner import TORCH_THREADS, in_turns, timed
from bench.schema import Part, Result
from holdfast.checkpointer.events import (
    Event,
    EventSource,
    SaveBegun,
    SaveCommitted,
    SavePlaced,
    SaveReturned,
    SaveSealed,
    SaveStaged,
    StepsTimed,
)
from holdfast.checkpointer.relay import Relay
from holdfast.format.records import Place
from holdfast.observing import JsonLines

#: So few saves that no event is dropped.
NUM_STEPS, NUM_SAVES = 10_000, 250
#: The loop that is judged: so many seconds per step, and a save every so many steps, which is more often than any.
STEP_S, EVERY = 0.1, 10
BAR_PERCENT = 0.1
WITHOUT, WITH, TOLD, HEARD = "step-without", "step-with", "save-told", "save-heard"
_LABELS = {
    WITHOUT: "a call of `step` without listeners",
    WITH: "a call of `step` with a listener",
    TOLD: "the events of a save, in the threads in which they happen",
    HEARD: "the events of a save, until `JsonLines` has written all of them",
}


def measure_events(options: Options) -> Part:
    """Steps without and with a listener, and the events of saves; in one process."""
    torch.set_num_threads(TORCH_THREADS)
    num_steps, num_saves = options.number(NUM_STEPS), options.number(NUM_SAVES)
    facts = {"num_steps": num_steps, "num_saves": num_saves, "num_events": len(_events())}
    with scratch(options.folder) as folder:
        source = EventSource(str(folder), 0, 1, socket.gethostname(), os.getpid())
        lines = JsonLines(folder / "events")

        def tell(count: int) -> Relay:
            relay = Relay([lines], lambda: source)
            for _ in range(count):
                for event in _events():
                    relay.hear(event)
            return relay

        told: list[Relay] = []
        takes = {
            WITHOUT: lambda: timed(_steps(folder / "without", (), num_steps)),
            WITH: lambda: timed(_steps(folder / "with", (lines,), num_steps)),
            TOLD: lambda: timed(lambda: told.append(tell(num_saves))),
            HEARD: lambda: timed(lambda: tell(num_saves).close(60.0)),
        }
        part = in_turns(options.scenario("one-process", rounds=15, facts=facts), takes, options)
        for relay in told:
            relay.close(60.0)
    return part


def _steps(folder: Path, listeners: tuple[JsonLines, ...], num_steps: int) -> Callable[[], None]:
    """Calls of `step` when no save is due."""
    policy = holdfast.EverySteps(10**12)
    checkpointer = holdfast.Checkpointer(folder, {"w": torch.zeros(1)}, memory=None, save=policy, listeners=listeners)
    numbers = itertools.count()
    for _ in range(100):
        checkpointer.step(next(numbers))

    def call() -> None:
        for _ in range(num_steps):
            checkpointer.step(next(numbers))
        checkpointer.close()

    return call


def _events() -> tuple[Event, ...]:
    """The events of one save, and of the steps before it, of which each has one while a loop is young."""
    return (
        *(StepsTimed(1, 1, STEP_S, 0, 0.0, STEP_S, 0.0) for _ in range(EVERY)),
        SaveBegun(1, "node memory", is_first_rank=True),
        SaveReturned(1, 0.004),
        SavePlaced(1, Place(1, 1)),
        SaveStaged(1, 2**30),
        SaveSealed(1),
        SaveCommitted(1, 2**30),
    )


def _us(part: Part, name: str) -> float:
    """Microseconds of one step or one save."""
    number = part.scenario.facts["num_steps" if name in (WITHOUT, WITH) else "num_saves"]
    return 1e6 * part.median(name) / int(number)


def percent_of_step(part: Part) -> float:
    """The share of a step that listeners cost, if what they do in their own thread holds up training too."""
    per_step = max(_us(part, WITH) - _us(part, WITHOUT), 0.0) + _us(part, HEARD) / EVERY
    return 100 * 1e-6 * per_step / STEP_S


def bars(part: Part) -> Iterator[Bar]:
    yield Bar("events, share of a step", percent_of_step(part), BAR_PERCENT, " %")


def tables(result: Result) -> Iterator[str]:
    (part,) = result.parts
    yield table("what", {label: name for name, label in _LABELS.items()}, ("µs", lambda name: f"{_us(part, name):.1f}"))
    yield about(part)


EVENTS = Benchmark("events", {"one-process": measure_events}, tables, bars)
