"""The option that names the failure domains of a node: what names none is refused, not taken for no wish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast import Checkpointer, ConfigurationError, Copies, Memory


@pytest.mark.parametrize("domain", ["", "  ", "/", " / / "])
def test_a_domain_without_a_name_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match="names no failure domain; pass None, or such as 'block-2/rack-7'"):
        Memory(protect=Copies(1), domain=domain)


def test_the_path_of_a_file_given_as_text_is_no_domain() -> None:
    """It was the domain `etc/x` of every node, and the job heard only that all nodes were in it."""
    with pytest.raises(ValueError, match=r"looks like the path of a file.*pass Path\('/etc/x'\)"):
        Memory(protect=Copies(1), domain="/etc/x")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"domain": "block-2/rack-7"}, "domain="),
        ({"domain": Path("/etc/holdfast-domain")}, "domain="),
        ({"protect_pace": "idle"}, "protect_pace="),
        ({"protect_pace": "none"}, "protect_pace="),
        ({"protect_bytes_per_s": 5e6}, "protect_bytes_per_s="),
        ({"require_protection": True}, "require_protection=True"),
    ],
)
def test_options_of_protection_without_protection_are_refused(options: dict[str, Any], name: str) -> None:
    """All but `require_protection` were accepted, and whoever forgot `protect=` trained without protection."""
    with pytest.raises(ValueError, match=f"{name} needs protect=, such as holdfast.Copies"):
        Memory(**options)


@pytest.mark.parametrize("domain", [7, b"rack-7", ("block-2", "rack-7")])
def test_a_domain_of_another_type_is_refused(domain: object) -> None:
    with pytest.raises(TypeError, match="domain is the name of a failure domain"):
        Memory(protect=Copies(1), domain=domain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b" /\n", "is empty"),
        (b"a\nb\n", "has more than one line"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_domain_file_without_a_name_does_not_count_as_no_domain(
    tmp_path: Path, node_dir: Path, content: bytes, why: str
) -> None:
    # An empty file gave no domain, and no warning: copies could lie in the rack of their owner.
    path = tmp_path / "domain"
    path.write_bytes(content)
    memory = Memory(protect=Copies(1), domain=path, require_protection=True, node_dir=node_dir)
    own = Checkpointer(tmp_path / "run", {"step": 1}, memory=memory)
    with pytest.raises(
        ConfigurationError, match=f"'{path}', the file that names the failure domain of this node, {why}"
    ) as told:
        own.save(1)
    assert told.value.code == "config.protection"
    own.close()
