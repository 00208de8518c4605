"""``python -m bench nodes``: protection of memory and the restore after the loss of a node, on emulated nodes.

Nodes are namespaces of this machine, one rank on each (`tests.support.nodes`), so all share its cores. The raw limit is
a plain copy over TCP of as many bytes, between the same processes, over the same links.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.costs import scratch
from bench.markdown import about, table, text
from bench.node_ranks import NodeTask, protect, restore, serve_store
from bench.runner import measured
from bench.schema import OURS, RAW, BenchError, Contender, Part, Result, Sample, StateSize, paired_ratios
from holdfast import Copies, Parity
from tests.support.nodes import Network
from tests.support.nursery import Process

ROUNDS: Final = 5
LOST: Final = 2
_TIMEOUT_S: Final = 300.0
#: The three measures: protection that holds nothing back; protection at the default pace, which takes the plain copies
#: in between for the traffic of training; and the restore.
PROTECT, PACED, RESTORE = "protect", "protect at a pace", "restore"


class Cluster(NamedTuple):
    """The nodes of a scenario: how many, the speed of their links (None: what this machine can), and the bytes of a
    rank at full size; its bars, and how its snapshots are protected."""

    num_nodes: int
    mbit: int | None
    mib: int
    bars: tuple[str, ...]
    policy: Copies | Parity = Copies(1)


#: The cluster whose links are shaped, so that a node does not share the speed of the others' links.
SHAPED: Final = "4 nodes, 2 Gbit/s"
CLUSTERS: Final = {
    "2 nodes": Cluster(2, None, 1024, (PROTECT, PACED)),
    SHAPED: Cluster(4, 2000, 512, (RESTORE,)),
    "8 nodes": Cluster(8, None, 32, ("moved",)),
    f"{SHAPED}, parity": Cluster(4, 2000, 512, (RESTORE,), Parity(1)),
    "8 nodes, parity": Cluster(8, None, 32, ("moved",), Parity(1)),
}
#: The least speed of a restore, of a plain copy of what was lost: of copies, and of parity, which comes through all
#: nodes of a group.
RESTORE_BARS: Final = {Copies: 0.7, Parity: 0.5}


class Emulated:
    """A cluster with a job of one rank on each node."""

    def __init__(self, cluster: Cluster, network: Network, folder: Path, *, nbytes: int, rounds: int) -> None:
        self._network, self._folder, self._rounds = network, folder, rounds
        memory_mib = 6 * (nbytes >> 20) + 1024
        self._launcher = network.start(1)[0]
        self.nodes = network.start(cluster.num_nodes, memory_mib=memory_mib, mbit=cluster.mbit)
        self._memory_mib, self._mbit, self._nbytes = memory_mib, cluster.mbit, nbytes
        self._store: Process | None = None

    def run(self, name: str, function: Any, *more: Any) -> list[dict[str, Any]]:
        """Run a function on all nodes, and return what their ranks tell."""
        results = self._folder / name
        results.mkdir()
        ready = results / "store"
        store = self._launcher.start(serve_store, self._launcher.name, ready, err=results / "store.err")
        end = time.monotonic() + _TIMEOUT_S
        until(ready.exists, end, results)
        ranks = [
            node.start(function, self._task(results, rank), *more, err=results / f"{rank}.err")
            for rank, node in enumerate(self.nodes)
        ]
        paths = [results / f"{function.__name__}-{rank}.json" for rank in range(len(ranks))]
        until(lambda: all(path.exists() for path in paths), end, results)
        for process in (*ranks, store):
            process.send(signal.SIGKILL)
            process.wait()
        return [json.loads(path.read_text()) for path in paths]

    def lose(self, number: int) -> None:
        """Lose a node, and start another one in its place."""
        self.nodes[number].lose()
        (self.nodes[number],) = self._network.start(1, memory_mib=self._memory_mib, mbit=self._mbit)

    def _task(self, results: Path, rank: int) -> NodeTask:
        run = self._folder / "run"
        return NodeTask(results, run, rank, len(self.nodes), self._launcher.name, self._nbytes, self._rounds)


def until(condition: Any, end: float, results: Path) -> None:
    while not condition():
        if time.monotonic() > end:
            errors = {path.name: path.read_text()[-2000:] for path in results.glob("*.err")}
            raise BenchError(f"The ranks did not answer: {errors}")
        time.sleep(0.02)


def measure_cluster(name: str, options: Options) -> Part:
    """Protect some snapshots; then lose a node again and again."""
    cluster = CLUSTERS[name]
    # As pip leaves a package. Without bytecode that they may write, all keepers that start would compile it.
    compile_dir(Path(holdfast.__file__).parent, quiet=1)
    nbytes = max(options.nbytes(cluster.mib / 1024), 1 << 20)
    size = StateSize(nbytes * cluster.num_nodes)
    scenario = options.scenario(
        name, title=name, world=cluster.num_nodes, rounds=ROUNDS, state=size, facts={"rank_nbytes": nbytes}
    )
    samples: list[Sample] = []
    if PACED in cluster.bars:
        with scratch(options.folder) as folder, Network(folder / "network") as network:
            job = Emulated(cluster, network, folder, nbytes=nbytes, rounds=scenario.rounds)
            samples += protections(PACED, job.run("protect", protect, cluster.policy, "auto"))
    with scratch(options.folder) as folder, Network(folder / "network") as network:
        job = Emulated(cluster, network, folder, nbytes=nbytes, rounds=scenario.rounds)
        samples += protections(PROTECT, job.run("protect", protect, cluster.policy, "none"))
        lost = min(LOST, cluster.num_nodes - 1)
        for number in range(scenario.rounds):
            job.lose(lost)
            found = job.run(f"restore{number}", restore, lost)
            if not all(each["same"] and each["tier"] == "peer memory" for each in found):
                raise BenchError(f"The snapshot was not restored from the memory of peers: {found}")
            moved = float(sum(each["moved"] for each in found))
            plain = {"seconds": (found[lost]["plain"],)}
            ours = {"seconds": tuple(each["ours"] for each in found), "moved_nbytes": (moved,)}
            samples.append(Sample(RAW, number + 1, plain, measure=RESTORE))
            samples.append(Sample(OURS, number + 1, ours, measure=RESTORE))
    return measured(scenario, samples, options, contenders=(Contender(RAW), Contender(OURS)))


def protections(measure: str, protected: Sequence[dict[str, Any]]) -> Iterator[Sample]:
    """The samples of what all ranks tell of protections, and of the plain copies beside them."""
    held = float(max(each["held"] for each in protected))
    for number in range(len(protected[0]["ours"])):
        plain, ours = (tuple(each[key][number] for each in protected) for key in ("plain", "ours"))
        yield Sample(RAW, number + 1, {"seconds": plain}, measure=measure)
        yield Sample(OURS, number + 1, {"seconds": ours, "held_nbytes": (held,)}, measure=measure)


def of_plain(part: Part, measure: str) -> list[float]:
    """Seconds of the plain copy / seconds, paired by round."""
    return paired_ratios(part.series(RAW, measure=measure), part.series(OURS, measure=measure))


def moved(part: Part) -> list[float]:
    """Bytes that came to nodes in a restore / bytes that were lost."""
    return [each / part.scenario.facts["rank_nbytes"] for each in part.series(OURS, "moved_nbytes", measure=RESTORE)]


def of_plain_text(part: Part, measure: str) -> str:
    series = of_plain(part, measure)
    return text(series) if series else "-"


def more_memory(part: Part) -> float:
    """MiB that a node holds beyond its two snapshots, and their copies or parity."""
    (held, *_) = part.series(OURS, "held_nbytes", measure=PROTECT)
    cluster = CLUSTERS[part.scenario.name]
    policy = cluster.policy
    others = policy.n if isinstance(policy, Copies) else 1 / (policy.group_size(cluster.num_nodes) - 1)
    return float(held - 2 * (1 + others) * part.scenario.facts["rank_nbytes"]) / 2**20


def bars(part: Part) -> Iterator[Bar]:
    name, cluster = part.scenario.name, CLUSTERS[part.scenario.name]
    for measure, what in ((PROTECT, "protection"), (PACED, "protection at the default pace")):
        if measure in cluster.bars:
            yield Bar(f"{what}, {name}, of a plain copy", median(of_plain(part, measure)), 0.8, at_least=True)
    if PROTECT in cluster.bars:
        yield Bar(f"memory beyond snapshots and copies, {name}", more_memory(part), 128, " MiB")
    if RESTORE in cluster.bars:
        figure, limit = median(of_plain(part, RESTORE)), RESTORE_BARS[type(cluster.policy)]
        yield Bar(f"restore of a lost node, {name}, of a plain copy", figure, limit, at_least=True)
    if "moved" in cluster.bars:
        limit = cluster.policy.group_size(cluster.num_nodes) if isinstance(cluster.policy, Parity) else 1.05
        yield Bar(f"bytes moved / bytes lost, {name}", median(moved(part)), limit)


def tables(result: Result) -> Iterator[str]:
    yield table(
        "nodes",
        {part.scenario.name: part for part in result.parts},
        ("a rank's snapshot, MiB", lambda part: f"{part.scenario.facts['rank_nbytes'] / 2**20:.0f}"),
        ("protection, of a plain copy", lambda part: of_plain_text(part, PROTECT)),
        ("at the default pace", lambda part: of_plain_text(part, PACED)),
        ("restore after a loss, s", lambda part: text(part.series(OURS, measure=RESTORE))),
        ("of a plain copy of the lost bytes", lambda part: text(of_plain(part, RESTORE))),
        ("bytes moved / lost", lambda part: text(moved(part))),
        ("memory beyond snapshots and copies or parity, MiB", lambda part: f"{more_memory(part):.0f}"),
    )
    yield about(result.parts[0])


NODES = Benchmark("nodes", {name: partial(measure_cluster, name) for name in CLUSTERS}, tables, bars)
