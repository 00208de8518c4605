"""The proof that a script resumes: an undisturbed attempt, another one, and one that is killed again and again."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from holdfast.checkpoint.compare import Comparison, TensorDifference, ValueDifference, compare
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.format.names import is_rank_component
from holdfast.format.records import Commit
from holdfast.format.values import Plain
from holdfast.proving.attempts import attempt
from holdfast.proving.rehearsal import Rehearsal
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from holdfast.wording import count

#: Name of the run in an attempt's folder: that of the script's first `Checkpointer`.
_RUN: Final = "run-0"


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script with its arguments, and how a proof runs it: on `num_ranks` ranks, with a save after each `every`
    steps. `num_kills` attempts are killed; restarts have `other_ranks` ranks, if that is not None. `seed` decides when.
    """

    arguments: tuple[str, ...]
    num_ranks: int
    every: int
    num_kills: int
    seed: int
    other_ranks: int | None = None

    @property
    def command(self) -> str:
        """The command that proves this. Its options stand before the script: what stands behind is the script's."""
        then = () if self.other_ranks is None else ("--then", str(self.other_ranks))
        numbers = {"--nproc": self.num_ranks, "--kills": self.num_kills, "--every": self.every, "--seed": self.seed}
        options = [text for option, number in numbers.items() for text in (option, str(number))]
        return shlex.join(("holdfast", "prove", *options, *then, *self.arguments))


@dataclass(frozen=True)
class FirstDifference:
    """The first step after which two attempts differ, and how."""

    step: int
    comparison: Comparison


class LastSteps(NamedTuple):
    """The last steps that the undisturbed attempt and the one that was killed have saved."""

    undisturbed: int
    resumed: int


@dataclass(frozen=True)
class Proof:
    """The result: the number of compared steps, the steps after which the script was killed, and the first differences
    between two undisturbed attempts (`undisturbed`), and between an undisturbed and the killed one (`resumed`); None
    where there is none. `ends` are the last steps of these two, if they differ though undisturbed attempts agree."""

    num_steps: int
    kills: tuple[int, ...]
    undisturbed: FirstDifference | None
    resumed: FirstDifference | None
    ends: LastSteps | None = None

    @property
    def is_proved(self) -> bool:
        """Whether no difference was found."""
        return self.undisturbed is None and self.resumed is None and self.ends is None


def prove(script: Script, *, folder: Path, node_dir: Path, tell: Callable[[str], None], atol: float = 0.0) -> Proof:
    """Prove that `script` resumes. Everything that it saves goes to `folder`, and its memory to `node_dir`. Blocking.
    `tell` hears what is done next.

    Where restarts have another number of ranks, tensors and numbers may differ by `atol`, and what each rank saves for
    itself is not compared. Raises `ConfigurationError`, code ``config.script``, where the script fails by itself or
    saves too few steps.
    """
    with _memory(node_dir) as memory:
        attempts = _Attempts(script, folder, memory)
        tell("undisturbed")
        attempts.run("undisturbed")
        steps = list(attempts.saved("undisturbed"))
        if len(steps) <= script.num_kills:
            raise attempts.too_few("undisturbed", len(steps))
        tell("undisturbed, once more")
        attempts.run("again")
        kills = attempts.choose(steps[:-1])
        for number, step in enumerate(kills):
            tell(f"killed after step {step}" + (", resumed from the kill before" if number else ""))
            attempts.run("killed", dies_after=step, is_restart=number > 0)
        tell("resumed to the end")
        attempts.run("killed", is_restart=True)
        tell("comparing")
        is_resharded = script.other_ranks not in (None, script.num_ranks)
        return Proof(
            num_steps=len(steps),
            kills=tuple(kills),
            undisturbed=attempts.first_difference("undisturbed", "again", lambda _: False),
            resumed=attempts.first_difference(
                "undisturbed", "killed", partial(_is_close, atol=atol) if is_resharded else lambda _: False
            ),
            ends=attempts.differing_ends(),
        )


