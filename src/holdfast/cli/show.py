"""``holdfast show``: the content of a checkpoint."""

from __future__ import annotations

import time
from fnmatch import fnmatchcase
from itertools import groupby

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.cli import value_text
from holdfast.cli.screen import Listing, ago, console, metrics_text, print_json, say, when
from holdfast.cli.tree import ShownTensor, lines, tensors_of
from holdfast.errors import NotFoundError, printable
from holdfast.format.near import near
from holdfast.reports import size
from holdfast.run.history import resolve
from holdfast.run.paths import parse, some, some_quoted
from holdfast.run.quarantine import Quarantined, quarantine_of
from holdfast.wording import count

#: Most equal values beside each other that are listed one by one.
_MAX_ALIKE = 4


class ShownValue(msgspec.Struct, frozen=True):
    """A value: its type and its text."""

    name: str
    type: str
    text: str


class ShowDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``--json`` prints. `values` is null without ``--values``; `divided` is as on screen.
    `quarantine` is that in which the checkpoint is, or null."""

    path: str
    place: str
    step: int
    created: float
    in_history: bool
    quarantine: Quarantined | None
    run_id: str
    world_size: int
    metrics: dict[str, str | float]
    num_files: int
    nbytes: int
    tensors: list[ShownTensor]
    aliases: dict[str, str]
    diverged: tuple[str, ...]
    values: list[ShownValue] | None


def show(path: str, *, values: bool, names: str, as_json: bool) -> None:
    """Print the tensors of the checkpoint at `path` whose names match the glob `names`; without it all, as a tree."""
    checkpoint = Checkpoint(resolve(parse(path)).sealed)
    document = _document(checkpoint, values=values, names=names)
    if names and not (document.tensors or document.values):
        raise _no_match(checkpoint, names)
    if as_json:
        print_json(document)
        return
    screen = console()
    _print_head(screen, document, checkpoint)
    if document.tensors:
        (_print_tensors if names else _print_tree)(screen, document.tensors)
    _print_rest(screen, document, checkpoint, by_name=bool(names))


def _document(checkpoint: Checkpoint, *, values: bool, names: str) -> ShowDocument:
    body, commit = checkpoint.manifest.body, checkpoint.sealed.commit
    aliases = {alias: name for alias, name in body.aliases.items() if _wanted(alias, names)}
    # A tied tensor is stored under one of its names, but each of them selects it.
    tied = set(aliases.values())
    tensors = [tensor for tensor in tensors_of(checkpoint) if _wanted(tensor.name, names) or tensor.name in tied]
    listed = None
    if values:
        rows = value_text.rows(checkpoint.nodes)
        listed = [ShownValue(name, value_text.kind_of(node), text) for name, node, text in rows if _wanted(name, names)]
    return ShowDocument(
        path=checkpoint.folder,
        place=str(checkpoint.manifest.place),
        step=body.step,
        created=body.created,
        in_history=commit is not None,
        quarantine=None if commit is None else quarantine_of(checkpoint.storage, commit.place),
        run_id=body.run_id,
        world_size=body.world_size,
        metrics=dict(body.metrics),
        num_files=body.num_files,
        nbytes=sum(file.nbytes for file in checkpoint.seal.files),
        tensors=tensors,
        aliases=aliases,
        diverged=tuple(name for name in body.diverged if _wanted(name, names)),
        values=listed,
    )


def _wanted(name: str, pattern: str) -> bool:
    return not pattern or fnmatchcase(name, pattern)


def _print_head(screen: Console, document: ShowDocument, checkpoint: Checkpoint) -> None:
    where = "" if document.in_history else ", opened by its folder, without the history of a run"
    facts = f"step {document.step} at {document.place}, saved {when(document.created)}"
    words = (printable(document.path), "bold"), f"\n{facts} ({ago(time.time() - document.created)}){where}"
    say(screen, Text.assemble(*words))
    total = count(len(checkpoint.manifest.body.names), "tensor")
    files, ranks = count(document.num_files, "file"), count(document.world_size, "rank")
    metrics = f"; {metrics_text(document.metrics)}" if document.metrics else ""
    say(screen, f"{total}, {size(document.nbytes)} in {files} by {ranks}{metrics}")
    if document.quarantine is not None:
        say(screen, printable(f"{document.quarantine} {document.quarantine.advice}"))
    screen.print()


def _print_tree(screen: Console, tensors: list[ShownTensor]) -> None:
    made = Listing(
        "name", "num", "size", "dtype", "shape", "divided", right=("num", "size"), spare=("divided", "num", "dtype")
    )
    for line in lines(tensors):
        label = Text("  " * line.depth + value_text.shown_name(line.label), style="" if line.tensor else "bold")
        facts = _facts(line.tensor) if line.tensor else ()
        made.add_row(label, f"{line.num_tensors:,}", size(line.nbytes), *facts)
    screen.print(made)


def _print_tensors(screen: Console, tensors: list[ShownTensor]) -> None:
    made = Listing("name", "size", "dtype", "shape", "divided", right=("size",), spare=("divided", "dtype"))
    for tensor in tensors:
        made.add_row(value_text.shown_name(tensor.name), size(tensor.nbytes), *_facts(tensor))
    screen.print(made)


def _facts(tensor: ShownTensor) -> tuple[str, str, str]:
    files = "" if tensor.num_files == tensor.num_parts else f" in {count(tensor.num_files, 'file')}"
    return tensor.dtype, str(list(tensor.shape)), tensor.divided + files


def _print_rest(screen: Console, document: ShowDocument, checkpoint: Checkpoint, *, by_name: bool) -> None:
    """Print aliases, diverged tensors and values, and the options that show more."""
    for alias, name in document.aliases.items():
        say(screen, f"{value_text.shown_name(alias)} is tied to {value_text.shown_name(name)}")
    if document.diverged:
        names = printable(some(list(document.diverged)))
        say(screen, f"copies differed between ranks at the save, and one copy was stored: {names}")
    if document.values:
        screen.print()
        screen.print(_value_table(document.values))
    elif document.values is None and checkpoint.manifest.body.values:
        more = "" if by_name else "; --names GLOB lists tensors one by one"
        say(screen, f"\n--values lists the values{more}")


def _value_table(values: list[ShownValue]) -> Listing:
    """A table of values. Many equal values of one container, such as the group of each parameter, are one row."""
    made = Listing("name", "type", "value", spare=("type",))
    for (parent, kind, text), group in groupby(values, key=lambda value: (_parent(value.name), value.type, value.text)):
        names = [value.name for value in group]
        if len(names) > _MAX_ALIKE:
            names = [f"{parent}* ({len(names):,} alike)"]
        for name in names:
            made.add_row(value_text.shown_name(name), kind, value_text.shortened(text))
    return made


def _parent(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _no_match(checkpoint: Checkpoint, names: str) -> NotFoundError:
    close = near(names, [*checkpoint.manifest.body.names, *checkpoint.manifest.body.aliases])
    return NotFoundError(
        f"no name in {checkpoint.folder} matches {names!r}.",
        code="not_found.tensor",
        action=f"Did you mean {some_quoted(close)}?"
        if close
        else "A pattern matches whole names: try '*part of a name*'.",
        path=checkpoint.folder,
    )
