"""``holdfast import``: bring a checkpoint of another system into a run."""

from __future__ import annotations

import msgspec

from holdfast.cli.screen import console, print_json, say
from holdfast.errors import ConfigurationError, printable
from holdfast.interop.formats import find_state
from holdfast.interop.importing import import_state
from holdfast.progress import progress
from holdfast.reports import size
from holdfast.run.by_path import parse_run
from holdfast.run.paths import parse
from holdfast.store.urls import open_store
from holdfast.wording import count


class ImportDocument(msgspec.Struct, frozen=True):
    """The document that ``import --json`` prints. `kind` says what was imported."""

    run: str
    place: str
    step: int
    kind: str
    num_tensors: int
    num_values: int
    nbytes: int


def import_checkpoint(source: str, run: str, *, step: int, as_json: bool) -> None:
    """Write the foreign checkpoint at `source` into a new run, as the checkpoint of `step`."""
    found = find_state(parse(source))
    if found.located is not None:
        raise ConfigurationError(
            f"'{source}' is a checkpoint of holdfast already.",
            code="config.path",
            action="Copy its run, or load it into a state and save that.",
            path=source,
        )
    storage = open_store(parse_run(run).location)
    with progress(f"importing {source}", shown=not as_json) as meter:
        commit = import_state(found.state, storage, step, meter=meter)
    document = ImportDocument(
        storage.location.url,
        str(commit.place),
        commit.step,
        found.state.record.kind,
        len(found.state.manifest.body.names),
        len(found.state.nodes),
        commit.nbytes,
    )
    if as_json:
        print_json(document)
        return
    say(console(), f"{printable(document.run)}: step {step} at {document.place} is what {printable(source)} holds")
    what = f"{count(document.num_tensors, 'tensor')}, {size(document.nbytes)}"
    say(console(), f"  {document.kind}: {what}; it has no digests, so its bytes were not verified")
