"""Patterns of names, and the names that they match."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.near import near
from holdfast.format.patterns import Globs, Pattern, Template


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("model", "model", True),
        ("model", "model/a.weight", True),
        ("model", "models/a.weight", False),
        ("model/*", "model/layers.0.weight", True),
        ("model/*", "model", False),
        ("*.weight", "model/a.weight", False),
        ("**.weight", "model/a.weight", True),
        ("**.weight", "optimizer/state/model/a.weight/exp_avg", True),
        ("model/layers.{i}.w", "model/layers.0.w", True),
        ("model/layers.{i}.w", "model/layers.0.1.w", False),
        ("model/layers.{i:*}.w", "model/layers.0.1.w", True),
        ("{x:*}/w", "a/b/w", False),
        ("{x:**}/w", "a/b/w", True),
        ("{x}.{x}", "a.a", True),
        ("{x}.{x}", "a.b", False),
        ("a[0]+(b)?", "a[0]+(b)?", True),
        ("a{{0}}", "a{0}", True),
        ("**", "anything/at.all", True),
    ],
)
def test_what_a_pattern_matches(glob: str, name: str, matches: bool) -> None:
    assert (Pattern(glob).match(name) is not None) == matches


def test_fields_make_names_and_what_lies_below_stays() -> None:
    pattern, to = Pattern("net/{x:**}.gamma"), Template("model/{x}/{{{x}}}.weight")
    assert pattern.renamed("net/a.b.gamma", to) == "model/a.b/{a.b}.weight"
    assert pattern.renamed("net/a.gamma/%plane=x", to) == "model/a/{a}.weight/%plane=x"
    assert pattern.renamed("net/a.beta", to) is None
    assert pattern.fields_of("net/a.gamma/%plane=x") is None


def test_negative_globs_take_names_out() -> None:
    globs = Globs(["model", "!model/head.*"])
    assert "model/a" in globs
    assert "model/head.weight" not in globs
    assert "optimizer" not in globs
    everything_else = Globs("!optimizer")
    assert "model/a" in everything_else
    assert "optimizer/state/x" not in everything_else


def test_globs_know_which_of_them_matched_nothing_and_what_is_near() -> None:
    globs = Globs(["model", "modle/a", "!rng"])
    assert "model/a" in globs
    assert not globs.covers("rng")
    assert globs.unmatched() == {"modle/a": ["model/a"], "!rng": []}


@pytest.mark.parametrize("globs", [[], (), ""])
def test_no_globs_are_a_mistake(globs: list[str]) -> None:
    with pytest.raises(ValueError, match=r"an empty list of globs|is empty"):
        Globs(globs)


@pytest.mark.parametrize("globs", [[3], [None], 3])
def test_what_is_no_string_is_a_type_error(globs: list[str]) -> None:
    with pytest.raises(TypeError):
        Globs(globs)


def test_near_names_are_found_among_many() -> None:
    names = [f"model/layers.{i}.{kind}.weight" for i in range(1000) for kind in ("attn", "mlp")]
    assert "model/layers.7.attn.weight" in near("model/layers.7.atn.weight", names)


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("modle/**", "model/layers.0.weight"),
        ("model/layer.*.weight", "model/layers.0.weight"),
        ("**.wieght", "model/layers.0.weight"),
        ("!model/layers.{i}.wight", "model/layers.0.weight"),
        ("optimzer", "optimizer"),
        ("optimizer/groups/0/eps", "optimizer"),
    ],
)
def test_a_glob_with_a_slip_of_the_finger_gets_the_name_that_was_meant(glob: str, meant: str) -> None:
    globs = Globs([glob, "optimizer"])
    for name in ("model/layers.0.weight", "optimizer"):
        assert (name in globs) == (name == "optimizer")
    assert globs.unmatched() == {glob: [meant]}


def test_a_glob_gets_no_implausible_suggestions() -> None:
    globs = Globs(["groups/0/eps", "model/layers.3.weight"])
    assert not any(name in globs for name in ("groups/0/momentum", "model/layers.13.weight"))
    assert globs.unmatched() == {"groups/0/eps": [], "model/layers.3.weight": []}


@given(
    names=st.lists(st.text("ab/.", min_size=1, max_size=6)),
    globs=st.lists(st.text("ab/.*", min_size=1, max_size=4), min_size=1),
)
def test_globs_match_as_a_brute_force_search_does(names: list[str], globs: list[str]) -> None:
    def matches(name: str, glob: str) -> bool:
        return any(name[end : end + 1] in ("", "/") for end in glob_ends(name, glob))

    found = Globs(globs)
    for name in names:
        assert (name in found) == any(matches(name, glob) for glob in globs)


def glob_ends(name: str, glob: str, at: int = 0) -> set[int]:
    """The indexes at which a match of `glob` that begins at index `at` of `name` can end."""
    if not glob:
        return {at}
    if glob.startswith("*"):
        crosses = glob.startswith("**")
        tail = glob[2 if crosses else 1 :]
        ends = glob_ends(name, tail, at)
        while at < len(name) and (crosses or name[at] != "/"):
            at += 1
            ends |= glob_ends(name, tail, at)
        return ends
    return glob_ends(name, glob[1:], at + 1) if name[at : at + 1] == glob[0] else set()


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("model/backbone.0", ["model/backbone.0.*"]),
        ("backbone.*", ["model/backbone.*"]),
        ("!head.weight", ["model/head.weight"]),
        ("model.head.weight", ["model/head.weight"]),
        ("model.backbone", ["model/backbone.*"]),
    ],
)
def test_a_part_of_a_module_and_a_name_without_its_beginning_lead_to_what_was_meant(
    glob: str, meant: list[str]
) -> None:
    globs = Globs([glob])
    for name in ("model/backbone.0.weight", "model/backbone.1.weight", "model/head.weight", "optimizer"):
        assert (name in globs) == glob.startswith("!")
    assert globs.unmatched() == {glob: meant}
