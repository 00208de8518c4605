"""``python -m bench data``: the time that an order of samples takes per sample, without reading one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from bench.benchmark import Bar, Benchmark, Options
from bench.markdown import about, table
from bench.runner import in_turns, timed
from bench.schema import OURS, Part, Result
from holdfast.data import GlobalOrder, MixedOrder, ShardedStream

BATCH, NUM_BATCHES = 256, 1_000
NUM_SAMPLES, NUM_SOURCES, NUM_SHARDS = 10**12, 20, 4 * BATCH
BAR_US = 1.0


class CountingShard:
    """A source of a shard that costs next to nothing: its samples are numbers."""

    def __init__(self, shard: int) -> None:
        self._number = shard

    def __next__(self) -> int:
        self._number += NUM_SHARDS
        return self._number

    def state_dict(self) -> int:
        """The last number."""
        return self._number

    def load_state_dict(self, state: int) -> None:
        """Go on after this number."""
        self._number = state


def of_one() -> Iterator[object]:
    """The batches of one rank of 8 from a dataset with very many samples."""
    order = GlobalOrder(NUM_SAMPLES, global_batch_size=8 * BATCH, rank=3, world_size=8)
    return order.follow(order)


def of_many() -> Iterator[object]:
    """As `of_one`, from many sources."""
    lengths = {f"source{number}": NUM_SAMPLES // 100 + number for number in range(NUM_SOURCES)}
    weights = {name: 1 + number for number, name in enumerate(lengths)}
    order = MixedOrder(lengths, weights=weights, global_batch_size=8 * BATCH, rank=3, world_size=8)
    return order.follow(order)


def of_shards() -> Iterator[object]:
    """The batches of a stream, with the state of each shard."""
    stream = ShardedStream(CountingShard, num_shards=NUM_SHARDS, global_batch_size=BATCH, collate_fn=tuple)
    return stream.follow(stream)


ORDERS: dict[str, Callable[[], Iterator[object]]] = {"global": of_one, "mixed": of_many, "stream": of_shards}
_LABELS = {
    "global": f"`GlobalOrder` of {NUM_SAMPLES:.0e} samples".replace("e+", "e"),
    "mixed": f"`MixedOrder` of {NUM_SOURCES} sources",
    "stream": f"`ShardedStream` of {NUM_SHARDS} shards",
}


def measure_order(name: str, options: Options) -> Part:
    """Batches that a loop takes one after another in one process."""
    num_batches, batches = options.number(NUM_BATCHES), ORDERS[name]()

    def take() -> None:
        for _ in range(num_batches):
            next(batches)

    scenario = options.scenario(name, rounds=15, facts={"num_samples": num_batches * BATCH})
    return in_turns(scenario, {OURS: partial(timed, take)}, options)


def us_per_sample(part: Part) -> float:
    return 1e6 * part.median(OURS) / int(part.scenario.facts["num_samples"])


def bars(part: Part) -> Iterator[Bar]:
    yield Bar(f"a sample, {part.scenario.name}", us_per_sample(part), BAR_US, " µs")


def tables(result: Result) -> Iterator[str]:
    rows = {label: result.part(name) for name, label in _LABELS.items()}
    yield table("order", rows, ("a sample, µs", lambda part: f"{us_per_sample(part):.2f}"))
    yield about(result.parts[-1])


DATA = Benchmark("data", {name: partial(measure_order, name) for name in ORDERS}, tables, bars)
