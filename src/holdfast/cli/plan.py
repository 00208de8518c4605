"""``holdfast plan``: the dry run of a load on another world."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.cli.amounts import checked_bandwidth
from holdfast.cli.option_files import option_text, rules_in
from holdfast.cli.screen import Listing, console, print_json, say
from holdfast.errors import ConfigurationError, printable
from holdfast.format.patterns import Globs
from holdfast.mapping.apply import mapped
from holdfast.mapping.draft import CheckpointTable
from holdfast.mapping.parts import stored_tensors
from holdfast.plan import dry_run, layout_rules
from holdfast.plan.dry_run import CastTensor, Matching, Traffic
from holdfast.plan.exchange import Bandwidths, Seconds
from holdfast.plan.layout_rules import Layout
from holdfast.reports import size
from holdfast.run.history import resolve
from holdfast.run.paths import parse, some
from holdfast.wording import count, duration

#: Ranks per node, unless the user gives the number of nodes.
_RANKS_PER_NODE = 8
#: The bandwidth that stands for no network.
_NO_NETWORK = sys.float_info.min
_REFUSED = "--cast allows only casts that keep the kind of number"
_BAD = "bold red"


class PlannedFile(msgspec.Struct, frozen=True):
    """The bytes and requests that all nodes together read from a data file."""

    name: str
    nbytes: int
    num_requests: int


class ExpectedSeconds(msgspec.Struct, frozen=True):
    """The least time of reading, in two ways.

    `apart_s`: each node reads for itself. `once_s`: each byte is read once and sent to other nodes; null where no
    network is given. `once` says whether the load would choose the second way.
    """

    apart_s: float
    once_s: float | None
    once: bool

    @staticmethod
    def of(seconds: Seconds) -> ExpectedSeconds:
        """`seconds` in the form of the document, which has null instead of infinity."""
        return ExpectedSeconds(
            seconds.apart, seconds.once if math.isfinite(seconds.once) else None, seconds.favour_exchange
        )


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document that ``--json`` prints. Bytes are those in storage.

    A load would refuse the tensors in `unexpected` and `refused`. `needed_nbytes` has the bytes of each rank,
    `read_nbytes` those of each node where it reads for itself. `read_once_nbytes` are the bytes that the job reads
    where each byte is read once. `files` are the reads in the way that the load would choose; ``referenced_nbytes`` are
    those in files that earlier checkpoints have.
    """

    path: str
    place: str
    step: int
    mesh: dict[str, int]
    world_size: int
    num_nodes: int
    num_tensors: int
    unexpected: tuple[str, ...]
    cast: tuple[CastTensor, ...]
    refused: tuple[CastTensor, ...]
    partly_kept: tuple[str, ...]
    needed_nbytes: list[int]
    read_nbytes: list[int]
    read_once_nbytes: int
    files: list[PlannedFile]
    referenced_nbytes: int
    expected: ExpectedSeconds | None


def plan(
    path: str,
    *,
    on: int,
    layout: str,
    mapping: str,
    select: Sequence[str],
    cast: Sequence[str],
    nodes: int,
    bandwidths: tuple[str, str, str],
    as_json: bool,
) -> bool:
    """Print the dry run of a load of the checkpoint at `path` on `on` ranks.

    `layout` and `mapping` are paths of files; `bandwidths` are those of a node's storage, of all storage, and of a
    node's network. Returns True where names and dtypes would let the load succeed.
    """
    speeds = _bandwidths(*bandwidths)
    num_nodes = _num_nodes(on, nodes)
    laid_out = _layout(layout, on)
    globs = Globs(select) if select else None, Globs(cast) if cast else False
    checkpoint = Checkpoint(resolve(parse(path)).sealed)
    made = _table(checkpoint, mapping)
    matching = dry_run.match(laid_out, made, select=globs[0], cast=globs[1])
    node_of = dry_run.even_nodes(on, num_nodes)
    store = checkpoint.catalogue.capabilities(checkpoint.manifest.file_names)
    moved = dry_run.traffic(
        checkpoint.files,
        made,
        matching.held,
        laid_out.mesh_shape,
        node_of,
        request_nbytes=store.request_nbytes,
    )
    expected = None if speeds is None else ExpectedSeconds.of(dry_run.seconds(moved.reading, speeds))
    document = _document(checkpoint, laid_out, matching, moved, expected)
    if as_json:
        print_json(document)
    else:
        _show(console(), checkpoint, document, stated=bool(layout))
    return matching.loads


