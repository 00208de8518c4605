"""A job whose memory is protected by copies or parity, which stands still before a save; and the job that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from holdfast import Copies, Parity
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot
from tests.faults.engine_job import PauseAt, Restored, Spec, Truth
from tests.faults.engine_points import Deed
from tests.faults.node_job import NODE_NUMEL, Clocks, NodeJob, node_job
from tests.support.nodes import MEMORY, Node

#: Step of the save that is interrupted: it fills slots, and copies or parity, again.
STEP: Final = 3
#: Of so many bytes, one gets a wrong bit.
_FLIPPED_NBYTES: Final = 4096


def spec_of(
    run: str,
    log: Path,
    *,
    durable_every: int = 100,
    last: PauseAt = "staged",
    deeds: tuple[Deed, ...] = (),
    protect: Copies | Parity = Copies(1),  # noqa: B008 - it is frozen
    numel: int = NODE_NUMEL,
) -> Spec:
    """A job that saves step 0 to storage, and then to memory alone, but for each `durable_every`-th step. It stands
    still when the `last` one, `STEP`, has come so far."""
    return Spec(
        run,
        (MEMORY,),
        log,
        numel=numel,
        stop=STEP + 2,
        durable_every=durable_every,
        protect=protect,
        pauses={**dict.fromkeys((1, 2, STEP), "protected"), STEP + 1: last},
        deeds=deeds,
        timeout_s=20.0,
    )


def until_last_is_protected(job: NodeJob) -> None:
    """Return when step `STEP`, whose save was let come, is protected on all ranks."""
    job.until_told("paused", step=STEP + 1)
    assert job.newest("protected") == STEP


def until_protected(job: NodeJob) -> None:
    """Return when all steps before `STEP` are protected, and the job stands still."""
    for step in (1, 2):
        job.log.let(f"pass-{step}")
    job.until_told("paused", step=STEP)
    assert job.newest("protected") == STEP - 1


@contextmanager
def protected_job(
    spec: Spec, nodes: Sequence[Node], launcher: Node, *, clocks: Clocks | None = None
) -> Iterator[NodeJob]:
    """A job with keepers on these nodes, which stands still before `STEP`, when all earlier steps are protected."""
    with node_job(spec, nodes, launcher, keepers=True, clocks=clocks) as job:
        until_protected(job)
        yield job


def goes_on(
    spec: Spec,
    nodes: Sequence[Node],
    launcher: Node,
    truth: Truth,
    *,
    clocks: Clocks | None = None,
    deeds: tuple[Deed, ...] = (),
    meanwhile: Callable[[NodeJob], None] = lambda _: None,
) -> Restored:
    """Return what another job on these nodes restores, bit for bit. It then goes on, and protects and saves its own
    steps. Its trainers do `deeds`, and the test does something `meanwhile` from its start on."""
    stop = STEP + 4
    after = replace(spec, log=spec.log.with_name("next"), deeds=deeds, pauses={stop - 1: "protected"}, stop=stop)
    with node_job(replace(after, durable_every=1), nodes, launcher, clocks=clocks, armed=["trainer"]) as job:
        meanwhile(job)
        restored = job.restored(truth)
        job.until_told("paused", step=stop - 1)
        job.log.let(f"pass-{stop - 1}")
        job.ended_well()
    assert truth.loaded(spec.run) == stop - 1
    return restored


def flip(spec: Spec, node: Node, names: Callable[[NodeFolder], Sequence[str]], *, step: int) -> int:
    """Flip bits of a step all over each slot of a node that `names` gives. Returns the number of such slots."""
    number = 0
    with spec.folder(node.memory) as folder:
        for name in names(folder):
            with Slot(folder, name) as slot:
                contents = slot.record.contents
                if contents is not None and contents.step == step:
                    (part, *_) = contents.files
                    slot.data[part.start + part.data_start : part.stop : _FLIPPED_NBYTES] ^= 1
                    number += 1
    return number
