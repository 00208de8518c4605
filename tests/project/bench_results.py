"""Results of benchmarks that never ran, small enough to check by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from bench import engine, small
from bench.bucket_ways import KEEPER, RAW_TRANSFERS, TRANSFERRING
from bench.contenders import BACKGROUND, LATER, LOADING, MANY, OURS_SYNC, THREAD, Registry
from bench.converters import CONVERSIONS
from bench.engine_turns import ALONE, BESIDE_WORK, NO_SAVES
from bench.exchange import LOAD as LOAD_HUB
from bench.hub_loads import HUB_LOADING, STOCK
from bench.save_load import MEASURES
from bench.schema import OURS, RAW, WARM_UP, Contender, Environment, Part, Result, Sample, Scenario, StateSize
from bench.view import NOTHING, OPENED, SHOWN

NBYTES = 2_000_000_000
SIZE = StateSize(NBYTES, 300)
RAW_OF_BUCKETS = f"{RAW} {next(iter(RAW_TRANSFERS))}"
RAW_WAYS = ("slow", "fast", "other")
DATE = "2030-01-02T03:04:05+00:00"
MACHINE = Environment(
    holdfast="0.1",
    torch="2.13",
    python="3.11",
    kernel="6.1",
    filesystem="ext4",
    num_cpus=2,
    cpu="a CPU",
    memory_nbytes=1 << 34,
    revision="0123456789abcdef",
)
SECONDS = {
    f"{RAW} slow": (2.0, 2.0, 2.0),
    f"{RAW} fast": (1.0, 1.2, 1.1),
    f"{RAW} other": (0.5, 1.5, 1.5),
    "dcp": (4.0, 2.4, 2.2),
}
#: Of the engine: rounds, who saves, and durable after how many seconds; of holdfast half a second more is the copy.
ROUNDS, LARGE = 7, StateSize(NBYTES, 4_000)
ENGINE_NAMES = (RAW, THREAD, OURS_SYNC, OURS)
DURABLE_S = {**{f"{RAW} {way}": 1.0 for way in RAW_WAYS}, THREAD: 4.0, OURS_SYNC: 1.25, OURS: 1.5}


def samples(seconds: Mapping[str, Sequence[float]], measures: Sequence[str] = MEASURES) -> tuple[Sample, ...]:
    """One sample per measure, contender and round; each of two ranks used 1 s of CPU and 3 MB."""
    return tuple(
        sample(measure, name, number, second)
        for measure in measures
        for name, series in seconds.items()
        for number, second in enumerate(series, start=1)
    )


def sample(measure: str, name: str, number: int, seconds: float, **values: tuple[float, ...]) -> Sample:
    usual = {
        "seconds": (seconds,),
        "cpu_s": (1.0, 1.0),
        "peak_extra_nbytes": (1_000_000, 3_000_000),
        "device_nbytes": (NBYTES // 4, 3 * NBYTES // 4),
        "asked_nbytes": (NBYTES, NBYTES),
    }
    return Sample(name, number, usual | values, measure)


def part(
    name: str,
    taken: Sequence[Sample],
    contenders: Sequence[Contender] = (),
    *,
    title: str = "",
    world: int = 2,
    rounds: int = 3,
    state: StateSize = SIZE,
    facts: Mapping[str, object] | None = None,
    not_possible: Mapping[str, str] | None = None,
    is_full: bool = True,
) -> Part:
    return Part(
        scenario=Scenario(
            name=name, title=title, world=world, rounds=rounds, state=state, facts=facts or {}, is_full=is_full
        ),
        date=DATE,
        environment=MACHINE,
        samples=tuple(taken),
        contenders=tuple(contenders),
        not_possible=not_possible or {},
        packages={"torchsnapshot": "0.1"},
    )


def described(names: Sequence[str], known: Registry = LOADING) -> tuple[Contender, ...]:
    return tuple(known[name].about() for name in names)


def io_result(seconds: Mapping[str, tuple[float, ...]]) -> Result:
    contenders = tuple(Contender(name, "fsync") for name in (RAW, "dcp"))
    return Result("io", (part("io", samples(seconds), contenders),))


def small_result(*, save_s: float = 0.9, later_walk_s: float = 0.004) -> Result:
    """A run over 8 ranks: dcp in one of three rounds, holdfast in all."""
    taken = samples({"dcp": (40.0,), "holdfast": (save_s, 0.8, 1.2), LATER: (0.7, 0.6, 0.5)})
    saves = part(small.SAVES, taken, described(tuple(MANY), MANY), world=8, state=StateSize(1, 10_000))
    times = (0.006, later_walk_s, 0.003, 0.09)
    seconds = dict(
        zip((small.FIRST_WALK, small.LATER_WALK, small.STATE_DICTS, small.GET_STATE_DICT), times, strict=True)
    )
    walked = samples({name: (second,) for name, second in seconds.items()}, ("",))
    size = StateSize(num_tensors=3_000)
    return Result("small", (saves, *(part(kind, walked, world=1, rounds=30, state=size) for kind in small.MODEL_KINDS)))


def load_result(seconds: Mapping[str, tuple[float, ...]], *, name: str = "columns") -> Result:
    """A run of one scenario, which torchsnapshot cannot do. Loads read the state twice, and once from the device."""
    return Result("load", (load_part(seconds, name=name),))


def load_part(
    seconds: Mapping[str, tuple[float, ...]], *, name: str = "columns", title: str = "rows -> columns"
) -> Part:
    names = (RAW, *(each for each in seconds if not each.startswith(RAW)), "torchsnapshot")
    absent = {"torchsnapshot": "it is from 2023"}
    contenders = described(names)
    taken = samples(seconds, ("load",))
    return part(name, taken, contenders, title=title, not_possible=absent)


def view_result() -> Result:
    """Three runs around each median; safetensors took no part."""
    parts = []
    for name, medians in (
        (OPENED, {"holdfast": 0.2, "dcp": 9.0}),
        (SHOWN, {NOTHING: 0.1, "fsdp": 0.5, "random-flat-cuts": 1.5}),
    ):
        taken = samples({each: (middle, middle / 2, middle * 2) for each, middle in medians.items()}, ("",))
        contenders = [Contender(each) for each in medians]
        parts.append(part(name, taken, contenders, world=8960, state=StateSize(num_tensors=100_000)))
    return Result("view", tuple(parts))


def plan_result() -> Result:
    figures = {"plan_s": (0.5,), "decode_s": (0.1,), "load_plan_s": (0.2,)}
    facts = {"sent_nbytes": 1, "manifest_nbytes": 1 << 19, "extra_memory_nbytes": 3 << 20}
    parts = [
        part(f"fsdp x {world}", [Sample("holdfast", 1, figures)], title="fsdp", world=world, facts=facts)
        for world in (64, 8960)
    ]
    return Result("plan", (*parts, part("validation", [Sample("holdfast", 1, {"seconds": (0.25,)})], world=1)))


def agreement_result(*, seconds: float = 0.75) -> Result:
    keys = ("memory_s", "describe_s", "cpu_s", "players_cpu_s", "server_cpu_s", "requests")
    values = {"seconds": (seconds,), "peak_extra_nbytes": (30 << 20,), **dict.fromkeys(keys, (0.25,))}
    taken = [Sample("holdfast", number, values) for number in (WARM_UP, 1, 2)]
    parts = (part(str(world), taken, title=f"{world:,}", world=world) for world in (64, 8960))
    return Result("agreement", tuple(parts))


def history_result() -> Result:
    keys = ("load_s", "save_s", "find_s", "ls_s", "ls_cpu_s", "doctor_s")
    taken = [Sample("holdfast", 1, {key: (number / 10,) for number, key in enumerate(keys, 1)})]
    parts = (part(str(length), taken, facts={"num_checkpoints": length}) for length in (10, 10_000))
    return Result("history", tuple(parts))


def step_result() -> Result:
    taken = [Sample("holdfast", 1, {"seconds": (0.05,)})]
    parts = (part(name, taken, facts={"num_steps": 10_000}) for name in ("every-steps", "all-policies"))
    return Result("step", tuple(parts))


def prune_result(*, busy_max_s: float = 0.0125) -> Result:
    quiet = {"quiet_s": (0.005,), "quiet_rare_s": (0.006,), "quiet_max_s": (0.010,)}
    busy = {"busy_s": (0.0051,), "busy_rare_s": (0.007,), "busy_max_s": (busy_max_s,)}
    taken = [Sample("holdfast", 1, {**quiet, **busy, "deleting_s": (130.0,)})]
    return Result("prune", (part("deletion", taken, facts={"num_deleted": 1_000}),))


def nodes_result(*, ours_s: float = 1.0, moved_mib: float = 1.0) -> Result:
    """One node is lost, of two, of four and of eight, with copies and with parity. A plain copy takes 0.9 seconds."""
    parts = []
    for name in ("2 nodes", "4 nodes, 2 Gbit/s", "8 nodes", "4 nodes, 2 Gbit/s, parity", "8 nodes, parity"):
        samples = []
        for measure in ("protect", "restore", *(["protect at a pace"] if name == "2 nodes" else [])):
            more = {"held_nbytes": (5.0 * 2**20,), "moved_nbytes": (moved_mib * 2**20,)}
            samples.append(Sample(RAW, 1, {"seconds": (0.9, 0.8)}, measure=measure))
            samples.append(Sample(OURS, 1, {"seconds": (ours_s, 0.5), **more}, measure=measure))
        parts.append(part(name, samples, facts={"rank_nbytes": 2**20}))
    return Result("nodes", tuple(parts))


def parity_result(*, encode_s: float = 0.2) -> Result:
    """Parity for one loss and for two, made in `encode_s` where a memcpy takes 0.1 s."""
    seconds = {"memcpy": 0.1, "encode": encode_s, "rebuild, one lost": 0.125}
    parts = []
    for name, losses in (("3+1", 1), ("4+2", 2)):
        each = {**seconds, "rebuild, two lost": 0.25} if losses == 2 else seconds
        taken = [Sample(contender, 1, {"seconds": (second,)}) for contender, second in each.items()]
        parts.append(part(name, taken, world=1, facts={"losses": losses}))
    return Result("parity", tuple(parts))


def lost_nodes_result(*, choose_s: float = 0.5) -> Result:
    """A choice after losses that takes `choose_s` on 2,048 nodes."""
    taken = [Sample("holdfast", 1, {"decode_s": (0.25,), "choose_s": (choose_s,)})]
    facts = {"num_files": 8_960, "messages_nbytes": 18_000_000}
    return Result("lost-nodes", (part("2,048 nodes", taken, world=1, facts=facts),))


def pacing_result(*, ours_s: float = 0.171) -> Result:
    """A loop whose steps take 0.17 s without copies, and `ours_s` beside copies that are paced."""
    saves = {"protected_s": (1.5, 1.4), "protected": (1.0, 1.0)}
    taken = [
        Sample("no copies", 1, {"seconds": (0.17, 0.17), "wall_s": (0.18, 0.18)}),
        Sample("holdfast", 1, {"seconds": (ours_s, ours_s), "wall_s": (0.18, 0.18), **saves}),
        Sample("unpaced copies", 1, {"seconds": (0.204, 0.2), "wall_s": (0.21, 0.2), **saves}),
    ]
    return Result("pacing", (part("2 nodes", taken),))


def data_result() -> Result:
    taken = [Sample("holdfast", 1, {"seconds": (0.05,)})]
    parts = (part(name, taken, facts={"num_samples": 256_000}) for name in ("global", "mixed", "stream"))
    return Result("data", tuple(parts))


def events_result() -> Result:
    names = ("step-without", "step-with", "save-told", "save-heard")
    taken = [Sample(name, 1, {"seconds": (0.05,)}) for name in names]
    facts = {"num_steps": 10_000, "num_saves": 500, "num_events": 7}
    return Result("events", (part("one-process", taken, facts=facts),))


def peers_result(*, seconds: float = 1.1) -> Result:
    """Copies of 1 GB, for which a plain copy takes a second and half a second more in another way."""
    taken = [
        Sample(name, number, {"seconds": (each,), "cpu_s": (0.4,)})
        for number in (WARM_UP, 1, 2, 3)
        for name, each in ((f"{RAW} 1 MiB a call", 1.5), (f"{RAW} 16 MiB a call", 1.0), (OURS, seconds))
    ]
    return Result("peers", (part("put", taken, state=StateSize(10**9), facts={"streams": 4}),))


def objects_result() -> Result:
    """Transfers in which holdfast saves at half the raw limit and loads at nine tenths of it, the keeper takes much
    time of the processor, and a long history takes one request more in a bucket."""
    seconds = {RAW_OF_BUCKETS: 0.9, "dcp-s3torchconnector": 2.0, OURS: 1.0, KEEPER: 0.9}
    used_s = {RAW_OF_BUCKETS: 0.2, "dcp-s3torchconnector": 3.0, OURS: 0.3, KEEPER: 0.4}
    taken = []
    for verb, slower in (("save", 1.8), ("load", 1.0)):
        for name, second in seconds.items():
            values = {"cpu_s": (used_s[name] * NBYTES / 1e9,), "server_cpu_s": (0.2,), "peak_extra_nbytes": (1 << 20,)}
            taken += [
                sample(verb, name, number, second * (slower if name == OURS else 1), **values) for number in (0, 1, 2)
            ]
    transfer = part("transfer", taken, described(tuple(TRANSFERRING), TRANSFERRING), title="one rank", world=1)
    transfer = msgspec.structs.replace(transfer, not_possible={"dcp-s3fs": "it needs an older botocore"})
    blocked = [sample("", name, number, 0.003) for name in (OURS, KEEPER) for number in (1, 2)]
    requests = [
        Sample(OURS, 1, {"first": (first,), "later": (later,)}, f"{world} x {number}")
        for world, first, later in ((1, 21.0, 11.0), (4, 30.0, 14.0))
        for number in (100, 10_000)
    ]
    facts = {"worlds": [1, 4], "few": 100, "many": 10_000}
    heads = [
        Sample(f"{kind} {length}", 1, {"seconds": (seconds,), "requests": (4.0 + (kind == "S3" and length > 10),)})
        for kind, seconds in (("S3", 0.004), ("POSIX", 0.001))
        for length in (10, 10_000)
    ]
    parts = (
        transfer,
        part("blocked", blocked, described((OURS, KEEPER), TRANSFERRING), world=1),
        part("requests", requests, facts=facts),
        part("head", [each for each in heads for _ in range(2)], facts={"lengths": [10, 10_000]}),
    )
    return Result("objects", parts)


def exchange_result(*, seconds: float = 1.25, peak_mb: float = 40.0, load_s: float = 0.5) -> Result:
    """Conversions at four fifths of the raw limit, and a load in half the time of the usual way; no tool but that of
    DCP took part."""
    taken = samples({f"{RAW} fast": (1.0, 1.0), f"{RAW} slow": (2.0, 2.0), "dcp_to_torch_save": (4.0, 4.0)}, ("",))
    moved = {"device_nbytes": (1.01 * NBYTES,), "written_nbytes": (1.0 * NBYTES,)}
    own = {**moved, "peak_extra_nbytes": (peak_mb * 2**20,)}
    ours = [sample("", OURS, number, seconds, **own) for number in (WARM_UP, 1, 2)]
    others = [msgspec.structs.replace(each, values={**each.values, **moved}) for each in taken]
    name, conversion = "dcp-import", CONVERSIONS["dcp-import"]
    size, absent = StateSize(NBYTES, 300), {"zero_to_fp32": "it is not installed"}
    converted = part(
        name, [*others, *ours], conversion.about(), title=conversion.title, world=1, state=size, not_possible=absent
    )
    loads = samples({f"{RAW} fast": (0.25, 0.25), STOCK: (1.0, 1.0), OURS: (load_s, load_s)}, ("load",))
    loaded = part(LOAD_HUB, loads, described((RAW, STOCK, OURS), HUB_LOADING), title="onto FSDP2", world=4, state=size)
    return Result("exchange", (converted, loaded))


def engine_result(*, blocked_s: float = 0.010, loop_s: float = 8.08, is_full: bool = True) -> Result:
    """A run in which every round is like the others, and of which holdfast meets all bars but that of its own save."""
    return Result(
        "engine",
        (
            saves_part(blocked_s=blocked_s, is_full=is_full),
            restore_part(is_full=is_full),
            python_part(is_full=is_full),
            loop_part(loop_s=loop_s, is_full=is_full),
        ),
    )


def saves_part(*, blocked_s: float = 0.010, thread_s: float = 4.0, is_full: bool = True) -> Part:
    """Two saves of each contender in each round; the first ones took ten times as long, and were watched."""
    taken = []
    for number in range(WARM_UP, ROUNDS + 1):
        scale = 10.0 if number == WARM_UP else 1.0
        for turn, (name, seconds) in enumerate((DURABLE_S | {THREAD: thread_s}).items()):
            alone = {"seconds": (scale * seconds,), "blocked_s": (scale * blocked_s,), "cpu_s": (scale * 0.2,)}
            if name == OURS:
                alone["persist_s"] = (scale * (seconds - 0.5),)
            taken.append(Sample(name, number, alone, ALONE, turn))
            if not name.startswith(RAW):
                beside: dict[str, tuple[float, ...]] = {
                    "seconds": (2 * scale * seconds,),
                    "blocked_s": (scale * blocked_s,),
                }
                beside["step_wait_s"] = (scale * 0.004,)
                if number == WARM_UP:
                    beside["peak_extra_nbytes"] = (30e6, 40e6)
                taken.append(Sample(name, number, beside, BESIDE_WORK, turn))
    absent = {"torchsnapshot-async": "it is from 2023"}
    return part(
        engine.SAVES,
        taken,
        described((*ENGINE_NAMES, *absent), BACKGROUND),
        rounds=ROUNDS,
        state=LARGE,
        not_possible=absent,
        is_full=is_full,
    )


def restore_part(*, is_full: bool = True) -> Part:
    """Restores at four fifths of a copy's speed."""
    values = {"seconds": 0.25, "memcpy_s": 0.2, "moved_s": 0.2, "moved_cpu_s": 0.4, "load_s": 1.0}
    taken = [
        Sample(OURS, number, {key: (value,) for key, value in values.items()}, "durable" if number % 2 else "staged")
        for number in range(1, ROUNDS + 1)
    ]
    return part(engine.RESTORE, taken, rounds=ROUNDS, state=LARGE, is_full=is_full)


