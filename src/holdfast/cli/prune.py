"""``holdfast prune``: delete the checkpoints of a run that no given policy keeps, and say why each other one stays."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Final, Literal, NamedTuple

import msgspec

from holdfast.cli.amounts import seconds_in
from holdfast.cli.runs import RunHead
from holdfast.cli.screen import Listing, age, confirmed, console, print_json, say
from holdfast.errors import ConfigurationError, printable
from holdfast.policy.keep import CheckpointFacts, KeepBest, KeepDecision, KeepEvery, KeepFor, KeepLast, KeepPolicy
from holdfast.reports import size
from holdfast.run.by_path import open_run
from holdfast.run.history import Run
from holdfast.run.retention import Remains, Retention, RetentionOutcome, RetentionSurvey
from holdfast.wording import count

_BEST_EXAMPLES: Final = "Write --keep-best loss, --keep-best loss:2, or --keep-best accuracy:2:max."


class KeepOptions(NamedTuple):
    """The policies, as the user wrote them, each as often."""

    last: Sequence[int]
    every: Sequence[int]
    best: Sequence[str]
    times: Sequence[str]


class PrunedRow(msgspec.Struct, frozen=True):
    """One checkpoint of the lineage. `reasons` say why it stays; it has none if it goes."""

    place: str
    step: int
    created: float
    nbytes: int
    reasons: list[str]


class PruneDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints: what went (or would go, in a dry run) and what stays, newest first.

    `finished` are the folders of older deletions that were interrupted and are finished now, or would be; `cut_off`
    those of saves that killed jobs have left in parts, which go too. ``deleted_nbytes`` leaves out still files that
    stay for other checkpoints. `abandoned` is the number of checkpoints off the lineage, which no policy deletes.
    """

    run: str
    dry_run: bool
    head: RunHead
    deleted: list[PrunedRow]
    kept: list[PrunedRow]
    deleted_nbytes: int
    finished: list[str]
    cut_off: list[str]
    abandoned: int


def prune(run: str, options: KeepOptions, *, dry_run: bool, yes: bool, as_json: bool) -> bool:
    """Apply the policies to the run at the path `run`. Returns False where the user did not confirm, or where another
    job took over the run before the end.

    Raises `ConfigurationError`, code ``config.metric``, where a policy cannot judge.
    """
    policy = _policy(options)
    found = open_run(run)
    retention = Retention(policy)
    survey = retention.survey(found)
    _check_judged(survey.decision)
    left = retention.remains(found, survey)
    if not as_json:
        _show(found, survey, left, is_sure=yes and not dry_run)
    doomed = survey.decision.deleted
    if dry_run:
        if as_json:
            print_json(_document(found, survey, doomed, left, dry_run=True))
        return True
    if not (doomed or left.half_removed or left.cut_off):
        done = RetentionOutcome()
    elif confirmed(_question(doomed, left), yes=yes):
        done = retention.apply(found, survey)
    else:
        return False
    if as_json:
        print_json(_document(found, survey, done.deleted, Remains(done.finished, done.cut_off), dry_run=False))
    else:
        _conclude(found, done)
    return not done.is_overtaken


def _policy(options: KeepOptions) -> KeepPolicy:
    """The policy that the options describe. Raises `ConfigurationError` for none, and for impossible ones."""
    try:
        parts: list[KeepPolicy] = [_best(text) for text in options.best]
    except ValueError as error:
        raise _wrong(f"{error}.", _BEST_EXAMPLES) from error
    parts += map(KeepLast, options.last)
    parts += map(KeepEvery, options.every)
    parts += [KeepFor(_age(text)) for text in options.times]
    if not parts:
        what = "nothing says which checkpoints to keep."
        raise _wrong(what, "Pass --keep-last, --keep-every, --keep-best or --keep-for, or several of them.")
    try:
        return reduce(or_, parts)
    except ValueError as error:
        raise _wrong(f"{error}.", "Pass only one of the two options.") from error


def _age(text: str) -> float:
    seconds = seconds_in(text)
    if not 0 < seconds < math.inf:
        raise _wrong(f"--keep-for has '{text}', which is no such time.", "Write it as 12h, 7d or 90min.")
    return seconds


def _best(text: str) -> KeepBest:
    """The policy that ``--keep-best METRIC[:N[:max]]`` describes."""
    mode: Literal["min", "max"] = "min"
    metric, number = text, 1
    for word in ("min", "max"):
        if metric.endswith(f":{word}"):
            metric, mode = metric.removesuffix(f":{word}"), "max" if word == "max" else "min"
            break
    name, colon, last = metric.rpartition(":")
    if colon and last.isdecimal():
        metric, number = name, int(last)
    return KeepBest(metric, number, mode)


