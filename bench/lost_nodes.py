"""``python -m bench lost-nodes``: the choice of what a job restores after nodes were lost, and of who reads which file.
Simulated: one process has the inventories that ranks send to the first one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.benchmark import Bar, Benchmark, Options
from bench.costs import scratch
from bench.layouts import Sent, three_d
from bench.markdown import about, ours, table
from bench.runner import in_turns, timed
from bench.schema import OURS, BenchError, Part, Result
from holdfast.checkpoint.catalogue import Tier
from holdfast.checkpointer.choosing import Chosen, Survey
from holdfast.checkpointer.inventories import HeldFile, Inventory
from holdfast.collector import collector_paused
from holdfast.format import manifest as fmt
from holdfast.format.records import Place
from holdfast.node_memory.generations import Generation, write_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.plan.save import CheckpointIdentity, RankValues, encode_plan, plan_save
from holdfast.run.history import Run
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store

#: The ranks and nodes of each job.
JOBS = {"256 nodes": (1152, 256), "1,024 nodes": (4480, 1024), "2,048 nodes": (8960, 2048)}
LARGEST = "2,048 nodes"
#: One of so many nodes is lost.
ONE_LOST_OF = 20
ROUNDS = 9
BAR_S = 1.0
NEWER, OLDER = "b" * 16, "a" * 16
PLACES = {OLDER: Place(1, 1), NEWER: Place(1, 2)}


class SimulatedJob(NamedTuple):
    """A job with two generations of a simulated state. `node_of` has the node of each rank, which writes its file."""

    storage: Store
    folder: NodeFolder
    run_id: str
    num_files: int
    node_of: Sequence[int]

    def held(self, checkpoint_id: str, tier: Tier) -> list[tuple[HeldFile, ...]]:
        """For each node, the files of a generation that it wrote, as files in a tier."""
        place = PLACES[checkpoint_id]
        found: list[list[HeldFile]] = [[] for _ in range(self.node_of[-1] + 1)]
        for file, node in enumerate(self.node_of[: self.num_files]):
            about = (self.run_id, "", checkpoint_id, place, place.seq, file, 1 << 30, "d" * 32, False, False)
            found[node].append(HeldFile(*about, tier))
        return [tuple(files) for files in found]

    def inventories(self, nodes: Sequence[tuple[HeldFile, ...]]) -> list[Inventory]:
        """The inventory that each rank takes of its node, if the nodes hold these files."""
        return [Inventory(f"node-{node}", nodes[node], False) for node in self.node_of]

    def choice(self, inventories: Sequence[Inventory]) -> Chosen:
        """The checkpoint that the first rank chooses."""
        survey = Survey()
        survey.look(self.folder, {}, inventories)
        found = survey.answer(self.storage)
        if not isinstance(found, Chosen):
            raise BenchError("The first rank does not know the generations.")
        return found


@contextmanager
def simulated_job(sent: Sent, num_nodes: int, folder: Path) -> Iterator[SimulatedJob]:
    """A job on `num_nodes` nodes whose ranks have `sent` their layouts. It needs a folder of its own."""
    storage, world_size, data = open_store(Location(str(folder / "gpt"))), len(sent.messages), b""
    run = Run.create(storage)
    run.open_epoch(after=0, opened_from=None, why="start", world_size=world_size)
    with NodeFolder("gpt", node_dir=folder) as memory:
        for checkpoint_id, place in PLACES.items():
            identity = CheckpointIdentity(checkpoint_id, run.run_id, place, place.seq, 0.0, {})
            values = [RankValues(0, 1000, ("a",))]
            data = encode_plan(plan_save(sent.messages, sent.bodies), identity=identity, values=values)
            name = f"step-{place.seq:010}-{checkpoint_id}"
            write_generation(memory, Generation("gpt", name, checkpoint_id, place, place.seq, data))
        num_files = len(fmt.decode(data, path="manifest").file_names)
        node_of = [rank * num_nodes // world_size for rank in range(world_size)]
        yield SimulatedJob(storage, memory, run.run_id, num_files, node_of)


def after_losses(job: SimulatedJob) -> list[Inventory]:
    """The inventories of a job with one copy of each file. Empty nodes have replaced every twentieth."""
    own, copies = (
        [(*older, *newer) for older, newer in zip(job.held(OLDER, tier), job.held(NEWER, tier), strict=True)]
        for tier in (Tier.NODE_MEMORY, Tier.PEER_MEMORY)
    )
    half = len(own) // 2
    lost = range(0, half, ONE_LOST_OF // 2)  # of each pair, one node at most
    return job.inventories(
        [() if node in lost else own[node] + copies[(node + half) % len(own)] for node in range(len(own))]
    )


def measure_choice(name: str, options: Options) -> Part:
    """The first rank decodes what all ranks found, and chooses."""
    world_size, num_nodes = JOBS[name]
    with scratch(options.folder) as folder, simulated_job(three_d(world_size), num_nodes, folder) as job:
        messages = [msgspec.msgpack.encode(each) for each in after_losses(job)]

        @collector_paused()
        def turn() -> dict[str, float]:
            inventories: list[Inventory] = []
            decoding = timed(
                lambda: inventories.extend(msgspec.msgpack.decode(each, type=Inventory) for each in messages),
                "decode_s",
            )
            return decoding | timed(lambda: job.choice(inventories), "choose_s")

        facts = {"num_files": job.num_files, "messages_nbytes": sum(map(len, messages))}
        scenario = options.scenario(name, rounds=ROUNDS, facts=facts)
        return in_turns(scenario, {OURS: turn}, options)


def tables(result: Result) -> Iterator[str]:
    yield table(
        "5 % of the nodes are lost",
        {part.scenario.name: part for part in result.parts},
        ("files", lambda part: f"{part.scenario.facts['num_files']:,}"),
        ("inventories, MB", lambda part: f"{part.scenario.facts['messages_nbytes'] / 1e6:.1f}"),
        ("decoded in, s", ours("decode_s")),
        ("chosen in, s", ours("choose_s")),
    )
    yield about(result.parts[0])


def bars(part: Part) -> Iterator[Bar]:
    if part.scenario.name == LARGEST:
        yield Bar(f"the choice of {LARGEST}", part.median(OURS, "choose_s"), BAR_S, " s")


LOST_NODES = Benchmark("lost-nodes", {name: partial(measure_choice, name) for name in JOBS}, tables, bars)