def python_part(*, is_full: bool = True) -> Part:
    """A loop that a peer slows down by half, and holdfast by 2 % while it persists, with the copy by 10 %."""
    taken = []
    for number in range(WARM_UP, ROUNDS + 1):
        for name, saving, persisting in ((OURS, 90.0, 98.0), (THREAD, 50.0, 50.0)):
            rates = {"before_per_s": 99.0, "saving_per_s": saving, "persisting_per_s": persisting, "after_per_s": 101.0}
            taken.append(sample("", name, number, 1.0, **{key: (rate,) for key, rate in rates.items()}))
    return part(engine.PYTHON, taken, beside_contenders(), world=1, rounds=ROUNDS, state=LARGE, is_full=is_full)


def loop_part(*, loop_s: float = 8.08, is_full: bool = True) -> Part:
    """Loops of 8 s without saves."""
    taken = [
        sample("", name, number, seconds, durable_s=(seconds + 0.5,))
        for number in range(WARM_UP, ROUNDS + 1)
        for name, seconds in {NO_SAVES: 8.0, OURS: loop_s, THREAD: 10.0}.items()
    ]
    return part(engine.LOOP, taken, beside_contenders(), rounds=ROUNDS, state=LARGE, is_full=is_full)


def beside_contenders() -> tuple[Contender, ...]:
    return described((OURS, THREAD), BACKGROUND)
