"""``holdfast show``: the tree of tensors, their divisions, values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.cli import tree
from holdfast.cli.screen import ago
from holdfast.cli.value_text import natural
from holdfast.format.names import join
from holdfast.format.records import Place
from holdfast.format.values import Blob, Items, Node, Open, PerRankNode, Plain, TableNode, Text
from holdfast.geometry import Box, FlatRange
from holdfast.plan.layout import Mesh, Pieces, Replicate, Shard, TensorLayout
from holdfast.plan.save import CheckpointIdentity
from tests.support.command_line import Stored, at_terminal, holdfast_command, rows, screen_lines, stored_run
from tests.support.published import EPOCHS, RUN_ID, begin, plan, publish, put


def weight(*shape: int, ranks: int = 1) -> Stored:
    return Stored("float32", np.ones(shape, np.float32), *rows(ranks))


def tensor(name: str, *, shape: tuple[int, ...] = (2, 2), nbytes: int = 16) -> tree.ShownTensor:
    return tree.ShownTensor(name, "float32", shape, "whole", 1, 1, nbytes)


def labels(*names: str | tree.ShownTensor) -> list[str]:
    made = sorted((tensor(name) if isinstance(name, str) else name for name in names), key=lambda one: one.name)
    return ["  " * line.depth + line.label for line in tree.lines(made)]


def test_layers_that_look_alike_are_one_line(tmp_path: Path) -> None:
    tensors = {f"model/layers.{n}.{what}": weight(8, 4, ranks=2) for n in range(12) for what in ("down", "up")}
    run = stored_run(tmp_path / "run", tensors | {"model/embed": weight(16, 4, ranks=2), "scale": weight()})
    lines = [line.split() for line in holdfast_command("show", run).lines]
    assert lines[2][:2] == ["26", "tensors,"]
    assert lines[5:9] == [
        ["model", "25", "3.2", "KiB"],
        ["/embed", "1", "256", "B", "float32", "[16,", "4]", "2x1"],
        ["/layers.0-11.{down,up}", "24", "3.0", "KiB", "float32", "[8,", "4]", "2x1"],
        ["scale", "1", "4", "B", "float32", "[]", "whole"],
    ]


def test_layers_that_differ_are_apart() -> None:
    odd = tensor("a.2.w", shape=(3,))
    assert labels("a.0.w", "a.1.w", odd, "a.3.w", "a.10.w") == ["a", "  .{0-1,3,10}.w", "  .2.w"]


def test_layers_with_other_parts_are_apart() -> None:
    assert labels("a.0.w", "a.1.b", "a.1.w") == ["a", "  .0.w", "  .1.{b,w}"]


def test_a_long_list_of_alike_parts_is_cut() -> None:
    assert labels(*(f"s/{2 * n}" for n in range(9))) == ["s/{0,2,4,...,16}"]


def test_a_name_that_is_also_the_beginning_of_others_has_a_line() -> None:
    assert labels("a", "a/b", "a/c.d") == ["a", "  /b", "  /c.d"]


def test_empty_parts_of_names_do_no_harm() -> None:
    assert labels("..", "a.") == ["..", "a."]


names = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", ""]), min_size=1, max_size=4)


@given(st.sets(st.tuples(names.map("/".join), st.sampled_from(["", ".w", ".0.w", ".1.w"])).map("".join)), st.data())
def test_the_lines_of_a_tree_add_up(found: set[str], data: st.DataObject) -> None:
    sizes = {name: data.draw(st.sampled_from([1, 4])) for name in sorted(found)}
    tensors = [tensor(name, shape=(numel,), nbytes=4 * numel) for name, numel in sizes.items()]
    lines = list(tree.lines(tensors))
    top = [line for line in lines if line.depth == 0]
    assert sum(line.num_tensors for line in top) == len(tensors)
    assert sum(line.nbytes for line in top) == sum(one.nbytes for one in tensors)
    assert len(lines) <= 2 * len(tensors)


def test_every_kind_of_division_has_its_words(tmp_path: Path) -> None:
    storage = begin(RUN_ID, *EPOCHS[:1])
    boxes = [[Box((0, 0), (4, 1)), Box((0, 1), (1, 3))], [Box((1, 1), (3, 3))]]
    cuts = [FlatRange(0, 3), FlatRange(3, 16)]
    ranges = [TensorLayout("ranges", "uint8", (4, 4), Pieces.ranges(cut)) for cut in cuts]
    free = [TensorLayout("boxes", "uint8", (4, 4), Pieces.boxes(*held)) for held in boxes]
    layouts = [list(pair) for pair in zip(free, ranges, strict=True)]
    nodes: dict[str, Node] = {"": Open("dict")}
    planned = plan(layouts, nodes, CheckpointIdentity("1" * 16, RUN_ID, Place(1, 1), 1, 1.5, {}))
    publish(storage, planned, {name: np.zeros((4, 4, 1), np.uint8) for name in ("ranges", "boxes")}, nodes)
    run = put(storage.objects, tmp_path / "run")
    divided = {one["name"]: one["divided"] for one in holdfast_command("show", "--json", run).json["tensors"]}
    assert divided == {"ranges": "2 ranges", "boxes": "3 boxes"}
    assert "3 boxes in 2 files" in holdfast_command("show", run).out


@pytest.mark.parametrize(
    ("shape", "placements", "divided", "num_files"),
    [
        ((8, 4), (Shard(0), Shard(1)), "2x2", 4),
        ((8, 4), (Shard(1), Replicate()), "1x2", 2),
        ((8, 4), (Replicate(), Replicate()), "whole", 1),
        ((0, 4), (Shard(0), Replicate()), "empty", 0),
        ((), (Replicate(), Replicate()), "whole", 1),
    ],
)
def test_grids_say_into_how_many_parts_each_axis_is_cut(
    tmp_path: Path, shape: tuple[int, ...], placements: tuple[Shard | Replicate, ...], divided: str, num_files: int
) -> None:
    stored = Stored("float32", np.ones(shape, np.float32), placements, Mesh((2, 2), (0, 1, 2, 3)))
    (one,) = holdfast_command("show", "--json", stored_run(tmp_path / "run", {"w": stored})).json["tensors"]
    assert (one["divided"], one["num_files"]) == (divided, num_files)


def test_a_long_value_leaves_room_for_its_name(tmp_path: Path) -> None:
    nodes: dict[str, Node] = {"": TableNode("dict", ("prompt",)), "prompt": Text(b"x" * 300)}
    run = stored_run(tmp_path / "run", {"w": weight(2)}, nodes)
    lines = screen_lines(at_terminal("show", "--values", run, columns=80))
    assert [line.split()[:2] for line in lines if "name" in line or "prompt" in line][1:] == [
        ["name", "type"],
        ["prompt", "str"],
    ]


def test_a_checkpoint_that_was_saved_just_now_is_not_said_to_be_of_now_ago() -> None:
    assert [ago(s) for s in (0.5, 5, 7200)] == ["now", "5 s ago", "2 h ago"]


def test_what_was_asked_for_is_not_offered_again(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"w": weight(2)})
    assert "--names GLOB" in holdfast_command("show", run).lines[-1]
    assert holdfast_command("show", run, "--names", "w").lines[-1] == "--values lists the values"


def test_names_lists_matching_tensors_one_by_one(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {f"layers.{n}.{what}": weight(2) for n in range(3) for what in ("a", "b")})
    lines = holdfast_command("show", run, "--names", "*.b").lines
    assert [line.split()[0] for line in lines[5:8]] == ["layers.0.b", "layers.1.b", "layers.2.b"]


def test_names_finds_a_tied_tensor_by_each_of_its_names(tmp_path: Path) -> None:
    embedding = torch.nn.Embedding(4, 2)
    head = torch.nn.Linear(2, 4, bias=False)
    head.weight = embedding.weight
    run = tmp_path / "run"
    holdfast.save(run, {"model": torch.nn.ModuleDict({"tok_emb": embedding, "head": head})}, 1)
    for pattern in ("model/tok_emb*", "model/head*"):
        done = holdfast_command("show", run, "--names", pattern)
        assert (done.status, "float32" in done.out) == (0, True)
        assert len(holdfast_command("show", run, "--names", pattern, "--json").json["tensors"]) == 1
    assert (
        "model/tok_emb.weight is tied to model/head.weight"
        in holdfast_command("show", run, "--names", "model/tok*").out
    )


def test_json_agrees_with_the_view(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"a": weight(4, 4, ranks=2), "b": Stored("bfloat16", np.zeros(3, np.int16))})
    view = holdfast.open(run)
    document = holdfast_command("show", "--json", run).json
    assert (document["path"], document["place"], document["step"]) == (view.path, view.place, view.step)
    assert [(t["name"], t["dtype"], t["nbytes"]) for t in document["tensors"]] == [
        (name, view[name].dtype, view[name].nbytes) for name in view.names()
    ]
    assert document["values"] is None


def test_values_are_listed_in_natural_order_and_lists_on_one_line(tmp_path: Path) -> None:
    nodes: dict[str, Node] = {
        "": TableNode("dict", ("betas", "empty", "name", "seen", "raw", "rng", "nan")),
        "betas": Items("tuple", 2),
        "betas/0": Plain(0.9),
        "betas/1": Plain(0.95),
        "empty": Items("list", 0),
        "name": Text(b"gpt\x1b"),
        "seen": Plain(7),
        "raw": Blob(bytes(range(20))),
        "nan": Plain(float("nan")),
        "rng": PerRankNode(2),
        **{join("rng", f"%rank={rank}"): Plain(rank) for rank in range(2)},
    }
    run = stored_run(tmp_path / "run", {"w": weight(2, ranks=2)}, nodes)
    values = {value["name"]: (value["type"], value["text"]) for value in show_values(run)}
    assert values == {
        "betas": ("tuple", "(0.9, 0.95)"),
        "empty": ("list", "0 entries"),
        "name": ("str", r"'gpt\x1b'"),
        "seen": ("int", "7"),
        "raw": ("bytes", "20 bytes, 00 01 02 03 04 05 06 07 08 09 0a 0b 0c 0d 0e 0f ..."),
        "rng/%rank=0": ("int", "0"),
        "rng/%rank=1": ("int", "1"),
        "nan": ("float", "nan"),
    }
    assert "(0.9, 0.95)" in holdfast_command("show", "--values", run).out
    assert "(0.9, 0.95)" not in holdfast_command("show", run).out


def show_values(run: Path) -> list[dict[str, str]]:
    values: list[dict[str, str]] = holdfast_command("show", "--json", "--values", run).json["values"]
    return values


def test_many_equal_values_beside_each_other_are_one_line(tmp_path: Path) -> None:
    keys = tuple(f"p{n}" for n in range(9))
    nodes: dict[str, Node] = {"": TableNode("dict", ("group_of",)), "group_of": TableNode("dict", keys)}
    nodes |= {f"group_of/{key}": Plain(0) for key in keys}
    run = stored_run(tmp_path / "run", {"w": weight(2)}, nodes)
    assert holdfast_command("show", "--values", run).lines[-1].split() == ["group_of/*", "(9", "alike)", "int", "0"]
    assert len(show_values(run)) == 9


def test_show_needs_no_data_files(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "run", {"w": weight(2)})
    for file in run.rglob("data-*"):
        file.unlink()
    assert holdfast_command("show", run).status == 0
    assert holdfast_command("show", "--values", run).status == 3


def test_a_folder_is_said_to_be_opened_without_a_history(tmp_path: Path) -> None:
    (folder,) = (stored_run(tmp_path / "run", {"w": weight(2)}) / "checkpoints").iterdir()
    assert "without the history of a run" in holdfast_command("show", folder).out
    assert "without the history of a run" not in holdfast_command("show", tmp_path / "run").out


def test_the_tree_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    slots = ("exp_avg", "exp_avg_sq", "step")
    tensors = {
        f"optimizer/state/model/blocks.{n}.attn.qkv.weight/{slot}": weight(*([] if slot == "step" else [8, 4]))
        for n in range(3)
        for slot in slots
    }
    lines = screen_lines(at_terminal("show", stored_run(tmp_path / "run", tensors), columns=80))
    assert max(map(len, lines[4:])) <= 80
    assert [line.split()[0] for line in lines[5:9]] == [
        "optimizer/state/model/blocks.0-2",
        ".attn.qkv.weight",
        "/{exp_avg,exp_avg_sq}",
        "/step",
    ]


def test_natural_order_counts_numbers() -> None:
    assert sorted(["a10", "a9", "a", "b1"], key=natural) == ["a", "a9", "a10", "b1"]