class _Attempts:
    """The attempts of a script. Attempts of one name continue each other."""

    def __init__(self, script: Script, folder: Path, memory: Path) -> None:
        self._script = script
        self._folder = folder
        self._memory = memory
        self._random = Random(script.seed)  # noqa: S311 - kills need no secret

    def choose(self, steps: Sequence[int]) -> list[int]:
        """The steps after which attempts are killed, in order."""
        return sorted(self._random.sample(steps, self._script.num_kills))

    def run(self, name: str, *, dies_after: int | None = None, is_restart: bool = False) -> None:
        """Run an attempt, which dies after a step if that is given."""
        script = self._script
        rehearsal = Rehearsal(
            str(self._folder / name), str(self._memory / name), script.every, dies_after, self._random.random()
        )
        Path(rehearsal.node_dir).mkdir(exist_ok=True)
        num_ranks = script.other_ranks if is_restart and script.other_ranks is not None else script.num_ranks
        attempt(script.arguments, rehearsal, num_ranks=num_ranks, log=self._log(name))

    def saved(self, name: str) -> dict[int, Commit]:
        """The checkpoints on the lineage of the attempts called `name`, by step, in order."""
        run = self._open(name)
        return {commit.step: commit for commit in reversed(list(run.lineage()))}

    def first_difference(self, one: str, other: str, is_close: Callable[[Comparison], bool]) -> FirstDifference | None:
        """The first step after which the attempts `one` and `other` saved something else."""
        theirs = self.saved(other)
        for step, commit in self.saved(one).items():
            if step not in theirs:
                continue
            comparison = compare(self._checkpoint(one, commit), self._checkpoint(other, theirs[step]))
            if not comparison.equal and not is_close(comparison):
                return FirstDifference(step, comparison)
        return None

    def differing_ends(self) -> LastSteps | None:
        """The last steps of the undisturbed attempt and of the killed one; None where they agree, or where undisturbed
        attempts do not: such a script saves when the clock says so."""
        last, again, killed = (max(self.saved(name)) for name in ("undisturbed", "again", "killed"))
        return LastSteps(last, killed) if last == again != killed else None

    def too_few(self, name: str, num_steps: int) -> ConfigurationError:
        """The error that the attempts called `name` saved `num_steps` steps alone."""
        script = self._script
        fewer = replace(script, num_kills=num_steps - 1)
        instead = f", or kill it less often: {fewer.command}" if fewer.num_kills > 0 else ""
        smaller = " (a smaller --every does)" if script.every > 1 else ""
        return ConfigurationError(
            f"'{script.arguments[0]}' saved {count(num_steps, 'step')}, too few for {count(script.num_kills, 'kill')}.",
            code="config.script",
            action=f"Have it save with a holdfast.Checkpointer after more steps{smaller}{instead}. Its output is in "
            f"'{self._log(name)}'.",
            path=script.arguments[0],
        )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _open(self, name: str) -> Run:
        try:
            return Run.open(open_store(Location(str(self._folder / name / _RUN))))
        except NotFoundError as error:
            raise self.too_few(name, 0) from error

    def _checkpoint(self, name: str, commit: Commit) -> Checkpoint:
        return Checkpoint(self._open(name).locate(commit))


@contextmanager
def _memory(node_dir: Path) -> Iterator[Path]:
    """A folder in memory for one proof. Its keepers end when it is gone."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-proof-", dir=node_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_close(comparison: Comparison, *, atol: float) -> bool:
    """Whether what differs is numbers that differ by `atol` at most, and what each rank saved for itself."""
    return (
        not comparison.only_a
        and not comparison.only_b
        and all(_is_close_tensor(each, atol) for each in comparison.tensors)
        and all(_is_of_rank(each.name) or _is_close_value(each, atol) for each in comparison.values)
    )


def _is_close_tensor(difference: TensorDifference, atol: float) -> bool:
    is_same_kind = difference.a == difference.b and difference.max_abs is not None and not difference.num_not_finite
    return is_same_kind and difference.max_abs is not None and difference.max_abs <= atol


def _is_close_value(difference: ValueDifference, atol: float) -> bool:
    match difference.a, difference.b:
        case Plain(value=float(one)), Plain(value=float(other)):
            return abs(one - other) <= atol
        case _:
            return False


def _is_of_rank(name: str) -> bool:
    return any(map(is_rank_component, name.split("/")))
