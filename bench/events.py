"""``python -m bench events``: the time that listeners of a `Checkpointer` take from training."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.costs import scratch
from bench.markdown import table
from bench.runner import TORCH_THREADS, in_turns, timed
from bench.schema import Part, Result, Scenario, measured
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
    rounds, num_steps, num_saves = options.rounds or 15, options.number(NUM_STEPS), options.number(NUM_SAVES)
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
        samples = in_turns(range(1, rounds + 1), takes)
        for relay in told:
            relay.close(60.0)
    facts = {"num_steps": num_steps, "num_saves": num_saves, "num_events": len(_events())}
    return measured(Scenario(name="one-process", rounds=rounds, facts=facts), samples, options.folder)


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
    return 1e6 * median(part.series(name)) / int(str(number))


def percent_of_step(part: Part) -> float:
    """The share of a step that listeners cost, if what they do in their own thread holds up training too."""
    per_step = max(_us(part, WITH) - _us(part, WITHOUT), 0.0) + _us(part, HEARD) / EVERY
    return 100 * 1e-6 * per_step / STEP_S


def bars(result: Result) -> Iterator[Bar]:
    for part in result.parts:
        yield judged("events, share of a step", percent_of_step(part), BAR_PERCENT, " %")


def render_events(result: Result) -> str:
    (part,) = result.parts
    rows = ((label, f"{_us(part, name):.1f}") for name, label in _LABELS.items())
    facts = part.scenario.facts
    how = (
        f"One process, medians of {part.scenario.rounds} rounds of {facts['num_steps']:,} steps and "
        f"{facts['num_saves']:,} saves of {facts['num_events']} events. Of a step of {1000 * STEP_S:.0f} ms, with a "
        f"save every {EVERY} steps, that is {percent_of_step(part):.3f} %. `python -m bench events`; "
    )
    return f"{table(('what', 'µs'), *rows)}\n\n{how}{part.environment.in_words()}."


EVENTS = Benchmark("events", {"one-process": measure_events}, render_events, bars)
