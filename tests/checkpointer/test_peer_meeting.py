"""What ranks refuse when they introduce the keepers of their nodes to each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpointer.peer_meeting import _domains, _require_unlike
from holdfast.errors import ConfigurationError
from holdfast.node_memory.peering import PeerNode


def test_a_node_whose_address_is_also_that_of_another_one_does_not_hold_its_own_copies() -> None:
    nodes = [PeerNode("a", "127.0.0.1:40000"), PeerNode("b", "127.0.0.1:40001")]
    _require_unlike(nodes)
    with pytest.raises(ConfigurationError, match=r"2 nodes give 127\.0\.0\.1:40000") as caught:
        _require_unlike([*nodes, PeerNode("c", "127.0.0.1:40000")])
    assert caught.value.code == "config.protection"


def test_a_file_of_failure_domains_that_is_no_text_is_an_error_with_an_action(tmp_path: Path) -> None:
    path = tmp_path / "domain"
    path.write_bytes(b"block-\xff/rack")
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        _domains(path)
    assert caught.value.code == "config.protection"
