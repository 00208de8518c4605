"""``python -m bench parity``: making parity, and making lost rows of it, against copies of as many bytes in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import numpy as np

from bench.benchmark import Bar, Benchmark, Options
from bench.markdown import about, table, text
from bench.runner import in_turns, timed
from bench.schema import BenchError, Part, Result, StateSize, paired_ratios
from holdfast.protection.erasure import add_multiple, coefficients, parity_nbytes
from holdfast.store.base import Bytes

#: Rows of data and of parity: the default groups of `Parity(1)` and `Parity(2)`, and one of eight nodes.
STRIPES = {"3+1": (3, 1), "7+1": (7, 1), "4+2": (4, 2), "6+2": (6, 2)}
#: All rows of data together; and the pieces in which rows arrive, one row after another.
GIB, PIECE_NBYTES = 0.5, 1 << 20
ROUNDS = 9
#: The least shares of the speed of memcpy at which parity is made, by the number of losses.
BARS = {1: 0.5, 2: 0.25}
MEMCPY, ENCODE, ONE_LOST, TWO_LOST = "memcpy", "encode", "rebuild, one lost", "rebuild, two lost"


def measure_stripe(name: str, options: Options) -> Part:
    """One process copies all rows of data, makes their parity, and makes a lost row of the others."""
    num_data, losses = STRIPES[name]
    nbytes = parity_nbytes(options.nbytes(GIB) // num_data)
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(num_data)]
    parity = [np.ones(nbytes, np.uint8) for _ in range(losses)]
    rows, found = [*data, *parity], np.ones(nbytes, np.uint8)
    every = tuple(range(num_data))

    def copy() -> None:
        for row in data:
            np.copyto(found, row)

    def encode() -> None:
        for number, row in enumerate(parity, num_data):
            row[:] = 0
            add(row, data, coefficients(number, every, num_data))

    def rebuild(available: Sequence[int]) -> None:
        found[:] = 0
        add(found, [rows[row] for row in available], coefficients(0, tuple(available), num_data))

    encode()
    takes: dict[str, Callable[[], dict[str, float]]] = {
        MEMCPY: partial(timed, copy),
        ENCODE: partial(timed, encode),
        ONE_LOST: partial(timed, partial(rebuild, range(1, num_data + 1))),
    }
    if losses == 2:  # the first two rows of data are lost, and both parities are needed
        takes[TWO_LOST] = partial(timed, partial(rebuild, range(2, num_data + 2)))
    scenario = options.scenario(name, rounds=ROUNDS, state=StateSize(num_data * nbytes), facts={"losses": losses})
    part = in_turns(scenario, takes, options)
    for first in (1, losses):
        rebuild(range(first, num_data + first))
        if not np.array_equal(found, data[0]):
            raise BenchError(f"The row that was rebuilt is not the lost one ({name}, {first} lost).")
    return part


def add(total: Bytes, rows: Sequence[Bytes], factors: Sequence[int]) -> None:
    """Add multiples of all rows, of which one piece after another arrives from each."""
    for start in range(0, total.size, PIECE_NBYTES):
        piece = slice(start, start + PIECE_NBYTES)
        for row, factor in zip(rows, factors, strict=True):
            add_multiple(total[piece], row[piece], factor)


def of_memcpy(part: Part, name: str) -> list[float]:
    """Seconds of memcpy / seconds, paired by round."""
    series = part.series(name)
    return paired_ratios(part.series(MEMCPY), series) if series else []


def bars(part: Part) -> Iterator[Bar]:
    limit = BARS[part.scenario.facts["losses"]]
    yield Bar(f"parity of {part.scenario.name}, of memcpy", median(of_memcpy(part, ENCODE)), limit, at_least=True)


def tables(result: Result) -> Iterator[str]:
    def share(name: str) -> Callable[[Part], str]:
        return lambda part: text(of_memcpy(part, name))

    yield table(
        "nodes with data + with parity of a stripe",
        {part.scenario.name: part for part in result.parts},
        ("memcpy, GB/s", lambda part: f"{part.scenario.state.nbytes / part.median(MEMCPY) / 1e9:.1f}"),
        *((f"{name}, of memcpy", share(name)) for name in (ENCODE, ONE_LOST, TWO_LOST)),
    )
    yield about(result.parts[0])


PARITY = Benchmark("parity", {name: partial(measure_stripe, name) for name in STRIPES}, tables, bars)