def _layout(path: str, on: int) -> Layout:
    if not path:
        return layout_rules.fsdp(on)
    layout = layout_rules.from_toml(option_text(path, "layout", code="config.layout"), path=path)
    if layout.world_size != on:
        axes = " x ".join(f"{name} {extent}" for name, extent in layout.mesh.items())
        raise ConfigurationError(
            f"the mesh of {path}, {axes}, has {count(layout.world_size, 'rank')}, but --on is {on}.",
            code="config.layout",
            action=f"Correct the mesh, or pass --on {layout.world_size}.",
            path=path,
        )
    return layout


def _table(checkpoint: Checkpoint, mapping: str) -> CheckpointTable:
    """The names, tensors and values of the checkpoint after the mapping."""
    found = rules_in(mapping)
    stored = stored_tensors(checkpoint.manifest)
    return mapped(found, stored, checkpoint.manifest.body.aliases, checkpoint.nodes)


def _num_nodes(on: int, nodes: int) -> int:
    if nodes > on:
        raise ConfigurationError(
            f"{count(on, 'rank')} cannot run on {count(nodes, 'node')}.",
            code="config.nodes",
            action="Pass no more --nodes than ranks (--on).",
        )
    return nodes or math.ceil(on / _RANKS_PER_NODE)


def _bandwidths(storage: str, all_storage: str, network: str) -> Bandwidths | None:
    """The bandwidths that the user gave; None without that of a node's storage.

    Without `all_storage` there is no common limit; without `network` there is no network.
    """
    if not storage:
        if all_storage or network:
            raise ConfigurationError(
                "the time of a load cannot be estimated without the rate at which a node reads from storage.",
                code="config.bandwidth",
                action="Add --storage, such as --storage 10GB/s.",
            )
        return None
    all_nodes = checked_bandwidth(all_storage) if all_storage else math.inf
    return Bandwidths(checked_bandwidth(storage), all_nodes, checked_bandwidth(network) if network else _NO_NETWORK)


def _document(
    checkpoint: Checkpoint, layout: Layout, matching: Matching, moved: Traffic, expected: ExpectedSeconds | None
) -> PlanDocument:
    reading = moved.reading
    per_file = reading.once if expected is not None and expected.once else reading.apart
    read, names = np.flatnonzero(per_file.nbytes).tolist(), checkpoint.manifest.file_names
    return PlanDocument(
        path=checkpoint.folder,
        place=str(checkpoint.manifest.place),
        step=checkpoint.manifest.body.step,
        mesh=layout.mesh,
        world_size=len(moved.needed),
        num_nodes=len(reading.nodes),
        num_tensors=len(matching.held),
        unexpected=matching.unexpected,
        cast=matching.cast,
        refused=matching.refused,
        partly_kept=matching.partly_kept,
        needed_nbytes=moved.needed.tolist(),
        read_nbytes=reading.nodes.tolist(),
        read_once_nbytes=int(reading.once.nbytes.sum()),
        files=[PlannedFile(names[n], int(per_file.nbytes[n]), int(per_file.num_requests[n])) for n in read],
        referenced_nbytes=sum(int(per_file.nbytes[n]) for n in read if _lies_elsewhere(checkpoint, n)),
        expected=expected,
    )


def _lies_elsewhere(checkpoint: Checkpoint, number: int) -> bool:
    """Whether an earlier checkpoint has the data file. After ``compact``, its own folder does."""
    file = checkpoint.seal.files[number]
    return file.is_referenced and checkpoint.catalogue.stored(file.name).key != checkpoint.sealed.key(file.name)


