"""``holdfast diff`` and its parts: they find every difference, and report none between equal checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.compare import Comparison, compare
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.cli import diff as comparing
from holdfast.format.values import Items, Node, Open, PerRankNode, Plain, TableNode
from holdfast.plan.layout import Mesh, Shard
from holdfast.run.leases import want_leases
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import Stored, at_terminal, damage, holdfast_command, rows, stored_run
from tests.support.nursery import until


def floats(*values: float, ranks: int = 1) -> Stored:
    return Stored("float32", np.asarray(values, np.float32), *rows(ranks))


def two(tmp_path: Path, a: dict[str, Stored], b: dict[str, Stored]) -> tuple[Path, Path]:
    return stored_run(tmp_path / "a", a), stored_run(tmp_path / "b", b)


def test_equal_checkpoints_of_other_layouts_are_equal(tmp_path: Path) -> None:
    elements = np.arange(64, dtype=np.float32).reshape(8, 8)
    by_columns = Stored("float32", elements, (Shard(1),), Mesh((4,), (3, 1, 2, 0)))
    paths = two(tmp_path, {"w": Stored("float32", elements, *rows(2))}, {"w": by_columns})
    done = holdfast_command("diff", *paths)
    assert (done.status, done.lines[-1]) == (0, "equal: 1 tensor bit for bit, and all values")
    assert holdfast_command("diff", "--json", *paths).json["equal"] is True


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    paths = two(tmp_path, {"w": floats(0.0, 1.0), "v": floats(2.0)}, {"w": floats(-0.0, 1.0), "v": floats(2.0)})
    done = holdfast_command("diff", *paths)
    assert (done.status, done.lines[-1]) == (1, "different: 1 of 2 tensors in both (by at most 0)")
    (found,) = holdfast_command("diff", "--json", *paths).json["tensors"]
    assert (found["name"], found["num_differing"], found["max_abs"]) == ("w", 1, 0.0)


def test_names_shapes_and_dtypes_that_differ_are_told(tmp_path: Path) -> None:
    a = {"both": floats(1), "gone": floats(1), "cast": floats(1, 2.001), "cut": floats(1, 2)}
    half = np.asarray([1, 2], ml_dtypes.bfloat16).view(np.int16)
    b = {"both": floats(1), "new": floats(1), "cast": Stored("bfloat16", half), "cut": floats(1)}
    paths = two(tmp_path, a, b)
    done = holdfast_command("diff", *paths)
    assert done.status == 1
    assert "only in A: 1 tensor" in done.out
    assert "only in B: 1 tensor" in done.out
    assert "float32 [2] -> bfloat16 [2]" in done.out
    assert "not compared" in done.out
    document = holdfast_command("diff", "--json", *paths).json
    assert (document["only_a"], document["only_b"]) == (["gone"], ["new"])
    assert [(t["name"], t["num_differing"]) for t in document["tensors"]] == [("cast", 1), ("cut", None)]


def test_tensors_of_one_side_only_leave_none_or_one_to_compare(tmp_path: Path) -> None:
    paths = two(tmp_path, {"a": floats(1), "b": floats(1)}, {"b": floats(1), "c": floats(1)})
    said = {holdfast_command("diff", *paths, "--names", names).lines[-1] for names in ("[ac]", "*")}
    only = "different: 1 tensor only in A; 1 tensor only in B; "
    assert said == {f"{only}no tensor is in both", f"{only}the 1 tensor in both is equal"}


def test_stat_says_how_much_and_not_what(tmp_path: Path) -> None:
    paths = two(tmp_path, {"w": floats(1, 2), "gone": floats(1)}, {"w": floats(1, 4)})
    done = holdfast_command("diff", "--stat", *paths)
    assert (done.status, len(done.lines)) == (1, 6)
    assert done.lines[-1] == "different: 1 of 1 tensor in both (by at most 2); 1 tensor only in A"
    document = holdfast_command("diff", "--stat", "--json", *paths).json
    assert (document["num_differing"], document["num_only_a"], document["max_abs"]) == (1, 1, 2.0)
    assert document["tensors"] == document["only_a"] == []


def test_names_narrow_what_is_compared(tmp_path: Path) -> None:
    paths = two(tmp_path, {"a.w": floats(1), "b.w": floats(1)}, {"a.w": floats(1), "b.w": floats(2)})
    assert holdfast_command("diff", *paths, "--names", "a.*").status == 0
    assert holdfast_command("diff", *paths, "--names", "b.*").status == 1
    assert holdfast_command("diff", *paths, "--names", "c.*").status == 3


def test_alike_tensors_of_many_layers_share_a_line(tmp_path: Path) -> None:
    many = {f"layers.{n}.w": floats(n) for n in range(50)}
    lines = holdfast_command("diff", *two(tmp_path, many, {name: floats(-1) for name in many})).lines
    (row,) = (line.split() for line in lines if line.startswith("layers"))
    assert row == ["layers.*.w", "50", "all", "50", "50"]


def test_damage_is_a_failure_and_no_difference(tmp_path: Path) -> None:
    paths = two(tmp_path, {"w": floats(1, 2)}, {"w": floats(1, 2)})
    damage(next(paths[1].rglob("data-*")), at=0.999)
    done = holdfast_command("diff", *paths)
    assert (done.status, "corrupt.file" in done.err) == (3, True)


def test_values_that_differ_are_shown_side_by_side(tmp_path: Path) -> None:
    def nodes(lr: Node, *, extra: bool) -> dict[str, Node]:
        table: dict[str, Node] = {"": Open("dict"), "lr": lr, "betas": Items("tuple", 1), "betas/0": Plain(0.9)}
        return table | ({"extra": TableNode("dict", ())} if extra else {})

    a = stored_run(tmp_path / "a", {"w": floats(1)}, nodes(Plain(1), extra=False))
    b = stored_run(tmp_path / "b", {"w": floats(1)}, nodes(Plain(1.0), extra=True))
    done = holdfast_command("diff", a, b)
    assert done.status == 1
    assert [line.split() for line in done.lines[5:8]] == [
        ["value", "A", "B"],
        ["extra", "-", "0", "entries"],
        ["lr", "int", "1", "float", "1.0"],
    ]
    assert holdfast_command("diff", "--json", a, b).json["values"] == [
        {"name": "extra", "a": None, "b": "0 entries"},
        {"name": "lr", "a": "1", "b": "1.0"},
    ]


def test_a_key_has_one_kind_of_escapes(tmp_path: Path) -> None:
    """A key such as "a/b\\n" was shown as a%2Fb\\n: a name and Python's text in one."""
    for step, number in enumerate((1, 2)):
        holdfast.save(tmp_path / "run", {"d": {"a/b\n": number, "same": {"x": 1} if step else 5}}, step)
    done = holdfast_command("diff", f"{tmp_path}/run@step=0", f"{tmp_path}/run@step=1")
    assert "d/a%2Fb%0A" in done.out
    assert "\\n" not in done.out


