"""The story: a reference job; a job that loses a rank in the middle of a save; two jobs that continue from the
checkpoint; and a job whose ranks are all killed, and which continues from memory.

All that is shown was seen in this run. A promise that was not kept ends it with status 1.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

import holdfast
from demo.background import kill_all_and_restore
from demo.chapters import inspect, train
from demo.kill import Killed, kill_in_save
from demo.launch import DemoError, Training, running
from demo.promises import Promise, close_losses, read_once, same_losses, same_state
from demo.records import read_restored, read_states
from demo.show import CONSOLE, Curves, chapter, draw, say, table_of

_OUT = Path("demo-out")
_NUM_SAVES = 6
#: The job is killed in this save of its six, or in a later one when that was too quick.
_KILLED_SAVE = 4
_KILLED_RANK = 1
#: Saves in the background for each one of the others: they hardly hold training up.
_NUM_IN_BACKGROUND = 5
#: How long the other rank waits for the killed one.
_PATIENCE_S = 10.0


def main() -> None:
    steps = _parse_steps()
    # As Ctrl-C does: on its way out, what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        promises = _tell(_OUT.resolve(), steps)
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
    except (DemoError, holdfast.HoldfastError) as error:
        sys.exit(f"demo: {error}")
    CONSOLE.print(table_of(promises))
    broken = [promise.text for promise in promises if not promise.kept]
    if broken:
        sys.exit(f"demo: {len(broken)} of {len(promises)} promises were broken. The first: {broken[0]}")
    say(f"All {len(promises)} promises were kept. The picture: {_OUT / 'losses.png'}")


def _tell(out: Path, steps: int) -> list[Promise]:
    if out.exists():
        shutil.rmtree(out)
    every = steps // _NUM_SAVES
    run, copy = out / "run", out / "run-copy"
    reference = Training(out / "reference", world_size=2, steps=steps)
    # Two nodes, so that the survivor's torchrun does not end it: it has to find out itself.
    job = Training(out / "job", 2, steps, save_to=run, save_every=every, nodes=2, timeout_s=_PATIENCE_S)
    resumed = [
        Training(out / "resumed-2", 2, steps, save_to=run, save_every=every),
        Training(out / "resumed-4", 4, steps, save_to=copy, save_every=every),
    ]

    train("Reference: FSDP2 on 2 ranks, never interrupted", reference)
    killed, promises = _kill(job)
    head = holdfast.open(run).step
    # A run at rest can be copied with any tool.
    shutil.copytree(run, copy)
    for training in resumed:
        train(f"Resumed from the head on {training.world_size} ranks", training, done=head + 1)

    promises += _judge(reference, job, resumed, killed=killed.step, head=head)
    in_background = Training(
        out / "background", 2, steps, save_to=out / "run-background", save_every=max(1, every // _NUM_IN_BACKGROUND)
    )
    promises += kill_all_and_restore(reference, resumed[0], in_background, step=every, num_more=every)
    promises += [inspect(Path(str(training.save_to))) for training in (*resumed, in_background)]
    losses = {training.world_size: training.losses() for training in resumed}
    draw(Curves(reference.losses(), job.losses(), losses, killed=killed.step, head=head), out / "losses.png")
    return promises


def _kill(job: Training) -> tuple[Killed, list[Promise]]:
    """Run the job until a rank is killed in a save; what is left of it."""
    title = f"The job: FSDP2 on 2 ranks, a save every {job.save_every} steps, rank {_KILLED_RANK} killed in one"
    with chapter(title, steps=job.steps) as on_step, running(job, on_step) as processes:
        killed = kill_in_save(processes, rank=_KILLED_RANK, step=_KILLED_SAVE * job.save_every - 1)
        statuses = processes.wait()
    status = job.exit_status_of_rank(killed.rank, killed.pid)
    survivor = 1 - killed.rank
    error = job.error_of_rank(survivor)
    say(f"  rank {killed.rank} was writing {killed.file.name} of step {killed.step}: killed, exit status {status}")
    say(f"  rank {survivor}: {error}")
    promises = [
        Promise(
            "A rank is killed in the middle of a save",
            kept=status == -9,
            seen=f"rank {killed.rank} was writing its file of step {killed.step}; its exit status is {status}",
        ),
        Promise(
            "The other rank ends, and says why",
            kept="DeadlineError" in error and all(statuses),
            seen=error.partition("] ")[2] or "nothing",
        ),
    ]
    return killed, [*promises, _head_is_whole(job, killed)]


def _head_is_whole(job: Training, killed: Killed) -> Promise:
    head = holdfast.open(str(job.save_to)).step
    num_files = sum(1 for _ in killed.file.parent.iterdir())
    visible = _is_visible(f"{job.save_to}@step={killed.step}")
    return Promise(
        "Nothing half-written is visible; the previous checkpoint is the head",
        kept=head == killed.step - job.save_every and not visible,
        seen=f"the head is step {head}; of step {killed.step} {num_files} files lie there, "
        f"and readers {'find it' if visible else 'find nothing'}",
    )


def _is_visible(path: str) -> bool:
    try:
        holdfast.open(path)
        return True
    except holdfast.NotFoundError:
        return False


def _judge(reference: Training, job: Training, resumed: list[Training], *, killed: int, head: int) -> list[Promise]:
    expected = reference.losses()
    remaining = range(head + 1, reference.steps)
    saved = read_states(job.folder, "saved", head, world_size=job.world_size)
    promises = [same_losses("Saving does not touch the training", expected, job.losses(), range(killed + 1))]
    for training in resumed:
        ranks = f"{training.world_size} ranks"
        loaded = read_states(training.folder, "loaded", head, world_size=training.world_size)
        promises.append(same_state(f"The state loaded on {ranks} is the one that was saved on 2", saved, loaded))
        promises.append(
            read_once(
                f"Loaded on {ranks}, every byte is read once",
                [rank.nbytes for rank in read_restored(training.folder, world_size=training.world_size)],
                _stored_nbytes(training, head),
            )
        )
        text = f"On {ranks} the training goes on as if nothing had been"
        judge = same_losses if training.world_size == reference.world_size else close_losses
        promises.append(judge(text, expected, training.losses(), remaining))
    return promises


def _stored_nbytes(training: Training, step: int) -> int:
    files = Path(str(training.save_to)).glob(f"checkpoints/step-{step:010d}-*/*.safetensors")
    return sum(file.stat().st_size for file in files)


def _parse_steps() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Kill a training, resume it, compare.")
    parser.add_argument("--steps", type=int, default=60, help="steps of the training, a multiple of 6 (default: 60)")
    steps: int = parser.parse_args().steps
    if steps < _NUM_SAVES or steps % _NUM_SAVES:
        parser.error(f"--steps is a multiple of {_NUM_SAVES}, not {steps}")
    return steps


if __name__ == "__main__":
    main()
