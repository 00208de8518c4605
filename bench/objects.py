"""``python -m bench objects``: runs in buckets, on an S3 server on the loopback that takes little time itself.

The server is a process on the same cores, so its time counts against all contenders alike. The raw limit puts and gets
equal parts by obstore, the client library that holdfast uses, too. No body is signed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch.distributed as dist

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.bucket_ways import (
    KEEPER,
    RAW_TRANSFERS,
    RESHARDING,
    SAVING_BOTH,
    TRANSFERRING,
    impossible,
    num_requests,
    served,
    server_pid,
    url,
)
from bench.costs import Watch, cpu_s, scratch
from bench.markdown import about, cpu, fastest, labels, memory, of_raw, reasons, table, text
from bench.runner import Found, Job, Turns, in_ranks, in_turns, measure, measured, timed
from bench.save_load import MEASURES, SAVE, Keep, Loads, SaveLoad
from bench.schema import OURS, RAW, WARM_UP, Contender, Part, Result, Sample, Scenario, StateSize, paired_ratios
from bench.state import LlamaLike, ManySmall
from holdfast.format.records import Commit, Diverged, Place, SealDigest, folder_name
from holdfast.run.history import Run
from holdfast.store.base import Store
from holdfast.store.posix import PosixStore
from holdfast.store.urls import location_of, open_store
from holdfast.testing.memory_store import MemoryStore

TRANSFER, RESHARD, BLOCKED, REQUESTS, HEAD = "transfer", "reshard", "blocked", "requests", "head"
SHARE_BAR, SAVE_CPU_BAR, LOAD_CPU_BAR, MEMORY_BAR_MIB = 0.9, 0.35, 0.8, 256
NUM_TENSORS, WORLDS, REQUESTS_BAR = 10_000, (1, 4), 12
NUM_COMMITS, FEW_COMMITS, HEAD_BAR_S = 10_000, 10, 0.2
S3, POSIX = "S3", "POSIX"
#: Two times that are equal but for noise differ by less.
_NOISE = 1.15


class InBucket(Turns):
    """Turns whose places are keys of the bucket. Samples have the processor time of the server, too."""

    @property
    def entrants(self) -> list[str]:
        able = self.job.able
        return [*(f"{RAW} {way}" for way in RAW_TRANSFERS if RAW in able), *(name for name in able if name != RAW)]

    def cold(self, folder: Path) -> Path:
        """Wait for all ranks: nothing is cached on either side."""
        dist.barrier()
        return folder

    def observed(self, name: str, work: Callable[[], object]) -> Found:
        server = psutil.Process(server_pid())
        before_s = cpu_s([server])
        found = super().observed(name, work)
        return found | {"server_cpu_s": cpu_s([server]) - before_s}


class BucketTurns(InBucket, SaveLoad):
    """Every contender saves, and then loads that at once: the memory of the server has no room for all of them."""

    measures = (TRANSFER,)

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        for each in MEASURES:
            yield from super().take(name, number, each)

    def watched(self, name: str) -> Watch:
        """Of the keeper's way the keeper counts, and slots do not."""
        if name != KEEPER:
            return super().watched(name)
        return Watch(node_dir=self.site.node_dir, world=self.job.scenario.world)


class BucketKeep(InBucket, Keep):
    """Every contender saves for `BucketLoads`."""


class BucketLoads(InBucket, Loads):
    """Every contender loads what `BucketKeep` has saved."""


class BlockedSaves(InBucket):
    """Saves of a `Checkpointer` into a bucket and into a folder, one after the other: how long the calls block."""

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        way, pending = self.way(name), []
        folder = self.cold(way.place(number))
        found = self.observed(name, lambda: pending.append(way.begin(folder)))
        pending[0].wait()
        self.discard(name, folder)
        yield measure, found


def measure_transfer(options: Options) -> Part:
    scenario = options.scenario(TRANSFER, title="one rank", rounds=7)
    with served():
        return measure(
            options, Job(scenario, BucketTurns, LlamaLike(options.nbytes(gib=2.0)), TRANSFERRING, impossible())
        )


def measure_reshard(options: Options) -> Part:
    recipe = LlamaLike(options.nbytes(gib=1.0))  # the server keeps one checkpoint of each contender
    scenario = options.scenario(RESHARD, title="saved by 1 rank, loaded by 2", world=2, rounds=7)
    peers = {name: kind for name, kind in RESHARDING.items() if name != RAW}
    saving = Job(Scenario(name=RESHARD, rounds=WARM_UP), BucketKeep, recipe, peers, impossible())
    with served():
        return measure(options, saving, Job(scenario, BucketLoads, recipe, RESHARDING, impossible()))


def measure_blocked(options: Options) -> Part:
    scenario = options.scenario(BLOCKED, rounds=15)
    with served():
        return measure(options, Job(scenario, BlockedSaves, LlamaLike(options.nbytes(gib=0.5)), SAVING_BOTH))