def _show(screen: Console, checkpoint: Checkpoint, document: PlanDocument, *, stated: bool) -> None:
    body = checkpoint.manifest.body
    say(screen, Text(printable(document.path), "bold"))
    stored = (
        f"{count(len(body.names), 'tensor')} in {count(body.num_files, 'file')} by {count(body.world_size, 'rank')}"
    )
    say(screen, f"step {document.step} at {document.place}: {stored}")
    mesh = " x ".join(f"{printable(name)} {extent}" for name, extent in document.mesh.items())
    how = mesh if stated else "every tensor divided along axis 0 over all ranks (--layout says otherwise)"
    where = f"{count(document.world_size, 'rank')} on {count(document.num_nodes, 'node')}"
    say(screen, f"loaded by {where}: {how}\n")
    screen.print(_figures(document))
    screen.print()
    for line in _reading(document):
        say(screen, line)
    for finding in _findings(document):
        say(screen, finding)


def _figures(document: PlanDocument) -> Listing:
    """A table of the least, median and largest bytes of ranks, nodes and files, and requests of files."""
    made = Listing("each", "least", "median", "most", right=("least", "median", "most"), spare=("median",))
    files = [file.name.partition(".")[0] for file in document.files]
    rows = (
        ("rank needs", document.needed_nbytes, [f"rank {n}" for n in range(document.world_size)], size),
        ("node reads", document.read_nbytes, [f"node {n}" for n in range(document.num_nodes)], size),
        ("file is read", [file.nbytes for file in document.files], files, size),
        ("file gets requests", [file.num_requests for file in document.files], files, "{:,}".format),
    )
    for what, numbers, names, shown in rows:
        if numbers:
            ends = (f"{shown(numbers[at])} ({names[at]})" for at in (int(np.argmin(numbers)), int(np.argmax(numbers))))
            least, most = ends
            made.add_row(what, least, shown(int(np.median(numbers))), most)
    return made


def _reading(document: PlanDocument) -> list[str]:
    """Lines about the bytes that the job reads, and about the time that this takes."""
    needed, apart, once = map(size, (sum(document.needed_nbytes), sum(document.read_nbytes), document.read_once_nbytes))
    lines = [
        f"{count(document.num_tensors, 'tensor')}; all ranks together need {needed}",
        f"read from storage: {apart} if each node reads for itself, {once} if nodes read for each other",
    ]
    if document.referenced_nbytes:
        lines.append(f"of this, {size(document.referenced_nbytes)} lie in files of earlier checkpoints")
    expected = document.expected
    if expected is not None and expected.once_s is not None:
        apart_s, once_s = duration(expected.apart_s), duration(expected.once_s)
        if expected.once:
            faster = f"{once_s}, as nodes read for each other ({apart_s} if each node read for itself)"
        else:
            faster = f"{apart_s}, as each node reads for itself ({once_s} if nodes read for each other)"
        lines.append(f"the load takes at least {faster}")
    elif expected is not None:
        taken = duration(expected.apart_s)
        lines.append(f"the load takes at least {taken}; --network adds the time if nodes read for each other")
    return lines


def _findings(document: PlanDocument) -> list[Text]:
    """Lines about the tensors that a load would change on the way, and those that it would refuse."""
    kept, nobody = "the checkpoint has only a part of each", "no rule of the layout matches, and it has no default"
    groups = (
        ("cast", "", "", [f"{one.name} ({one.stored} to {one.held})" for one in document.cast]),
        ("partly kept", kept, "", list(document.partly_kept)),
        ("of another dtype", _REFUSED, _BAD, [f"{one.name} ({one.stored} to {one.held})" for one in document.refused]),
        ("held by no rank", nobody, _BAD, list(document.unexpected)),
    )
    lines = []
    for what, why, style, names in groups:
        if names:
            head = (f"{count(len(names), 'tensor')} {what}", style), f" ({why}): " if why else ": "
            lines.append(Text.assemble(*head, printable(some(names))))
    return lines
