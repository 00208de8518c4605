"""``holdfast prove``: whether a user's script resumes."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.checkpoint.compare import Comparison
from holdfast.cli.screen import console, print_json, say
from holdfast.cli.value_text import shortened, shown_name, text_of
from holdfast.errors import ConfigurationError, printable
from holdfast.format.names import own_part
from holdfast.format.values import Node
from holdfast.proving.proof import FirstDifference, Proof, Script, prove
from holdfast.wording import count

_ADVICE: Final = (
    "Check that everything a step reads is in the state: model, optimizer, scheduler, data, and the random generators "
    "(holdfast.RandomState())."
)
_ADVICE_ON_GENERATORS: Final = (
    "Only random generators differ: the resumed job drew more numbers from them, or fewer. Usually that is a "
    "DataLoader, which draws a number each time that it is iterated. Give it a generator of its own, "
    "DataLoader(..., generator=torch.Generator()), or take batches from follow() of holdfast.data."
)
_ADVICE_ON_ENDS: Final = (
    "Check how the script counts the steps that are left: use checkpointer.steps(total), or range(report.next_step, "
    "total)."
)
#: The names of the values that a RandomState stores for a rank.
_OF_GENERATORS: Final = re.compile(r"/(?:python|numpy|torch|cuda|device)(?=/|\Z)")
#: Most names of each kind that are shown.
_MAX_NAMES = 5


class FirstDifferenceDocument(msgspec.Struct, frozen=True):
    """The first difference between two attempts: the step, and the sorted names that differ after it."""

    step: int
    names: list[str]


class LastStepsDocument(msgspec.Struct, frozen=True):
    """The last steps that the undisturbed attempt and the killed one have saved."""

    undisturbed: int
    resumed: int


class ProofDocument(msgspec.Struct, frozen=True):
    """The document that ``--json`` prints."""

    proved: bool
    num_steps: int
    kills: list[int]
    seed: int
    undisturbed: FirstDifferenceDocument | None
    resumed: FirstDifferenceDocument | None
    ends: LastStepsDocument | None


def show_proof(script: Script, *, folder: str, node_dir: str, atol: float, as_json: bool) -> bool:
    """Prove that `script` resumes, and print the result. Everything that it saves goes to `folder`, or to a temporary
    one if that is "". Returns whether it is proved."""
    _check(script, folder, atol)
    screen = console(stderr=as_json)

    def tell(what: str) -> None:
        say(screen, f"{script.arguments[0]}: {what} ...", "dim")

    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        proof = prove(script, folder=Path(folder).absolute(), node_dir=Path(node_dir), tell=tell, atol=atol)
    else:
        with _temporary_folder() as made:
            proof = prove(script, folder=made, node_dir=Path(node_dir), tell=tell, atol=atol)
    if as_json:
        print_json(_document(proof, script))
    else:
        _show(screen, proof, script, atol)
    return proof.is_proved


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder for one proof. If the script cannot be proved, its logs stay there, because the error names one."""
    made = Path(tempfile.mkdtemp(prefix="holdfast-proof-"))
    is_log_wanted = False
    try:
        yield made
    except ConfigurationError:
        is_log_wanted = True
        raise
    finally:
        for each in made.iterdir():
            if each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
        if not is_log_wanted or not any(made.iterdir()):
            shutil.rmtree(made, ignore_errors=True)


def _check(script: Script, folder: str, atol: float) -> None:
    """Raise `ConfigurationError` for options that make no sense."""
    if not Path(script.arguments[0]).is_file():
        raise ConfigurationError(
            f"there is no script '{script.arguments[0]}'.",
            code="config.script",
            action="Name the script, and behind it its arguments.",
            path=script.arguments[0],
        )
    if not 0 <= atol < math.inf:
        raise ConfigurationError(
            f"--atol {atol} is no difference of numbers.", code="config.script", action="Write it as 1e-6."
        )
    if folder and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir())):
        raise ConfigurationError(
            f"--dir '{folder}' is not an empty folder.",
            code="config.script",
            action="Name one that does not exist yet.",
            path=folder,
        )