def measure_requests(options: Options) -> Part:
    """The requests of a first and a later save, for few and for many tensors, on some numbers of ranks."""
    few, many = options.number(NUM_TENSORS // 100, least=10), options.number(NUM_TENSORS, least=20)
    samples = []
    with served():
        for world in WORLDS:
            for number, (first, later) in in_ranks(world, requests_of_saves, few, many).items():
                samples.append(Sample(OURS, 1, {"first": (first,), "later": (later,)}, f"{world} x {number}"))
    facts = {"worlds": list(WORLDS), "few": few, "many": many}
    scenario = options.scenario(REQUESTS, rounds=1, facts=facts, state=StateSize(num_tensors=many))
    return measured(scenario, samples, options, contenders=(Contender(OURS),))


def requests_of_saves(*numbers: int) -> dict[int, tuple[float, float]]:
    """The requests of two saves into a new run, by the number of tensors. Collective."""
    found, world = {}, dist.get_world_size()
    for number in numbers:
        state, run = ManySmall(number).build(world).tree, url(f"{REQUESTS}-{world}-{number}")
        found[number] = requests_of_save(run, state, 1), requests_of_save(run, state, 2)
    return found


def requests_of_save(run: str, state: Mapping[str, Any], step: int) -> float:
    """The requests of one save of all ranks. Collective."""
    _wait_for_all()
    before = num_requests()
    _wait_for_all()
    holdfast.save(run, state, step)
    _wait_for_all()
    return num_requests() - before


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def measure_head(options: Options) -> Part:
    """The head of runs with few and with many commits, in a bucket and in a folder: seconds and requests."""
    lengths = (FEW_COMMITS, options.number(NUM_COMMITS, least=2 * FEW_COMMITS))
    takes = {}
    with served(), scratch(options.folder) as folder:
        for length in lengths:
            records = commits(length)
            bucket = open_store(location_of(url(f"{HEAD}-{length}")))
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda record: bucket.create(*record), records.items()))  # noqa: B023 - called at once
            for key, data in records.items():
                path = folder / str(length) / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
            takes[f"{S3} {length}"] = partial(head_in_bucket, str(bucket.location))
            takes[f"{POSIX} {length}"] = partial(head_in_folder, str(folder / str(length)))
        scenario = options.scenario(HEAD, rounds=15, facts={"lengths": list(lengths)})
        return in_turns(scenario, takes, options)


def commits(number: int) -> dict[str, bytes]:
    """The records of a run with so many commits, by their keys."""
    storage = MemoryStore()
    run = Run.create(storage)
    run.open_epoch(after=0, opened_from=None, why="start", world_size=1)
    for step in range(1, number + 1):
        checkpoint_id = secrets.token_hex(8)
        run.publish(
            Commit(
                place=Place(1, step),
                step=step,
                checkpoint=folder_name(step, checkpoint_id),
                checkpoint_id=checkpoint_id,
                seal=SealDigest(0, "0" * 32),
                nbytes=0,
                created=float(step),
                metrics={},
                diverged=Diverged.of(()),
            )
        )
    return storage.objects


def head_in_bucket(run: str) -> dict[str, float]:
    before = num_requests()
    found = timed(lambda: head_of(open_store(location_of(run))))
    return found | {"requests": num_requests() - before}


def head_in_folder(run: str) -> dict[str, float]:
    storage = CountingStore(run)
    return timed(lambda: head_of(storage)) | {"requests": storage.num_calls}


def head_of(storage: Store) -> Commit:
    head = Run.open(storage).head()
    assert head is not None
    return head


class CountingStore(PosixStore):
    """A folder that counts reads and listings."""

    num_calls = 0

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        self.num_calls += 1
        return super().read(key, start=start, nbytes=nbytes, limit=limit)

    def list(self, folder: str, *, limit: int | None = None) -> list[str]:
        self.num_calls += 1
        return super().list(folder, limit=limit)


def bars(part: Part) -> Iterator[Bar]:
    name, facts = part.scenario.name, part.scenario.facts
    if name in (TRANSFER, RESHARD):
        yield from _bars_of_transfers(part)
    elif name == BLOCKED:
        ratio = median(paired_ratios(part.series(KEEPER), part.series(OURS)))
        yield Bar("a save into a bucket blocks, of one into a folder", ratio, _NOISE, form=".2f")
    elif name == REQUESTS:
        few, many = (_requests(part, facts["worlds"][-1], facts[size]) for size in ("few", "many"))
        what = f"requests of a later save of {facts['many']:,} tensors on {facts['worlds'][-1]} ranks"
        yield Bar(f"{what}, beyond those of {facts['few']:,}", many - few, 0)
        yield Bar(f"{what}, per rank", many / facts["worlds"][-1], REQUESTS_BAR)
    elif name == HEAD:
        few, many = facts["lengths"]
        for kind in (S3, POSIX):
            more = part.median(f"{kind} {many}", "requests") - part.median(f"{kind} {few}", "requests")
            yield Bar(f"requests for the head among {many:,} commits beyond those among {few}, {kind}", more, 0)
            yield Bar(f"the head among {many:,} commits, {kind}", part.median(f"{kind} {many}"), HEAD_BAR_S, " s")


