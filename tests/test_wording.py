from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest

from holdfast.wording import count, kind_of, with_article


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 boxes"), (1, "1 box"), (2, "2 boxes"), (1_234, "1,234 boxes")], ids=str
)
def test_a_noun_agrees_with_its_number(number: int, text: str) -> None:
    assert count(number, "box", "boxes") == text
    assert count(number, "file") == text.replace("boxes", "files").replace("box", "file")


@pytest.mark.parametrize(
    "text",
    [
        "a Linear",
        "an AdamW",
        "an LRScheduler",
        "an SGD",
        "a UserDict",
        "a uint8",
        "a OneCycleLR",
        "an Upsample",
        "an int",
        "an argparse.Namespace",
        "a UUID",
        "an 'epoch'",
        "a 'seal'",
    ],
)
def test_a_noun_has_its_article(text: str) -> None:
    assert with_article(text.partition(" ")[2]) == text


def test_a_kind_is_the_type_with_its_article() -> None:
    assert [kind_of(item) for item in (argparse.Namespace(), 1, "a")] == ["a Namespace", "an int", "a str"]


def test_no_message_puts_an_article_or_a_bare_length_before_a_name_itself() -> None:
    found = []
    for path in (Path(__file__).parent.parent / "src").rglob("*.py"):
        for text in ast.walk(ast.parse(path.read_text())):
            if not isinstance(text, ast.JoinedStr):
                continue
            source = ast.unparse(text)
            if re.search(r"\b[Aa]n? \{", source) or re.search(r"\{len\([^{}]*\)(:,)?\} \w+s\b", source):
                found.append(f"{path.name}:{text.lineno}: {source}")
    assert found == [], "use `count`, `with_article` or `kind_of` of holdfast.wording"
