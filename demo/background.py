"""The chapter of saves that training does not wait for: all trainers are killed in the middle of one, and the job
continues from the memory of the node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from demo.chapters import train
from demo.kill import AllKilled, kill_all_in_copy
from demo.launch import Training, running
from demo.memory import node_memory
from demo.promises import Promise, newest_from_memory, same_losses, same_state
from demo.records import Restored, read_restored, read_saves, read_states
from demo.show import chapter, say


def kill_all_and_restore(
    reference: Training, plain: Training, job: Training, *, step: int, num_more: int
) -> list[Promise]:
    """Run `job` until all its ranks are killed in the save of `step` or a later one; then a job like it, for `num_more`
    steps after what it restores. Memory is given back at the end. `plain` has saved to storage, to compare times."""
    with node_memory() as node_dir:
        job = replace(job, node_dir=node_dir)
        killed = _kill(job, step)
        done = killed.whole + 1
        following = replace(job, folder=Path(f"{job.folder}-restored"), until=min(job.steps, done + num_more))
        train("A new job goes on from the memory of the node", following, done=done)
    _tell_times(plain, job, following)
    return _judge(reference, job, following, killed)


def _kill(job: Training, step: int) -> AllKilled:
    title = f"Saves in the background: 2 ranks, one every {job.save_every} steps, all ranks killed in one"
    with chapter(title, steps=job.steps) as on_step, running(job, on_step) as processes:
        killed = kill_all_in_copy(processes, step=step)
        processes.wait()
    statuses = [str(job.exit_status_of_rank(rank, pid)) for rank, pid in enumerate(killed.pids)]
    say(
        f"  step {killed.copied} was being copied, step {killed.whole} was whole in memory, storage was held up at "
        f"step {killed.head}: killed, exit statuses {' and '.join(statuses)}"
    )
    return killed


def _tell_times(plain: Training, *in_memory: Training) -> None:
    blocked_s = [save.blocked_s for training in in_memory for save in read_saves(training.folder)]
    plain_s = [save.blocked_s for save in read_saves(plain.folder)]
    say(
        f"  the median of {len(blocked_s)} saves held training up for {median(blocked_s) * 1e3:.0f} ms, that of "
        f"{len(plain_s)} into storage for {median(plain_s) * 1e3:.0f} ms"
    )
    restored, plainly = (
        read_restored(training.folder, world_size=training.world_size) for training in (in_memory[-1], plain)
    )
    say(f"  restoring took {_slowest_ms(restored):.0f} ms from memory, {_slowest_ms(plainly):.0f} ms from storage")
    nbytes = sum(rank.nbytes for rank in restored)
    say(
        f"  (Do not compare these two: the state has only {nbytes / 1e6:.0f} MB, so the ranks spend most of the time "
        "agreeing on what to load, and the system still has the files in its cache. docs/benchmarks.md compares the "
        "two for gigabytes that come from the disk.)"
    )


def _slowest_ms(restored: Sequence[Restored]) -> float:
    return max(rank.seconds for rank in restored) * 1e3


def _judge(reference: Training, job: Training, following: Training, killed: AllKilled) -> list[Promise]:
    restored = read_restored(following.folder, world_size=following.world_size)
    saved = read_states(job.folder, "saved", killed.whole, world_size=job.world_size)
    loaded = read_states(following.folder, "loaded", restored[0].step, world_size=following.world_size)
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
            job.losses() | following.losses(),
            range(following.end),
        ),
    ]