def _bars_of_transfers(part: Part) -> Iterator[Bar]:
    title, able = part.scenario.title, [each.name for each in part.able]
    for verb in _verbs(part):
        for name in (OURS, KEEPER) if verb == SAVE else (OURS,):
            if name in able:
                what = f"{title}, {verb} {name}"
                limit = SAVE_CPU_BAR if verb == SAVE else LOAD_CPU_BAR
                yield Bar(f"{what}, of raw", median(part.shares(name, measure=verb)), SHARE_BAR, "", ".2f", True)
                yield Bar(f"{what}, CPU s/GB", 1e9 * part.per_byte(name, "cpu_s", measure=verb), limit, form=".2f")
                mib = part.peak_nbytes(name, verb) / 2**20
                yield Bar(f"{what}, extra memory of a rank", mib, MEMORY_BAR_MIB, " MiB", ".0f")
        for peer in able:
            if peer not in (RAW, OURS, KEEPER):
                ratios = paired_ratios(part.series(OURS, measure=verb), part.series(peer, measure=verb))
                yield Bar(f"{title}, {verb}, time of {peer}", median(ratios), 1.0, form=".2f")


def _requests(part: Part, world: int, number: int, key: str = "later") -> float:
    return part.median(OURS, key, measure=f"{world} x {number}")


def tables(result: Result) -> Iterator[str]:
    for part in result.parts:
        yield from _TABLES[part.scenario.name](part)


def _transfer_tables(part: Part) -> Iterator[str]:
    columns: list[tuple[str, Callable[[str], str]]] = []
    for verb in _verbs(part):
        columns += [
            (f"{verb}, s", partial(_seconds, part, verb)),
            ("of raw", partial(of_raw, part, measure=verb)),
            ("CPU, s/GB (server)", partial(_cpu, part, verb)),
            ("extra memory, MB", partial(memory, part, measure=verb)),
        ]
    yield table(part.scenario.title, labels(part.able), *columns)
    yield f"{about(part)} {fastest(part, *_verbs(part))}"


def _verbs(part: Part) -> list[str]:
    return [verb for verb in MEASURES if any(sample.measure == verb for sample in part.samples)]


def _seconds(part: Part, verb: str, name: str) -> str:
    return text(part.series(name, measure=verb))


def _cpu(part: Part, verb: str, name: str) -> str:
    server_s = median(part.series(name, "server_cpu_s", measure=verb)) / part.scenario.state.nbytes
    return f"{cpu(part, name, verb)} ({1e9 * server_s:.2f})"


def _blocked_table(part: Part) -> Iterator[str]:
    rows = {"a run in a bucket": KEEPER, "a run in a folder": OURS}
    yield table("`Checkpointer.save` into", rows, ("blocks, ms", lambda name: text(part.series(name), 1, scale=1e3)))
    yield about(part)


def _requests_table(part: Part) -> Iterator[str]:
    facts = part.scenario.facts
    rows = {f"{number:,} tensors": number for number in (facts["few"], facts["many"])}

    def cell(world: int) -> Callable[[int], str]:
        return lambda number: ", ".join(f"{_requests(part, world, number, key):.0f}" for key in ("first", "later"))

    yield table("requests of a first, a later save", rows, *((f"{world} ranks", cell(world)) for world in WORLDS))


def _head_table(part: Part) -> Iterator[str]:
    rows = {f"{number:,} commits": number for number in part.scenario.facts["lengths"]}

    def cell(kind: str) -> Callable[[int], str]:
        def of(number: int) -> str:
            name = f"{kind} {number}"
            return f"{text(part.series(name), 1, scale=1e3)}; {part.median(name, 'requests'):.0f}"

        return of

    yield table("finding the head, ms; requests", rows, *((kind, cell(kind)) for kind in (S3, POSIX)))
    yield f"Medians of {part.scenario.rounds} rounds.{reasons(part)}"


_TABLES = {
    TRANSFER: _transfer_tables,
    RESHARD: _transfer_tables,
    BLOCKED: _blocked_table,
    REQUESTS: _requests_table,
    HEAD: _head_table,
}
PARTS = {
    TRANSFER: measure_transfer,
    RESHARD: measure_reshard,
    BLOCKED: measure_blocked,
    REQUESTS: measure_requests,
    HEAD: measure_head,
}
OBJECTS = Benchmark("objects", PARTS, tables, bars)
