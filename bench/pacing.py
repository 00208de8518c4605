"""``python -m bench pacing``: a loop that computes and all-reduces over slow links, beside copies or parity of its
snapshots.

Emulated nodes with a rank each stand for a cluster. To compute is to sleep, and links are so slow that processors have
little to do: what is left is the contention for the network, which copies share with the loop.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Final, Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.costs import scratch
from bench.markdown import about, table, text
from bench.runner import measured
from bench.schema import OURS, WARM_UP, BenchError, Contender, Part, Result, Sample, StateSize, paired_ratios, rotated
from tests.support.nodes import MEMORY, Network, missing

#: A step sleeps, then all-reduces: on two nodes, each sends as many bytes as the tensor has.
COMPUTE_S, REDUCED_NBYTES = 0.12, 1_250_000
MBIT: Final = 200.0
EVERY_STEPS, NUM_STEPS, ROUNDS = 20, 20, 11
#: The share of the idle time of a link that copies need.
NEEDED_SHARE: Final = 0.6
MAX_SLOWDOWN: Final = 1.03
#: Names of results: they stand for parity, too.
NO_COPIES, UNPACED = "no copies", "unpaced copies"
TURNS: Final = (NO_COPIES, OURS, UNPACED)
_END_S: Final = 1200.0
_PROTECT_S: Final = 60.0


class ProtectedNodes(NamedTuple):
    """So many nodes, each with a rank, whose snapshots a policy protects."""

    world: int
    policy: holdfast.Copies | holdfast.Parity


NODES: Final = {
    "2 nodes": ProtectedNodes(2, holdfast.Copies(1)),
    "4 nodes, parity": ProtectedNodes(4, holdfast.Parity(1)),
}


class PacedJob(msgspec.Struct, frozen=True):
    """The job of the ranks of all nodes: so many rounds, in each of which every contender takes `num_steps`."""

    folder: str
    address: str
    port: int
    world: int
    rounds: int
    num_steps: int
    policy: holdfast.Copies | holdfast.Parity

    @property
    def state_nbytes(self) -> int:
        """The bytes of a snapshot of one rank, which its node sends to one other, or its parts to several: that takes
        `NEEDED_SHARE` of the idle time of the link between two saves."""
        return int(NEEDED_SHARE * EVERY_STEPS * COMPUTE_S * MBIT * 1e6 / 8)


def measure_loop(name: str, options: Options) -> Part:
    """Run the loop on all nodes; the slowest rank's time counts."""
    reason = missing()
    if reason is not None:
        raise BenchError(f"The links of nodes cannot be emulated: {reason}.")
    world, policy = NODES[name]
    scenario = options.scenario(name, world=world, rounds=ROUNDS)
    with scratch(options.folder) as folder, Network(folder / "network") as network:
        nodes = network.start(world, mbit=MBIT)
        num_steps = EVERY_STEPS * options.number(NUM_STEPS // EVERY_STEPS)
        job = PacedJob(str(folder), nodes[0].address, _free_port(), world, scenario.rounds, num_steps, policy)
        ranks = [node.start(run_loops, job, node.number, err=folder / f"{node.name}.out") for node in nodes]
        for rank in ranks:
            if rank.wait(_END_S) != 0:
                raise BenchError(f"A rank failed: {rank.err}")
        samples = msgspec.json.decode((folder / "samples").read_bytes(), type=list[Sample])
    facts = {
        "mbit": MBIT,
        "compute_s": COMPUTE_S,
        "num_steps": num_steps,
        "every_steps": EVERY_STEPS,
        "needed_share": NEEDED_SHARE,
    }
    scenario = msgspec.structs.replace(scenario, state=StateSize(world * job.state_nbytes, world), facts=facts)
    return measured(scenario, samples, options, contenders=tuple(map(Contender, TURNS)))


def run_loops(job: PacedJob, rank: int) -> None:
    """Take all turns as `rank`; the first one writes the samples."""
    about = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in about.items()}, MASTER_ADDR=job.address)
    torch.set_num_threads(1)
    store = dist.TCPStore(job.address, job.port, job.world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world)
    loops = {name: _Loop(job, name) for name in TURNS}
    samples = []
    for number in range(WARM_UP, job.rounds + 1):
        for turn, name in enumerate(rotated(TURNS, number)):
            found = loops[name].take()
            every: list[dict[str, float]] = [found] * job.world
            dist.all_gather_object(every, found)
            values = {key: tuple(each[key] for each in every) for key in found}
            samples.append(Sample(name, number, values, turn=turn))
    for loop in loops.values():
        loop.checkpointer.close()
    if rank == 0:
        Path(job.folder, "samples").write_bytes(msgspec.json.encode(samples))
    dist.barrier()
    dist.destroy_process_group()


