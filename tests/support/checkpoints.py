"""Small checkpoints of two data files: written step by step on any store, as the ranks of a save do, and read back."""

from __future__ import annotations

import secrets
import time
from functools import cache

import numpy as np

from holdfast.checkpoint.stored_checkpoint import Checkpoint, pack_values
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.format import container, records
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.records import Commit, Place, Why
from holdfast.format.values import Plain
from holdfast.geometry import Box
from holdfast.io.digest import digest_blocks
from holdfast.plan.layout import Pieces, TensorLayout
from holdfast.plan.save import CheckpointIdentity, RankValues, SavePlan, encode_plan, plan_save
from holdfast.run.complete import complete
from holdfast.run.history import Run
from holdfast.view import View
from tests.support.worlds import World, data_sections

NUM_FILES = 2
SHAPE = (4, 2)
VALUES_NBYTES = 64


@cache
def plan() -> SavePlan:
    """One tensor in two halves, and a value in the first file."""
    halves = [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]
    world = World([[TensorLayout("w", "int64", SHAPE, Pieces.boxes(half))] for half in halves], {})
    messages, bodies = world.sent()
    return plan_save(messages, bodies)


def publish_manifest(run: Run, place: Place, step: int, *, created: float | None = None) -> str:
    """Begin the checkpoint of `step` at `place`; returns its folder."""
    identity = CheckpointIdentity(secrets.token_hex(8), run.run_id, place, step, created or time.time(), {"loss": 0.5})
    data = encode_plan(plan(), identity=identity, values=[RankValues(0, VALUES_NBYTES, ("step",))])
    folder = records.folder_name(step, identity.checkpoint_id)
    run.storage.create(records.checkpoint_key(folder, fmt.NAME), data)
    return folder


def data_file(run: Run, folder: str, index: int) -> bytes:
    """The content of a data file of the checkpoint in `folder`: every element is the step."""
    manifest = fmt.decode(run.storage.read(records.checkpoint_key(folder, fmt.NAME)), path=folder)
    files, step = Files(manifest), manifest.body.step
    layout = files.layout(index)
    full = np.full(SHAPE, step, np.int64)
    section = data_sections(World([], {"w": full.view(np.uint8).reshape(*SHAPE, 8)}), files)[index]
    if layout.values is not None:
        section[layout.values_offset :] = pack_values({"step": Plain(step)}, capacity=layout.values.capacity)
    table = digest_blocks(np.frombuffer(section, np.uint8))
    return container.header(manifest, layout, table) + bytes(section)


def write_data(run: Run, folder: str, *indexes: int) -> None:
    """Publish data files of the checkpoint in `folder` (none given: all)."""
    for index in indexes or range(NUM_FILES):
        run.storage.create(records.checkpoint_key(folder, fmt.file_name(index)), data_file(run, folder, index))


def write(run: Run, place: Place, step: int, *, created: float | None = None) -> str:
    """All of a checkpoint but seal and commit; returns its folder."""
    folder = publish_manifest(run, place, step, created=created)
    write_data(run, folder)
    return folder


def save(run: Run, place: Place, step: int) -> Commit:
    """A committed checkpoint."""
    return complete(run, write(run, place, step), deep=False)


def begin(run: Run, *, opened_from: Place | None = None) -> int:
    """Open the next epoch."""
    why: Why = "start" if opened_from is None else "resume"
    return run.open_epoch(after=run.newest_epoch() or 0, opened_from=opened_from, why=why, world_size=2).epoch


def check(run: Run, commit: Commit) -> None:
    """The checkpoint is all there, every byte of it is right, and it holds what was saved at its step."""
    checkpoint = Checkpoint(run.locate(commit))
    assert verify_checkpoint(checkpoint, deep=True) == []
    view = View(checkpoint, verify=True)
    assert view["w"].numpy().tolist() == np.full(SHAPE, commit.step).tolist()
    assert view.value("step") == commit.step


def names(run: Run, folder: str) -> list[str]:
    """Names of the files in a checkpoint's folder."""
    return run.storage.list(f"{records.CHECKPOINTS}/{folder}")