def _check_judged(decision: KeepDecision) -> None:
    for problem in decision.problems:
        if problem.blocks:
            action = f"Name one of the metrics of the checkpoints. {_BEST_EXAMPLES}"
            raise ConfigurationError(f"{problem.message}.", code="config.metric", action=action)


def _question(doomed: Sequence[CheckpointFacts], left: Remains) -> str:
    if doomed:
        what = f"Delete {count(len(doomed), 'checkpoint')}"
    elif left.half_removed:
        what = f"Finish {count(len(left.half_removed), 'interrupted deletion')}"
    else:
        what = f"Delete the parts of {count(len(left.cut_off), 'save')}"
    return f"{what}? This cannot be undone."


def _show(run: Run, survey: RetentionSurvey, left: Remains, *, is_sure: bool) -> None:
    decision, screen, now = survey.decision, console(), time.time()
    name = printable(run.storage.location.url)
    goes = {facts.place for facts in decision.deleted}
    freed = _freed(decision.deleted)
    verb = "deletes" if is_sure else "would delete"
    say(screen, f"{name}: {verb} {count(len(goes), 'checkpoint')}, {freed}; keeps {len(decision.kept)}")
    rows = [(kept.facts, "keep", "; ".join(kept.reasons)) for kept in decision.kept]
    rows += [(facts, "delete", "") for facts in decision.deleted]
    table = Listing("", "place", "step", "age", "size", "why", right=("step", "age", "size"))
    for facts, what, why in sorted(rows, key=lambda row: row[0].place, reverse=True):
        table.add_row(what, str(facts.place), str(facts.step), age(now - facts.created), size(facts.nbytes), why)
    if rows:
        screen.print(table)
    for problem in decision.problems:
        say(screen, f"{printable(problem.message)}. {problem.action}")
    if left.half_removed:
        finishes, deletions = "finishes" if is_sure else "would finish", count(len(left.half_removed), "deletion")
        say(screen, f"{finishes} {deletions} that {_were(left.half_removed)} interrupted")
    if left.cut_off:
        saves = count(len(left.cut_off), "save")
        say(screen, f"{verb} the parts of {saves} that {_were(left.cut_off)} cut off before a newer job began")
    if survey.num_abandoned:
        others = f"{count(survey.num_abandoned, 'abandoned checkpoint')} off the head's lineage"
        say(screen, f"leaves {others} alone; holdfast rm deletes such checkpoints")


def _freed(deleted: Sequence[CheckpointFacts]) -> str:
    """The bytes that deletions free. Still files of one go with the last checkpoint that needs them, maybe at once."""
    freed = size(sum(facts.freed_nbytes for facts in deleted))
    return f"at least {freed}" if any(facts.kept_nbytes for facts in deleted) else freed


def _were(items: Sequence[str]) -> str:
    return "was" if len(items) == 1 else "were"


def _conclude(run: Run, done: RetentionOutcome) -> None:
    screen = console()
    for facts, error in done.held:
        say(screen, f"step {facts.step} at {facts.place} stays: {printable(error.message)}")
    freed = _freed(done.deleted)
    say(screen, f"deleted {count(len(done.deleted), 'checkpoint')}, {freed}; the head is {RunHead.of(run)}")
    if done.is_overtaken:
        say(screen, "Another job, or a rollback, opened a new epoch meanwhile: run the command again.")


def _document(
    run: Run, survey: RetentionSurvey, deleted: Sequence[CheckpointFacts], left: Remains, *, dry_run: bool
) -> PruneDocument:
    gone = {facts.place for facts in deleted}
    kept = {each.facts.place: _row(each.facts, each.reasons) for each in survey.decision.kept}
    # A checkpoint that was to go, and that somebody has pinned or reads since, stays.
    stayed = {facts.place: _row(facts, ("it was not deleted",)) for facts in survey.decision.deleted}
    rows = kept | {place: row for place, row in stayed.items() if place not in gone}
    return PruneDocument(
        run=run.storage.location.url,
        dry_run=dry_run,
        head=RunHead.of(run),
        deleted=[_row(facts, ()) for facts in sorted(deleted, key=lambda facts: facts.place, reverse=True)],
        kept=[rows[place] for place in sorted(rows, reverse=True)],
        deleted_nbytes=sum(facts.freed_nbytes for facts in deleted),
        finished=left.half_removed,
        cut_off=left.cut_off,
        abandoned=survey.num_abandoned,
    )


def _row(facts: CheckpointFacts, reasons: Sequence[str]) -> PrunedRow:
    return PrunedRow(str(facts.place), facts.step, facts.created, facts.nbytes, list(reasons))


def _wrong(what: str, action: str) -> ConfigurationError:
    return ConfigurationError(what, code="config.option", action=action)