def test_the_order_of_keys_is_a_difference_and_their_number_is_told_by_the_names(tmp_path: Path) -> None:
    leaves: dict[str, Node] = {"d/a": Plain(1), "d/b": Plain(2)}
    root: dict[str, Node] = {"": TableNode("dict", ("d",))}
    runs = {
        keys: stored_run(
            tmp_path / "-".join(keys),
            {"w": floats(1)},
            root | {"d": TableNode("dict", keys)} | {path: leaf for path, leaf in leaves.items() if path[2:] in keys},
        )
        for keys in (("a", "b"), ("b", "a"), ("a",))
    }

    def changed(*pair: tuple[str, ...]) -> list[str]:
        return [value["name"] for value in holdfast_command("diff", "--json", *map(runs.get, pair)).json["values"]]  # type: ignore[arg-type]

    assert changed(("a", "b"), ("b", "a")) == ["d"]
    assert changed(("a", "b"), ("a",)) == ["d/b"]


def test_values_of_other_numbers_of_ranks_are_told_rank_by_rank(tmp_path: Path) -> None:
    def run(ranks: int) -> Path:
        nodes: dict[str, Node] = {"": Open("dict"), "rng": PerRankNode(ranks)}
        nodes |= {f"rng/%rank={rank}": Plain(rank) for rank in range(ranks)}
        return stored_run(tmp_path / str(ranks), {"w": floats(1, 2, 3, 4, ranks=ranks)}, nodes)

    values = holdfast_command("diff", "--json", run(2), run(4)).json["values"]
    assert [value["name"] for value in values] == ["rng/%rank=2", "rng/%rank=3"]


def test_a_tie_that_was_saved_as_one_tensor_or_as_two_is_no_difference(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    holdfast.save(tmp_path / "tied", {"a": weight, "b": weight}, 1)
    holdfast.save(tmp_path / "apart", {"a": weight, "b": weight.clone()}, 1)
    assert holdfast_command("diff", tmp_path / "tied", tmp_path / "apart", "--names", "?").status == 0
    document = holdfast_command("diff", "--json", tmp_path / "tied", tmp_path / "tied").json
    assert (document["equal"], document["num_common"]) == (True, 1), "a tie is read once"


def test_only_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    paths = two(tmp_path, {"w": floats(1)}, {"w": floats(1)})
    assert "comparing" in at_terminal("diff", *map(str, paths)).out
    assert "comparing" not in at_terminal("diff", "--json", *map(str, paths)).out
    assert holdfast_command("diff", *paths).err == ""


def test_a_policy_deletes_neither_side_while_diff_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(tmp_path / "run")
    for step in (1, 2):
        holdfast.save(run, {"w": torch.zeros(10)}, step)
    storage = open_store(Location(run))
    want_leases(storage)

    def leases() -> int:
        return sum(".until-" in name for name in storage.list("pins"))

    def read(*sides: Checkpoint, **options: Any) -> Comparison:
        until(lambda: leases() == 2)
        return compare(*sides, **options)

    monkeypatch.setattr(comparing, "compare", read)
    assert comparing.diff(f"{run}@1.1", f"{run}@1.2", stat=False, names="", as_json=True)
    until(lambda: leases() == 0)