class _Loop:
    """The loop of one rank, with a contender's copies or none."""

    def __init__(self, job: PacedJob, name: str) -> None:
        self._job = job
        self._is_protected = name != NO_COPIES
        memory = holdfast.Memory(node_dir=MEMORY)
        if self._is_protected:
            pace: Literal["auto", "none"] = "none" if name == UNPACED else "auto"
            memory = replace(memory, protect=job.policy, require_protection=True, protect_pace=pace)
        state = {f"rank {dist.get_rank()}": torch.zeros(job.state_nbytes, dtype=torch.uint8)}
        self.checkpointer = holdfast.Checkpointer(Path(job.folder, name), state, memory=memory)
        self._reduced = torch.zeros(REDUCED_NBYTES // 4)
        self._step = 0

    def take(self) -> dict[str, float]:
        """Seconds of a step; those that it took on shared processors, saves included; those of a save until its copies
        were kept, and the share of such saves."""
        dist.barrier()
        handles, reducing = [], []
        start_s = time.monotonic()
        for number in range(self._job.num_steps):
            time.sleep(COMPUTE_S)
            begun_s = time.monotonic()
            dist.all_reduce(self._reduced)
            reducing.append(time.monotonic() - begun_s)
            if number % EVERY_STEPS == 0:
                handles.append((time.monotonic(), self.checkpointer.save(self._step, memory_only=True)))
            self._step += 1
        wall_s = (time.monotonic() - start_s) / self._job.num_steps
        found = {"seconds": COMPUTE_S + self._network_s(reducing), "wall_s": wall_s}
        at_s, last = handles[-1]
        with suppress(holdfast.HoldfastError):  # it was skipped: the one before it still had no copies
            (last.protected if self._is_protected else last.staged).wait(_PROTECT_S)
        if self._is_protected:
            found["protected_s"] = time.monotonic() - at_s
            found["protected"] = sum(handle.protected.is_done for _, handle in handles) / len(handles)
        return found

    def _network_s(self, reducing: list[float]) -> float:
        """Mean seconds of an all-reduce on the rank that came last to it: the others wait for ranks that slept too long
        because the processors of this machine are shared."""
        every = [reducing] * self._job.world
        dist.all_gather_object(every, reducing)
        return fmean(min(step) for step in zip(*every, strict=True))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def slowdowns(part: Part, name: str) -> list[float]:
    """Seconds of a step / those without copies, paired by round."""
    return paired_ratios(part.series(name), part.series(NO_COPIES))


def bars(part: Part) -> Iterator[Bar]:
    figure = median(slowdowns(part, OURS))
    yield Bar(f"a step beside copies, {part.scenario.name}, of one without", figure, MAX_SLOWDOWN, form=".3f")


def tables(result: Result) -> Iterator[str]:
    yield table(
        "nodes",
        {f"{part.scenario.name}, {name}": (part, name) for part in result.parts for name in TURNS},
        ("a step, ms", lambda row: f"{1e3 * row[0].median(row[1]):.1f}"),
        ("of one without copies", lambda row: text(slowdowns(*row))),
        ("on shared processors, ms", lambda row: f"{1e3 * row[0].median(row[1], 'wall_s'):.1f}"),
        ("a save until protected, s", lambda row: _median(*row, "protected_s")),
        ("protected saves", lambda row: _median(*row, "protected")),
    )
    yield about(result.parts[0])


def _median(part: Part, name: str, key: str) -> str:
    series = part.series(name, key)
    return f"{median(series):.2f}" if series else "-"


PACING = Benchmark("pacing", {name: partial(measure_loop, name) for name in NODES}, tables, bars)
