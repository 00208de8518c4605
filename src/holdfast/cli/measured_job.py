"""The numbers of `holdfast advise`, as the recorded events of a run tell them."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final, NamedTuple

from holdfast.cli.recorded import events_folder, events_in
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.telemetry.event_files import no_events
from holdfast.telemetry.rank_saves import RankRestore, job_events
from holdfast.telemetry.run_figures import job_saves, step_figures
from holdfast.wording import duration

#: Where each tier lies.
_PLACES: Final = {"memory": "memory", "peers": "the memory of other nodes", "durable": "storage"}


class MeasuredJob(NamedTuple):
    """The options that describe the jobs of a run, in the form in which a user gives them; "" for what no event
    tells. `unknown` says what is missing."""

    memory: str
    peers: str
    durable: str
    step: str
    size: str
    unknown: list[str]

    def __str__(self) -> str:
        tiers = {"--memory": self.memory, "--peers": self.peers, "--durable": self.durable}
        named = tiers | {"--step": self.step, "--size": self.size}
        return " ".join(f"{option} {text}" for option, text in named.items() if text)


def measured(run: str, events: str) -> MeasuredJob:
    """Measure the jobs of the run at the path `run`, by its events in the folder `events` ("": beside the run): the
    median of its saves, restores and steps.

    Raises `NotFoundError` or `ConfigurationError` where nothing was recorded, or no save to storage.
    """
    found = open_run(run)
    folder = events_folder(found, events)
    records = events_in(folder).records
    if not records:
        raise no_events(folder, found.storage.location.url)
    job = job_events(records)
    saves = job_saves(job.saves)
    steps = step_figures(job.steps)
    durable = [(save.blocked_s, save.durable_s) for save in saves if save.durable_s is not None]
    in_memory = [(save.blocked_s, save.in_memory_at_s - save.begun_s) for save in saves if save.in_memory_at_s]
    protected = [(save.blocked_s, save.protected_s) for save in saves if save.protected_s is not None]
    if not durable:
        raise ConfigurationError(
            f"no save of '{found.storage.location.url}' became durable while events were recorded.",
            code="config.advice",
            action="Give --durable yourself, such as 3s,180s,300s,1%.",
        )
    unknown: list[str] = []
    slow_down = 0.0 if steps is None or steps.slowdown is None else steps.slowdown
    return MeasuredJob(
        memory=_tier("memory", in_memory, _restores(job.restores, "node memory"), 0.0, unknown),
        peers=_tier("peers", protected, _restores(job.restores, "peer memory"), 0.0, unknown),
        durable=_tier("durable", durable, _restores(job.restores, "storage"), min(slow_down, 1.0), unknown),
        step="" if steps is None else _seconds(steps.quiet_s),
        size=_head_size(found),
        unknown=unknown,
    )


def _restores(restores: Iterable[RankRestore], tier: str) -> list[float]:
    found = [each for each in restores if each.tier == tier and each.step is not None]
    return [sum(span.seconds for span in each.spans) for each in found]


def _tier(
    name: str, saves: list[tuple[float, float]], restores_s: list[float], slow_down: float, unknown: list[str]
) -> str:
    """The text for a tier. Where nothing was restored from it, it takes the time of a save for that of a restore."""
    if not saves:
        return ""
    blocked_s, latency_s = (median(each) for each in zip(*saves, strict=True))
    if not restores_s:
        unknown.append(
            f"No job has restored from {_PLACES[name]}: the time of a save, "
            f"{duration(latency_s)}, stands for it. If you know better, give --{name}."
        )
    share = f",{100 * slow_down:.1f}%" if slow_down else ""
    return ",".join(map(_seconds, (blocked_s, latency_s, median(restores_s or [latency_s])))) + share


def _seconds(seconds: float) -> str:
    return f"{seconds:.4f}".rstrip("0").rstrip(".") + "s"


def _head_size(run: Run) -> str:
    try:
        head = run.head_place()
        return "" if head is None else f"{run.commit(head).nbytes}B"
    except (CorruptError, NotFoundError):  # a damaged record: without the size, one column stays empty
        return ""
