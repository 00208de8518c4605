from __future__ import annotations

import enum
import math
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.errors import CorruptError, StateError
from holdfast.format.names import (
    Key,
    check_components,
    check_names,
    component,
    is_rank_component,
    join,
    own_part,
    parse_component,
    plane_component,
    rank_component,
    split,
)

text = st.text(st.characters(exclude_categories=["Cs"])) | st.text("%/@=2F450inte", max_size=12)
keys: st.SearchStrategy[Key] = st.one_of(
    text, st.integers(-(1 << 1000), 1 << 1000), st.floats(allow_nan=False), st.booleans(), st.binary(), st.none()
)


def same(a: Key, b: Key) -> bool:
    return type(a) is type(b) and a == b and str(a) == str(b)


@given(keys)
def test_a_component_gives_its_key_back(key: Key) -> None:
    assert same(parse_component(component(key)), key)


@given(keys, keys)
def test_different_keys_have_different_components(a: Key, b: Key) -> None:
    assert (component(a) == component(b)) == same(a, b)


@given(st.lists(keys, max_size=6))
def test_a_name_splits_into_the_components_it_was_joined_from(path: list[Key]) -> None:
    components = tuple(map(component, path))
    assert split(join("", *components)) == components


@given(st.lists(keys, min_size=1, max_size=4), st.lists(keys, max_size=4))
def test_joining_below_a_path_appends_components(above: list[Key], below: list[Key]) -> None:
    path = join("", *map(component, above))
    assert split(join(path, *map(component, below))) == tuple(map(component, [*above, *below]))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("tok_emb.weight", "tok_emb.weight"),
        ("a/b@c%", "a%2Fb%40c%25"),
        ("%int=3", "%25int=3"),
        ("", "%empty"),
        (3, "%int=3"),
        (-3, "%int=-3"),
        (True, "%bool=True"),
        (None, "%none"),
        (0.5, "%float=0x1.0000000000000p-1"),
        (math.inf, "%float=inf"),
        (b"\x00\xff", "%bytes=00ff"),
    ],
)
def test_components_are_written_as_specified(key: Key, expected: str) -> None:
    assert component(key) == expected


def test_a_nan_key_stays_a_nan() -> None:
    key = parse_component(component(math.nan))
    assert isinstance(key, float)
    assert math.isnan(key)


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize("key", [(1, 2), Colour.RED, Name("a"), 1j, object(), 1 << 1024, "\ud800"])
def test_other_keys_are_refused_with_the_place_where_they_stand(key: object) -> None:
    with pytest.raises(StateError, match=r"state\.key.*'settings/table'") as caught:
        component(key, path="settings/table")
    assert caught.value.path == "settings/table"


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", "a@b", "a%b", "%", "%2f", "%41", "%none=", "%int=", "%int=03", "%int=+3", "%int= 3", "%int=1_0"),
        *("%bool=true", "%float=1.0", "%float=0x1p0", "%bytes=FF", "%bytes=0", "%list=1", "%empty=", "\ud800"),
        "%int=" + "9" * (sys.get_int_max_str_digits() + 1),
        "%int=" + "9" * 1000,
    ],
)
def test_text_that_no_key_gives_is_corrupt(text: str) -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.name"):
        parse_component(text)


@given(keys)
def test_reserved_components_are_given_by_no_key(key: Key) -> None:
    assert not is_rank_component(component(key))
    assert not component(key).startswith("%plane=")
    assert own_part(join("a", component(key), "b")) is None


@given(st.integers(0, 10**6), st.lists(keys, min_size=1, max_size=3), st.lists(keys, max_size=3))
@example(0, ["\n"], ["\n"])
def test_the_part_of_a_rank_is_found_in_every_name_below_it(rank: int, above: list[Key], below: list[Key]) -> None:
    part = join("", *map(component, above), rank_component(rank))
    assert is_rank_component(rank_component(rank))
    assert own_part(join(part, *map(component, below))) == part


@given(text, text)
def test_different_planes_have_different_components(a: str, b: str) -> None:
    assert (plane_component(a) == plane_component(b)) == (a == b)


@pytest.mark.parametrize("reserved", ["%rank=0", "%plane=data"])
def test_reserved_components_are_no_keys(reserved: str) -> None:
    with pytest.raises(CorruptError, match=r"corrupt\.name"):
        parse_component(reserved)


def is_sound(text: str) -> bool:
    try:
        parse_component(text)
    except CorruptError:
        return is_rank_component(text)
    return True


@given(st.lists(keys.map(component) | st.integers(0, 10**6).map(rank_component), min_size=1, max_size=4))
def test_names_of_keys_and_ranks_are_sound(components: list[str]) -> None:
    assert all(map(is_sound, components))
    check_components(join("", *components))


@given(st.text("a%/@25F0=", max_size=12) | st.lists(st.text("a%25=rnk0", max_size=9), max_size=3).map("/".join))
def test_a_name_is_sound_when_all_its_components_are(name: str) -> None:
    if all(map(is_sound, split(name))):
        check_components(name)
    else:
        with pytest.raises(CorruptError, match=r"corrupt\.name"):
            check_components(name)


@given(st.lists(st.text("a%/@25F0=", max_size=12), max_size=4))
def test_names_are_sound_together_when_each_of_them_is(names: list[str]) -> None:
    if all(is_sound(component) for name in names for component in split(name)):
        check_names(names)
    else:
        with pytest.raises(CorruptError, match=r"corrupt\.name"):
            check_names(names)
