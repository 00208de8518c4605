"""Rules are values, and a TOML text lists the same ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import holdfast
from holdfast import ConfigurationError
from holdfast.mapping import (
    Cast,
    Crop,
    Drop,
    FromMegatron,
    Fuse,
    Pad,
    Rename,
    Rule,
    Split,
    Stack,
    ToMegatron,
    Transpose,
    Unstack,
    from_toml,
)

TEXT = """
[[rule]]
kind = "rename"
names = "net/{x:**}.gamma"
to = "net/{x}.weight"

[[rule]]
kind = "drop"
names = "optimizer"

[[rule]]
kind = "cast"
names = "model"
dtype = "bfloat16"

[[rule]]
kind = "split"
names = "{l}.qkv"
to = ["{l}.q", "{l}.k", "{l}.v"]
shares = [4, 1, 1]
groups = 8

[[rule]]
kind = "fuse"
names = ["{l}.gate", "{l}.up"]
to = "{l}.both"
axis = 1

[[rule]]
kind = "stack"
names = "l.{i}.{w:*}"
to = "l.{w}"
first = 2

[[rule]]
kind = "unstack"
names = "e.{w}"
to = "e.{i}.{w}"
axis = 1

[[rule]]
kind = "transpose"
names = "c.*"
axes = [2, 0, 1]

[[rule]]
kind = "pad"
names = "emb"
size = 128
fill = "keep"

[[rule]]
kind = "crop"
names = "head"
size = 100

[[rule]]
kind = "from_megatron"

[[rule]]
kind = "to_megatron"
names = "opt"
"""

RULES: list[Rule] = [
    Rename("net/{x:**}.gamma", "net/{x}.weight"),
    Drop("optimizer"),
    Cast("model", "bfloat16"),
    Split("{l}.qkv", ["{l}.q", "{l}.k", "{l}.v"], shares=[4, 1, 1], groups=8),
    Fuse(["{l}.gate", "{l}.up"], "{l}.both", axis=1),
    Stack("l.{i}.{w:*}", "l.{w}", first=2),
    Unstack("e.{w}", "e.{i}.{w}", axis=1),
    Transpose("c.*", axes=[2, 0, 1]),
    Pad("emb", size=128, fill="keep"),
    Crop("head", size=100),
    FromMegatron(),
    ToMegatron("opt"),
]


def test_toml_lists_the_same_rules() -> None:
    assert list(from_toml(TEXT)) == RULES
    assert from_toml(TEXT) == from_toml(TEXT)
    assert len(set(from_toml(TEXT))) == len(RULES)


def test_rules_are_reached_through_the_package() -> None:
    assert holdfast.mapping.Rename("a", "b") == Rename("a", "b")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("rule = 3", "Expected `array`"),
        ("rule", "Expected '='"),
        ("", "missing required field `rule`"),
        ('[[rule]]\nkind = "merge"\nnames = "a"', "Invalid value 'merge'"),
        ('[[rule]]\nkind = "rename"\nnames = "a"', "missing required field `to`"),
        ('[[rule]]\nkind = "drop"\nnames = "a"\nto = "b"', "unknown field `to`"),
        ('[[rule]]\nkind = "drop"\nnames = "{"', "a brace outside of a field"),
        ('[[rule]]\nkind = "pad"\nnames = "a"\nsize = "3"\nfill = "keep"', "Expected `int`"),
        ('[[rule]]\nkind = "pad"\nnames = "a"\nsize = 3\nfill = "ones"', "Invalid enum value 'ones'"),
    ],
)
def test_a_malformed_text_is_refused_and_says_where(text: str, word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        from_toml(text)
    assert caught.value.code == "config.mapping"
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Rename("", "b"), "is empty"),
        (lambda: Rename("a", ""), "is empty"),
        (lambda: Rename("a.*", "b"), "give its wildcards names"),
        (lambda: Rename("a.{i}", "b.*"), "no wildcards"),
        (lambda: Rename("a.{i}", "b.{i:*}"), "no wildcards"),
        (lambda: Rename("a.{i}", "b.{j}"), "has fields that 'a.{i}' lacks: j"),
        (lambda: Drop("a.{1}"), "a brace outside of a field"),
        (lambda: Cast("a", "fp32"), "'fp32' is not a dtype: did you mean 'float32'"),
        (lambda: Split("a", ["b"]), "two or more different names"),
        (lambda: Split("a", "bc"), "two or more different names"),
        (lambda: Split("a", ["b", "b"]), "two or more different names"),
        (lambda: Split("a", ["b", "c"], shares=[1, 0]), "shares must be positive"),
        (lambda: Split("a", ["b", "c"], shares=[1, 1, 1]), "one for each name in to (2)"),
        (lambda: Split("a", ["b", "c"], groups=0), "at least 1"),
        (lambda: Fuse(["a.{i}", "b"], "c"), "do not have the same fields"),
        (lambda: Fuse(["a.{i}", "b.{i}"], "c"), "lacks fields of 'a.{i}': i"),
        (lambda: Stack("a.{i}.{j}", "a"), "exactly one more"),
        (lambda: Stack("a.{i}", "b.{i}"), "exactly one more"),
        (lambda: Unstack("a.{w}", "a.{w}"), "exactly one more"),
        (lambda: Unstack("a.*", "a.{i}"), "give its wildcards names"),
        (lambda: Transpose("a", axes=(0, 0)), "not an order of axes"),
        (lambda: Pad("a", size=-1, fill="keep"), "negative"),
        (lambda: Pad("a", size=1, fill=cast("Any", "ones")), '"keep" or "zero"'),
        (lambda: Crop("a", size=-1), "negative"),
    ],
)
def test_a_rule_that_makes_no_sense_by_itself_is_a_value_error(make: Callable[[], Rule], word: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are compared below, without escapes
        make()
    assert word in str(caught.value)


def test_a_path_in_place_of_a_text_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text('[[rule]]\nkind = "leave_out"\nnames = "a"\n')
    with pytest.raises(ConfigurationError, match="Pass the text of the file, not its path"):
        from_toml(str(tmp_path / "rules.toml"))
    with pytest.raises(TypeError, match=r"Path\(\.\.\.\)\.read_text\(\), not a PosixPath"):
        from_toml(tmp_path / "rules.toml")  # type: ignore[arg-type]  # the test passes a wrong type
