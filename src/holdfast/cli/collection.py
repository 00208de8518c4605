"""``holdfast gc``: delete what no checkpoint of a run needs, and say the bytes of each thing, and why it goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from holdfast.cli.amounts import seconds_in
from holdfast.cli.screen import Listing, confirmed, console, counting, print_json, say
from holdfast.errors import ConfigurationError, printable
from holdfast.reports import size
from holdfast.run.by_path import open_run
from holdfast.run.garbage import LEAST_GRACE_S, CollectionOutcome, CollectionPlan, Garbage, collect, plan_collection
from holdfast.run.history import Run
from holdfast.wording import count


class GcDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints.

    `deleted` is what went, or would go, in a dry run; `left` the garbage that somebody has needed meanwhile; `kept`
    what stays although no commit names it. `remark` says what the store may hold that cannot be listed, or is empty.
    """

    run: str
    dry_run: bool
    deleted: list[Garbage]
    left: list[Garbage]
    kept: list[Garbage]
    deleted_nbytes: int
    kept_nbytes: int
    remark: str


def collect_garbage(run: str, *, grace: str, dry_run: bool, yes: bool, as_json: bool) -> bool:
    """Delete the garbage of the run at the path `run`. Returns False where the user did not confirm."""
    grace_s = _grace(grace)
    found = open_run(run)
    with counting("looking for garbage", None, quiet=as_json):
        plan = plan_collection(found, grace_s=grace_s)
    if not as_json:
        _show(found, plan, is_sure=yes and not dry_run)
    done = CollectionOutcome(deleted=list(plan.garbage) if dry_run else [])
    if plan.garbage and not dry_run:
        if not confirmed(f"Delete {size(_total(plan.garbage))}? This cannot be undone.", yes=yes):
            return False
        with counting("deleting", None, quiet=as_json):
            done = collect(found, plan)
    if as_json:
        print_json(_document(found, plan, done, dry_run=dry_run))
    else:
        _conclude(found, plan, done, dry_run=dry_run)
    return True


def _grace(text: str) -> float:
    seconds = seconds_in(text)
    if not LEAST_GRACE_S <= seconds < math.inf:
        raise ConfigurationError(
            f"--grace has '{text}', which is no time of at least {LEAST_GRACE_S:g} seconds.",
            code="config.option",
            action="Write it as 15min, 6h or 2d.",
        )
    return seconds


def _show(run: Run, plan: CollectionPlan, *, is_sure: bool) -> None:
    screen, verb = console(), "deletes" if is_sure else "would delete"
    name = printable(run.storage.location.url)
    if not plan.garbage and not plan.kept:
        say(screen, f"{name}: no garbage")
        return
    say(screen, f"{name}: {verb} {size(_total(plan.garbage))}; keeps {size(_total(plan.kept))} that no commit names")
    table = Listing("", "what", "files", "size", "why", right=("files", "size"))
    for word, rows in (("delete", plan.garbage), ("keep", plan.kept)):
        for each in rows:
            table.add_row(word, printable(each.path), str(each.num_files), size(each.nbytes), printable(each.reason))
    screen.print(table)


def _conclude(run: Run, plan: CollectionPlan, done: CollectionOutcome, *, dry_run: bool) -> None:
    screen = console()
    for each in done.left:
        say(screen, f"{printable(each.path)} stays: {printable(each.reason)}")
    if not dry_run and plan.garbage:
        files = count(sum(each.num_files for each in done.deleted), "file")
        say(screen, f"deleted {files}, {size(_total(done.deleted))}")
    if remark := run.storage.capabilities.unlisted_remains:
        say(screen, f"\n{remark}")


def _document(run: Run, plan: CollectionPlan, done: CollectionOutcome, *, dry_run: bool) -> GcDocument:
    return GcDocument(
        run=run.storage.location.url,
        dry_run=dry_run,
        deleted=done.deleted,
        left=done.left,
        kept=list(plan.kept),
        deleted_nbytes=_total(done.deleted),
        kept_nbytes=_total(plan.kept),
        remark=run.storage.capabilities.unlisted_remains,
    )


def _total(rows: Sequence[Garbage]) -> int:
    return sum(each.nbytes for each in rows)
