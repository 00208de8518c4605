"""Every attack of `attacks/cases` is refused by name, in little time and memory, and nothing read is executed.

All digests are right in all of them; `tests.faults.test_bit_rot` covers damaged bytes.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, cast

import pytest

import holdfast
from tests.faults.attacks import cases
from tests.faults.attacks.confined import CPU_S, Confined
from tests.faults.attacks.victim import Victim

CASES = sorted(module.name for module in pkgutil.iter_modules(cases.__path__))
SOURCES = sorted(Path(holdfast.__file__).parent.rglob("*.py"))
#: The names of modules and functions that turn data into code.
FORBIDDEN = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "eval", "exec", "compile"}


class Attack(Protocol):
    """A module of `tests.faults.attacks.cases`."""

    CODE: str
    attack: Callable[[Victim], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim.build(tmp_path_factory.mktemp("victim") / "run")


#: Modules that write pickles for other systems, and read none.
WRITE_PICKLES = ("exporting/dcp_folder.py", "exporting/tensor_archives.py")


@pytest.fixture(scope="module")
def confined() -> Iterator[Confined]:
    with Confined() as process:
        yield process


@pytest.mark.parametrize("name", CASES)
def test_an_attack_is_refused_in_little_time_and_memory(
    name: str, sound: Victim, confined: Confined, tmp_path: Path
) -> None:
    case = cast("Attack", importlib.import_module(f"{cases.__name__}.{name}"))
    victim = sound.copied(tmp_path / "run")
    case.attack(victim)
    verdict = confined.judge("checkpoint", str(victim.path).encode())
    assert (verdict.outcome, verdict.code) == ("refused", case.CODE), verdict.text
    assert verdict.cpu_s < CPU_S
    assert len(verdict.text) < 1500, "the message repeats what the attacker wrote"
    assert verdict.text.isprintable(), "the message does to a terminal what the attacker wrote"
    assert not (victim.path / "executed").exists()


def test_the_run_is_sound_before_it_is_attacked(sound: Victim, confined: Confined, tmp_path: Path) -> None:
    victim = sound.copied(tmp_path / "run")
    assert confined.judge("checkpoint", str(victim.path).encode()).outcome == "accepted"
    victim.set_manifest()  # signs everything anew
    assert confined.judge("checkpoint", str(victim.path).encode()).outcome == "accepted"


def test_every_attack_says_what_it_does() -> None:
    assert len(CASES) >= 20
    for name in CASES:
        assert (importlib.import_module(f"{cases.__name__}.{name}").__doc__ or "").endswith(".")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that a module imports, uses or defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else node.attr
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "", *(alias.name for alias in node.names))
        elif isinstance(node, ast.FunctionDef):
            yield node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_nothing_that_turns_data_into_code_is_used(path: Path) -> None:
    used = set(names_in(ast.parse(path.read_text(encoding="utf-8"))))
    if "/".join(path.parts[-2:]) in WRITE_PICKLES:
        used -= {"pickle", "pickle.dumps", "pickle.Pickler", "pickle._Pickler", "torch.save"}
        assert not any(name.startswith("pickle.") for name in used), "only writing runs nothing"
    assert not used & FORBIDDEN
    assert not used & {"torch.load", "torch.save", "numpy.load", "np.load", "__import__"}
    if path.name != "__init__.py":  # the package imports its own modules by name, when they are first used
        assert "importlib.import_module" not in used
    assert "__setstate__" not in used
    # Errors, views and batches of loader workers that the caller's own tools pickle are plain data there: nothing of a
    # checkpoint is unpickled.
    plain = ("holdfast/errors.py", "view/__init__.py", "view/source.py", "data/sharded_stream.py")
    if "/".join(path.parts[-2:]) not in plain:
        assert "__reduce__" not in used