def _document(proof: Proof, script: Script) -> ProofDocument:
    return ProofDocument(
        proved=proof.is_proved,
        num_steps=proof.num_steps,
        kills=list(proof.kills),
        seed=script.seed,
        undisturbed=_difference_document(proof.undisturbed),
        resumed=_difference_document(proof.resumed),
        ends=None if proof.ends is None else LastStepsDocument(*proof.ends),
    )


def _difference_document(difference: FirstDifference | None) -> FirstDifferenceDocument | None:
    return None if difference is None else FirstDifferenceDocument(difference.step, _names(difference.comparison))


def _names(comparison: Comparison) -> list[str]:
    tensors, values = (each.name for each in comparison.tensors), (each.name for each in comparison.values)
    return sorted({*comparison.only_a, *comparison.only_b, *tensors, *values})


def _only_generators(comparison: Comparison) -> bool:
    """Whether nothing differs but what a `RandomState` stores."""
    names = _names(comparison)
    own = [own_part(name) for name in names]
    return all(
        part is not None and _OF_GENERATORS.match(name, len(part)) for part, name in zip(own, names, strict=True)
    )


def _show(screen: Console, proof: Proof, script: Script, atol: float) -> None:
    kills = ", ".join(map(str, proof.kills))
    if proof.undisturbed is not None:
        say(screen, "Not proved: the script differs from itself, even when nothing disturbs it.", "bold red")
        _show_difference(screen, proof.undisturbed, "two undisturbed attempts", script)
        say(screen, "Set seeds, and use deterministic kernels and a fixed order of data, or nothing can be proved.")
    elif proof.resumed is not None:
        say(screen, "Not proved: the script that was killed goes on with another state.", "bold red")
        _show_difference(screen, proof.resumed, f"the undisturbed attempt and the one killed after {kills}", script)
        say(screen, _ADVICE_ON_GENERATORS if _only_generators(proof.resumed.comparison) else _ADVICE)
    elif proof.ends is not None:
        how = f"ends after step {proof.ends.resumed}, and the undisturbed one after step {proof.ends.undisturbed}"
        say(screen, f"Not proved: the script that was killed after {kills} {how}.", "bold red")
        say(screen, _ADVICE_ON_ENDS)
    else:
        how = "bit for bit the same state"
        if script.other_ranks not in (None, script.num_ranks):
            how = f"the same state (within {atol:g}, on {script.other_ranks} ranks instead of {script.num_ranks})"
        what = f"{count(proof.num_steps, 'saved step')}, killed after {kills}: {how} as without the kills"
        say(screen, Text.assemble(("Proved: ", "bold green"), what + "."))
    say(screen, "This repeats these kills:", "dim")
    screen.print(Text(f"  {printable(script.command)}", "dim"), soft_wrap=True)  # in one line, to be copied


def _show_difference(screen: Console, difference: FirstDifference, between: str, script: Script) -> None:
    found = difference.comparison
    if script.every == 1:
        say(screen, f"They first differ after step {difference.step}, between {between}:")
    else:
        say(
            screen,
            f"They differ after step {difference.step}, the first such among every {script.every}, between {between}:",
        )
    for tensor in found.tensors[:_MAX_NAMES]:
        most = "" if tensor.max_abs is None else f", by up to {tensor.max_abs:g}"
        many = "shape" if tensor.num_differing is None else f"{tensor.num_differing:,} of {tensor.a.numel:,} elements"
        say(screen, f"  tensor {shown_name(tensor.name)}: {many}{most}")
    for value in found.values[:_MAX_NAMES]:
        say(screen, f"  value {shown_name(value.name)}: {_text(value.a)} and {_text(value.b)}")
    for name in (*found.only_a, *found.only_b)[:_MAX_NAMES]:
        say(screen, f"  only one has {shown_name(name)}")
    kinds = found.tensors, found.values, (*found.only_a, *found.only_b)
    rest = sum(max(len(kind) - _MAX_NAMES, 0) for kind in kinds)
    if rest:
        say(screen, f"  and {rest} more", "dim")


def _text(node: Node | None) -> str:
    return "nothing" if node is None else shortened(text_of(node))
