"""`PerRank` and registered types through real jobs, on the same world and on others."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import IncompatibleError, StateError
from tests.support.ranks import run_ranks


def _own(rank: int) -> dict[str, object]:
    return {"position": 100 + rank, "noise": torch.full((rank + 1,), float(rank)), "name": f"rank {rank}"}


def _save(folder: str) -> list[int]:
    """Two saves, so that the second one reuses the plan; the files that hold values."""
    for step in range(2):
        own = _own(dist.get_rank()) | {"step": step}
        holdfast.save(f"{folder}/run", {"w": torch.arange(6.0), "loader": holdfast.PerRank(own)}, step)
    folders = sorted((Path(folder) / "run" / "checkpoints").iterdir())
    return [len(list(path.glob("data-*"))) for path in folders]


def _load(folder: str, policy: str) -> object:
    policies = {
        "error": "error",
        "first": "first",
        "sum": lambda parts, rank, world_size: {
            "position": sum(part["position"] for part in parts),
            "at": (rank, world_size),
        },
    }
    loader: holdfast.PerRank[object] = holdfast.PerRank({}, on_resize=policies[policy])  # type: ignore[arg-type]
    state = {"w": torch.zeros(6), "loader": loader}
    holdfast.load(f"{folder}/run", state)
    return loader.value


def _load_on_the_same_world(folder: str) -> tuple[dict[str, object], list[float]]:
    blank: dict[str, object] = {"position": 0, "noise": torch.zeros(dist.get_rank() + 1), "name": "", "step": -1}
    state = {"w": torch.zeros(6), "loader": holdfast.PerRank(blank)}
    holdfast.load(f"{folder}/run", state)
    noise = blank.pop("noise")
    assert isinstance(noise, torch.Tensor)
    return blank, noise.tolist()


def test_each_rank_gets_its_own_part_back_on_the_same_world(tmp_path: Path) -> None:
    assert run_ranks(3, _save, str(tmp_path)) == [[3, 3]] * 3
    for rank, (values, noise) in enumerate(run_ranks(3, _load_on_the_same_world, str(tmp_path))):
        assert values == {"position": 100 + rank, "name": f"rank {rank}", "step": 1}
        assert noise == [float(rank)] * (rank + 1)


def test_on_another_world_the_policy_decides(tmp_path: Path) -> None:
    run_ranks(3, _save, str(tmp_path))
    merged = run_ranks(2, _load, str(tmp_path), "sum")
    assert merged == [{"position": 303, "at": (rank, 2)} for rank in range(2)]


def _load_expecting_refusal(folder: str) -> str:
    with pytest.raises(IncompatibleError, match="'loader'") as caught:
        _load(folder, "error")
    return caught.value.code


def test_on_another_world_it_is_an_error_by_default(tmp_path: Path) -> None:
    run_ranks(3, _save, str(tmp_path))
    assert run_ranks(2, _load_expecting_refusal, str(tmp_path)) == ["incompatible.per_rank"] * 2


def _save_on_some_ranks(folder: str) -> tuple[str, str, str | None, str]:
    """Ranks 1 and 3 have something of their own in a dictionary that all have."""
    rank = dist.get_rank()
    own = {"loader": holdfast.PerRank(rank)} if rank % 2 else {}
    with pytest.raises(StateError) as caught:
        holdfast.save(f"{folder}/run", {"w": torch.ones(2), "data": {"epoch": 1, **own}}, 1)
    state = {"w": torch.ones(2), "data": {"epoch": 1, "loader": holdfast.PerRank(rank if rank % 2 else None)}}
    place = holdfast.save(f"{folder}/run", state, 1).place
    return caught.value.code, str(caught.value), caught.value.path, place


def test_what_only_some_ranks_have_of_their_own_is_refused_with_the_ranks_that_lack_it(tmp_path: Path) -> None:
    for code, text, path, place in run_ranks(4, _save_on_some_ranks, str(tmp_path)):
        assert (code, path, place) == ("state.per_rank", "data/loader", "1.1")
        assert "missing on ranks [0, 2]" in text
        assert "PerRank(None)" in text
    assert holdfast.open(tmp_path / "run").value("data/loader") == [None, 1, None, 3]


def _encode(value: Fraction) -> object:
    return [value.numerator, value.denominator]


def _decode(value: object) -> Fraction:
    assert isinstance(value, list)
    return Fraction(*value)


def test_registered_types_come_back_and_others_are_refused(tmp_path: Path) -> None:
    holdfast.register_value(Fraction, _encode, _decode, name="fraction")
    holdfast.save(tmp_path / "run", {"rate": Fraction(1, 3), "rates": [Fraction(2, 7)]}, 1)
    state: dict[str, object] = {"rate": Fraction(0), "rates": []}
    holdfast.load(tmp_path / "run", state)
    assert state == {"rate": Fraction(1, 3), "rates": [Fraction(2, 7)]}
    assert holdfast.open(tmp_path / "run").value("rate") == Fraction(1, 3)
