"""``holdfast advise``: how often to save, from given numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.console import Console
from rich.text import Text

from holdfast.cli.amounts import NUMBER, bytes_in, seconds_in
from holdfast.cli.measured_job import measured
from holdfast.cli.screen import Listing, console, print_json, say
from holdfast.errors import ConfigurationError
from holdfast.goodput.advice import Advice, Alternative, Limits, TierAdvice, advise
from holdfast.goodput.failures import LLAMA3_SHARES, PRESETS, Loss
from holdfast.goodput.waste import Failures, TierCost
from holdfast.reports import size as size_text
from holdfast.wording import count, duration

_SHARE: Final = re.compile(rf"{NUMBER} ?%")
_SURVIVES: Final = {"memory": Loss.PROCESS, "peers": Loss.NODE, "durable": Loss.JOB}
#: Characters of the longest bar of the plot.
_BAR_WIDTH: Final = 40


class Given(NamedTuple):
    """The options of the command, as the user wrote them; "" for those that are left out."""

    memory: str
    peers: str
    durable: str
    mttf: str
    failures: str
    nodes: int
    shares: str
    detection: str
    step: str
    max_overhead: str
    in_flight: int
    size: str
    cost_per_hour: float
    run: str = ""
    events: str = ""


def advice(given: Given, *, as_json: bool) -> None:
    """Print the advice for the job that `given` describes. Raises `ConfigurationError` for numbers that make no
    sense."""
    given = _completed(given, as_json=as_json)
    nearer = [_tier(name, text) for name, text in (("memory", given.memory), ("peers", given.peers)) if text]
    tiers = [*nearer, _tier("durable", given.durable)]
    if not math.isfinite(given.cost_per_hour):
        raise _invalid(f"--cost-per-hour {given.cost_per_hour} is no price.", "Write it as 2000 or 98.5.")
    failures, source = _failures(given)
    limits = Limits(
        step_s=_duration(given.step, "--step", least_s=1e-6) if given.step else None,
        max_overhead=_share(given.max_overhead, "--max-overhead") if given.max_overhead else math.inf,
        in_flight=given.in_flight,
    )
    found = advise(
        tiers,
        failures,
        limits,
        nbytes=_nbytes(given.size) if given.size else None,
        cost_per_hour=given.cost_per_hour or None,
    )
    if as_json:
        print_json(found)
    else:
        _show(console(), found, source)


def _completed(given: Given, *, as_json: bool) -> Given:
    """The options, with those that the user left out as the events of a run tell them, if one is named."""
    if given.run:
        found = measured(given.run, given.events)
        screen = console(stderr=as_json)
        say(screen, f"Measured: {found}", "dim")
        for what in found.unknown:
            say(screen, what, "dim")
        screen.print()
        given = given._replace(
            memory=given.memory or found.memory,
            peers=given.peers or found.peers,
            durable=given.durable or found.durable,
            step=given.step or found.step,
            size=given.size or found.size,
        )
    if not given.durable:
        raise _invalid(
            "nothing says what a save to storage costs.",
            "Pass --durable, such as 3s,180s,300s,1%; or --from RUN, whose jobs have recorded events.",
        )
    return given


def _tier(name: str, text: str) -> TierCost:
    """The tier `name`, from its stall, latency and restore, and the share by which a save slows training down."""
    parts = text.split(",")
    if not 3 <= len(parts) <= 4:
        raise _invalid(
            f"--{name} {text} has {count(len(parts), 'number')}, but a tier has three or four.",
            f"Give what a save holds training up, the time until it is complete, and the time of a restore, such as "
            f"--{name} 0.3s,5s,60s; and then, if you like, the share by which it slows training down: ,2%",
        )
    stall_s, latency_s, restore_s = (_duration(part, f"--{name}") for part in parts[:3])
    slow_down = _share(parts[3], f"--{name}") if len(parts) == 4 else 0.0
    return TierCost(name, _SURVIVES[name], stall_s, latency_s, restore_s, slow_down)


def _failures(given: Given) -> tuple[Failures, str]:
    """The failures of the job, and where their number comes from."""
    if bool(given.mttf) == bool(given.failures):
        raise _invalid(
            "the failures of the job must be given once.",
            "Pass --mttf, the mean time to a failure of the job, such as 3h; or --failures with one of "
            f"{', '.join(PRESETS)}, and the number of --nodes.",
        )
    preset = PRESETS.get(given.failures)
    if given.failures and preset is None:
        raise _invalid(f"nobody has published failures called '{given.failures}'.", f"Use {', '.join(PRESETS)}.")
    shares = _shares(given.shares) if given.shares else LLAMA3_SHARES
    detection_s = _duration(given.detection, "--detection")
    if preset is None:
        mttf_s = _duration(given.mttf, "--mttf", least_s=1.0)
        return Failures(mttf_s, shares, detection_s), "as given"
    if not given.nodes:
        raise _invalid("the failures of a fleet need the number of nodes of the job.", "Add --nodes, such as 128.")
    mttf_s = preset.mttf_s(given.nodes)
    return Failures(mttf_s, shares, detection_s), f"{preset.source}; here {count(given.nodes, 'node')}"


def _shares(text: str) -> tuple[float, float, float]:
    parts = [_share(part, "--shares") for part in text.split(",")]
    if len(parts) != 3 or not math.isclose(sum(parts), 1.0, abs_tol=0.005):
        raise _invalid(
            f"--shares {text} are not three shares that make 100 %.",
            "Give the shares of failures that only end processes, that take a node, and that take more than a node, "
            "such as 23%,75%,2%.",
        )
    process, node, job = (part / sum(parts) for part in parts)
    return process, node, job


def _duration(text: str, option: str, *, least_s: float = 0.0) -> float:
    seconds = seconds_in(text)
    if not least_s <= seconds < math.inf:
        raise _invalid(f"{option} has '{text}', which is no such time.", "Write it as 250ms, 0.3s, 5min, 3.09h or 2d.")
    return seconds


def _share(text: str, option: str) -> float:
    found = _SHARE.fullmatch(text.strip())
    share = math.nan if found is None else float(found[1]) / 100
    if not 0 <= share <= 1 or (option == "--max-overhead" and not share):
        raise _invalid(f"{option} has '{text}', which is no such share.", "Write it as 1% or 0.5%.")
    return share


def _nbytes(text: str) -> int:
    nbytes = bytes_in(text)
    if nbytes is None:
        raise _invalid(f"--size {text} is no size.", "Write it as 912GB or 2TiB.")
    return nbytes


def _invalid(problem: str, action: str) -> ConfigurationError:
    return ConfigurationError(problem, code="config.advice", action=action)


def _show(screen: Console, found: Advice, source: str) -> None:
    say(screen, f"One failure every {duration(found.mttf_s)} ({source}).")
    screen.print()
    table = Listing(
        "tier", "save every", "failures/day", "half lose", "99 % lose", "written/day", "because", spare=("because",)
    )
    for tier in found.tiers:
        table.add_row(*_row(tier))
    screen.print(table)
    screen.print()
    lost = found.waste
    parts = {
        "saves hold training up": lost.stall,
        "saves slow it down": lost.slow_down,
        "work is done again": lost.redone,
        "restores": lost.restore,
        "detection and restart": lost.detection,
    }
    price = "" if found.cost_per_day is None else f", {found.cost_per_day:,.0f} a day"
    say(screen, f"{_percent(lost.total)} of the time is lost{price}:", "bold")
    if lost.total >= 1:
        say(screen, "  The job makes no progress: it fails before it has made up for the last failure.", "bold red")
    for what, share in parts.items():
        if share:
            say(screen, f"  {_percent(share):>7}  {what}")
    if lost.total >= 1:  # no interval is better than another one then
        _compare(screen, "Changes and what they buy:", found.changes, lost.total)
        return
    screen.print()
    say(screen, "Time lost at other intervals (all tiers):", "bold")
    longest = max(share for _, share in found.around)
    for factor, share in found.around:
        label = f"x {factor:g}" if factor >= 1 else f"x 1/{1 / factor:g}"
        say(
            screen,
            f"  {label:>6}  {_percent(share):>7}  {'#' * round(_BAR_WIDTH * share / longest)}",
            "green" if factor == 1 else "",
        )
    _compare(screen, "Changes and what they buy:", found.changes, lost.total)
    _compare(screen, "Other rules for the last tier:", found.rules, lost.total)


def _row(tier: TierAdvice) -> Sequence[str]:
    if tier.interval_s is None or tier.half_age_s is None or tier.most_age_s is None:
        return tier.name, "never", "0", "-", "-", "-", tier.reason
    steps = "" if tier.steps is None else f" ({count(tier.steps, 'step')})"
    written = "-" if tier.nbytes_per_day is None else size_text(tier.nbytes_per_day)
    ages = duration(tier.half_age_s), duration(tier.most_age_s)
    return tier.name, duration(tier.interval_s) + steps, f"{tier.rate:.2f}", *ages, written, tier.reason


def _compare(screen: Console, title: str, others: Sequence[Alternative], now: float) -> None:
    screen.print()
    say(screen, title, "bold")
    for other in others:
        difference = 100 * (other.waste - now)
        say(screen, Text(f"  {_percent(other.waste):>7} ({difference:+.2f} points)  {other.what}"))


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
