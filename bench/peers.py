"""``python -m bench peers``: a copy of one node's sealed bytes in the memory of another, over the loopback.

The raw limit is a plain copy over TCP between the same two processes, with as many streams, into the same mapping, in
two ways, the faster of which counts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np

from bench.benchmark import Bar, Benchmark, Options
from bench.markdown import about, of_raw, table, text
from bench.peer_streams import NUM_STREAMS, receiving
from bench.runner import measured
from bench.schema import OURS, RAW, WARM_UP, BenchError, Contender, Part, Result, Sample, StateSize, rotated
from holdfast.store.base import Bytes

GIB, ROUNDS = 1.0, 9
PART, TITLE, BAR = "put", "a copy for another node", 0.8
#: The ways of the raw limit: the most bytes that a call receives.
PLAIN = {f"{RAW} {nbytes >> 20} MiB a call": nbytes for nbytes in (1 << 20, 16 << 20)}


def measure_put(options: Options) -> Part:
    nbytes, about_it = options.nbytes(GIB), {"streams": NUM_STREAMS}
    scenario = options.scenario(PART, title=TITLE, rounds=ROUNDS, state=StateSize(nbytes), facts=about_it)
    with receiving(options.memory, nbytes) as (receiver, target, source):
        turns: dict[str, Callable[[], dict[str, float]]] = {OURS: receiver.ours}
        turns |= {name: partial(receiver.plain, call_nbytes) for name, call_nbytes in PLAIN.items()}
        samples = [
            Sample(name, number, {key: (value,) for key, value in compared(name, turns[name], target, source).items()})
            for number in range(WARM_UP, scenario.rounds + 1)
            for name in rotated(tuple(turns), number)
        ]
    return measured(scenario, samples, options, contenders=(Contender(RAW), Contender(OURS)))


def compared(name: str, turn: Callable[[], dict[str, float]], target: Bytes, source: Bytes) -> dict[str, float]:
    """Take `turn` of contender `name`; BenchError unless it has filled `target` with the bytes of `source`."""
    target[:: mmap.PAGESIZE] ^= 0xFF
    found = turn()
    if not np.array_equal(target, source):
        raise BenchError(f"{name} brought other bytes than were sent.")
    return found


def bars(part: Part) -> Iterator[Bar]:
    yield Bar(f"{TITLE}, of a plain copy over TCP", median(part.shares(OURS)), BAR, form=".2f", at_least=True)


def tables(result: Result) -> Iterator[str]:
    (part,) = result.parts
    gigabytes = part.scenario.state.nbytes / 1e9
    yield table(
        TITLE,
        {"plain copy over TCP": RAW, OURS: OURS},
        ("GB/s", lambda name: text([gigabytes / seconds for seconds in part.series(name)])),
        ("of the plain copy", lambda name: of_raw(part, name, "")),
        ("CPU-s per GB, both ends", lambda name: text([used / gigabytes for used in part.series(name, "cpu_s")])),
    )
    way = part.raw_way().removeprefix(RAW).strip()
    yield f"{about(part)} {part.scenario.facts['streams']} streams. The faster plain copy: {way}."


PEERS = Benchmark("peers", {PART: measure_put}, tables, bars)
