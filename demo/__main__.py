"""``python -m demo``: a small training that is killed in the middle of a save and goes on.

The story, in the order in which it is told: a reference job; a job that loses a rank in the middle of a save; two jobs
that continue from the checkpoint; a job whose ranks are all killed, and which continues from memory; and a job that
saves by policies, and is preempted. All that is shown was seen in this run. A promise that was not kept ends it with
status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from demo.policies import live_by_policies
from demo.processes import Training, head_of, kill_all_in_copy, kill_in_save, node_memory
from demo.promises import Promise, close_losses, newest_from_memory, read_once, same_losses, same_state
from demo.runs import Runs, data_nbytes, runs_in, store_of
from demo.show import draw, say
from demo.telling import Told, tell_in
from demo.witness import notes

_OUT = Path("demo-out")
_NUM_SAVES = 6
#: The job is killed in this save of its six, or in a later one when that was too quick.
_KILLED_SAVE, _KILLED_RANK = 4, 1
#: Saves in the background for each one of the others: they hardly hold training up.
_NUM_IN_BACKGROUND = 5
#: The time that the other rank waits for the killed one.
_PATIENCE_S = 10.0


def tell(out: Path, runs: Runs, steps: int) -> list[Promise]:
    """Tell the story of trainings of so many steps, with their `runs`, and with all other files in `out`."""
    every, run, copy = steps // _NUM_SAVES, runs.path("run"), runs.path("run-copy")

    # A job that nothing ever happens to, and which saves nothing. All others are compared with it.
    reference = Training(out / "reference", 2, steps)
    reference.finish("Reference: FSDP2 on 2 ranks, never interrupted")
    expected = reference.losses()

    # The same job saves. A rank is killed in the middle of a save, and the other one has to find out itself: they are
    # on two nodes, so that the survivor's torchrun does not end it.
    job = Training(out / "job", 2, steps, save_to=run, save_every=every, nodes=2, timeout_s=_PATIENCE_S)
    with job.running(f"The job: FSDP2 on 2 ranks, a save every {every} steps, rank {_KILLED_RANK} killed in one"):
        killed = kill_in_save(job, rank=_KILLED_RANK, step=_KILLED_SAVE * every - 1)
        statuses = job.wait()
    status, error = job.exit_status_of_rank(_KILLED_RANK, killed.pid), job.error_of_rank(1 - _KILLED_RANK)
    step = killed.file.step
    say(f"  rank {_KILLED_RANK} was writing {killed.file.name} of step {step}: killed, exit status {status}")
    say(f"  rank {1 - _KILLED_RANK}: {error}")
    head, found = head_of(run), head_of(f"{run}@step={step}")
    num_files = len(store_of(run).list(killed.file.folder))
    seen = f"rank {_KILLED_RANK} was writing its file of step {step}; its exit status is {status}"
    promises = [
        Promise("A rank is killed in the middle of a save", kept=status == -9, seen=seen),
        Promise(
            "The other rank ends, and says why",
            kept="DeadlineError" in error and all(statuses),
            seen=error.partition("] ")[2] or "nothing",
        ),
        Promise(
            "Nothing half-written is visible; the previous checkpoint is the head",
            kept=head == step - every and found == -1,
            seen=f"the head is step {head}; of step {step} {num_files} files lie there, "
            f"and readers find {'nothing' if found == -1 else 'it'}",
        ),
        same_losses("Saving does not touch the training", expected, job.losses(), range(step + 1)),
    ]

    # Two jobs go on from there, on as many ranks and on others.
    runs.copy(run, copy)
    resumed = [
        Training(out / f"resumed-{world_size}", world_size, steps, save_to=save_to, save_every=every)
        for world_size, save_to in ((2, run), (4, copy))
    ]
    stored_nbytes = data_nbytes(run, head)
    for training in resumed:
        ranks, is_same = f"{training.world_size} ranks", training.world_size == reference.world_size
        training.finish(f"Resumed from the head on {ranks}", done=head + 1)
        saved, loaded = job.each("saved", step=head), training.each("loaded", step=head)
        judge = same_losses if is_same else close_losses
        going_on = f"On {ranks} the training goes on as if nothing had been"
        promises += [
            same_state(f"The state loaded on {ranks} is the one that was saved on 2", saved, loaded),
            read_once(f"Loaded on {ranks}, every byte is read once", training.each("restored"), stored_nbytes),
            judge(going_on, expected, training.losses(), range(head + 1, steps)),
        ]

    # A job saves in the background, and loses all its ranks.
    in_background = max(1, every // _NUM_IN_BACKGROUND)
    in_memory = runs.path("run-background")
    lost = Training(out / "background", 2, steps, save_to=in_memory, save_every=in_background)
    promises += go_on_from_memory(reference, resumed[0], lost, every=every)

    # The command line looks at all three runs.
    promises += [_inspect(path) for path in (run, copy, in_memory)]
    after = {training.world_size: training.losses() for training in resumed}
    promises += live_by_policies(out, runs)
    draw(expected, job.losses(), after, killed=step, head=head, path=out / "losses.png")
    return promises


def go_on_from_memory(reference: Training, plain: Training, lost: Training, *, every: int) -> list[Promise]:
    """A job saves in the background, into the memory of the node. All its ranks are killed in the middle of a copy, and
    a new job goes on from what lies in memory. `plain` has saved to storage, to compare times."""
    with node_memory() as lost.node_dir:
        title = f"Saves in the background: 2 ranks, one every {lost.save_every} steps, all ranks killed in one"
        with lost.running(title):
            killed = kill_all_in_copy(lost, step=every)
            lost.wait()
        ended = [str(lost.exit_status_of_rank(rank, pid)) for rank, pid in enumerate(killed.pids)]
        say(
            f"  step {killed.copied} was being copied, step {killed.whole} was whole in memory, storage was held up at "
            f"step {killed.head}: killed, exit statuses {' and '.join(ended)}"
        )
        done = killed.whole + 1
        until = min(lost.steps, done + every)
        following = replace(lost, folder=lost.folder.with_name("background-restored"), until=until, torchruns=[])
        following.finish("A new job goes on from the memory of the node", done=done)

    blocked_ms, plain_ms = (
        [1e3 * note["blocked_s"] for training in trainings for note in notes(training.folder, "save")]
        for trainings in ((lost, following), (plain,))
    )
    restored = following.each("restored")
    slowest, plain_slowest = (max(note["seconds"] for note in each) for each in (restored, plain.each("restored")))
    say(
        f"  the median of {len(blocked_ms)} saves held training up for {median(blocked_ms):.0f} ms, that of "
        f"{len(plain_ms)} into storage for {median(plain_ms):.0f} ms"
    )
    say(f"  restoring took {1e3 * slowest:.0f} ms from memory, {1e3 * plain_slowest:.0f} ms from storage")
    say(
        f"  (Do not compare these two: the state has only {sum(note['nbytes'] for note in restored) / 1e6:.0f} MB, so "
        "the ranks spend most of the time agreeing on what to load, and the system still has the files in its cache. "
        "docs/benchmarks.md compares the two for gigabytes that come from the disk.)"
    )
    saved, loaded = lost.each("saved", step=killed.whole), following.each("loaded", step=restored[0]["step"])
    all_losses = lost.losses() | following.losses()
    return [
        newest_from_memory(
            "All trainers are killed in the middle of a save: a new job goes on from node memory",
            restored,
            whole=killed.whole,
            head=killed.head,
        ),
        same_state("Every tensor restored from node memory is the one from before the kill", saved, loaded),
        same_losses(
            "Until the kill, and on from node memory, the training is as if nothing had been",
            reference.losses(),
            all_losses,
            range(until),
        ),
    ]


def _inspect(run: str) -> Promise:
    """Let the command line speak for itself."""
    statuses = []
    for command in (["ls"], ["verify", "--deep"]):
        say(f"\n$ holdfast {' '.join(command)} {run.removeprefix(f'{Path.cwd()}/')}")
        arguments = [sys.executable, "-m", "holdfast.cli", *command, run]
        statuses.append(subprocess.run(arguments, check=False).returncode)
    seen = f"holdfast ls and verify end with status {statuses[0]} and {statuses[1]}"
    return Promise(f"{run.rpartition('/')[2]}: listed and sound, byte by byte", not any(statuses), seen)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Kill a training, resume it, compare.")
    parser.add_argument("--steps", type=int, default=60, help="steps of the training, a multiple of 6 (default: 60)")
    parser.add_argument("--s3", action="store_true", help="let all runs lie on an S3 server, which the demo starts")
    options = parser.parse_args()
    steps: int = options.steps
    if steps < _NUM_SAVES or steps % _NUM_SAVES:
        parser.error(f"--steps is a multiple of {_NUM_SAVES}, not {steps}")
    out = _OUT.resolve()

    def story() -> Told:
        with runs_in(out, s3=options.s3) as runs:
            return Told(tell(out, runs, steps), f"The picture: {_OUT / 'losses.png'}")

    tell_in(out, story)


if __name__ == "__main__":
    main()
