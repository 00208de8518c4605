"""Patterns of names: globs that select, and patterns whose fields make other names.

``*`` matches any text without ``/``, so it crosses the dots of a module's names; ``**`` matches any text. ``{field}``
matches one component between dots and slashes, ``{field:*}`` and ``{field:**}`` match like ``*`` and ``**``. A field
that occurs twice must match the same text both times. ``{{`` and ``}}`` are braces. A pattern that matches the name of
a container matches every name below it, so ``model`` matches everything of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.errors import IncompatibleError
from holdfast.format.near import near

_TOKEN = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(?::(\*\*?))?\}|\*\*|\*|[{}]")
_STANDS_FOR = {"*": "[^/]*", "**": ".*", None: "[^./]+"}


class Pattern:
    """A pattern of names. Raises `ValueError` for a malformed one, `TypeError` for anything but a string."""

    def __init__(self, text: str) -> None:
        self.text = text
        fields: dict[str, None] = {}
        pieces, self.has_wildcards = [], False
        for literal, token, field, kind in _tokens(text):
            pieces.append(re.escape(literal))
            if field is not None:
                pieces.append(f"(?P={field})" if field in fields else f"(?P<{field}>{_STANDS_FOR[kind]})")
                fields[field] = None
            elif token.startswith("*"):
                pieces.append(_STANDS_FOR[token])
                self.has_wildcards = True
            elif token:
                pieces.append(re.escape(token[0]))
        self.fields = tuple(fields)
        self._regex = re.compile("".join(pieces), re.DOTALL)
        self._above = re.compile(f"(?:{self._regex.pattern})(?=/|\\Z)", re.DOTALL)

    def match(self, name: str) -> int | None:
        """Length of the part of `name` that matches: all of it, or the name of a container above it; None for none."""
        found = self._above.match(name)
        return found.end() if found else None

    def fields_of(self, name: str) -> dict[str, str] | None:
        """The text that each field matched, where the pattern matches all of `name`; else None."""
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def renamed(self, name: str, to: Template) -> str | None:
        """`name` with its matching part replaced by the filled template `to`; None when nothing matches."""
        found = self._above.match(name)
        return to.fill(found.groupdict()) + name[found.end() :] if found else None


class Template:
    """A name with fields to fill. Raises `ValueError` for a malformed one, `TypeError` for anything but a string."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[tuple[str, str | None]] = []
        for literal, token, field, kind in _tokens(text):
            if kind is not None or token in ("*", "**"):
                raise ValueError(f"{text!r} makes a new name, so it may have fields such as {{i}}, but no wildcards")
            self._pieces.append((literal + (token[:1] if field is None else ""), field))
        self.fields = tuple(dict.fromkeys(field for _, field in self._pieces if field is not None))

    def fill(self, fields: Mapping[str, str]) -> str:
        """The name in which each field is replaced by its text in `fields`."""
        return "".join(literal + ("" if field is None else fields[field]) for literal, field in self._pieces)


def _tokens(text: str) -> Iterable[tuple[str, str, str | None, str | None]]:
    """The tokens of a pattern, each as: the literal text before it, the token, and its field's name and wildcard."""
    if not isinstance(text, str):
        raise TypeError(f"a pattern of names must be a string, not {text!r}")
    if not text:
        raise ValueError("a pattern of names is empty")
    last = 0
    for token in _TOKEN.finditer(text):
        if token.group() in ("{", "}"):
            raise ValueError(f"{text!r} has a brace outside of a field such as {{i}}; write {{{{ or }}}} for a brace")
        yield text[last : token.start()], token.group(), token[1], token[2]
        last = token.end()
    yield text[last:], "", None, None


class Globs:
    """A set of names, given by globs: the names that a glob matches, without those that a glob behind ``!`` matches.

    Where all globs are negative, the set has all other names. It remembers the names that it was asked about, so that
    it can say which globs matched none of them. Raises `ValueError` and `TypeError` for malformed globs.
    """

    def __init__(self, globs: str | Sequence[str]) -> None:
        if not isinstance(globs, Iterable):
            raise TypeError(f"globs must be a string or a list of strings, not {globs!r}")
        texts = (globs,) if isinstance(globs, str) else tuple(globs)
        if not texts:
            raise ValueError("an empty list of globs matches nothing; leave the option out to select everything")
        self._globs = [(text, Pattern(text.removeprefix("!")), text.startswith("!")) for text in map(_checked, texts)]
        self._all_negative = all(negative for _, _, negative in self._globs)
        self._matched: set[str] = set()
        self._asked: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        """Whether the live `name` is in the set. The globs that match it count as matched."""
        known = self._asked.get(name)
        if known is None:
            hits = [(text, negative) for text, pattern, negative in self._globs if pattern.match(name) is not None]
            self._matched.update(text for text, _ in hits)
            known = self._asked[name] = self._decide([negative for _, negative in hits])
        return known

    def covers(self, name: str) -> bool:
        """Whether a name that is not live is in the set. The globs that match it do not count as matched."""
        hits = [negative for _, pattern, negative in self._globs if pattern.match(name) is not None]
        return self._decide(hits)

    def _decide(self, hits: Sequence[bool]) -> bool:
        return not any(hits) and (bool(hits) or self._all_negative)

    def unmatched(self) -> dict[str, list[str]]:
        """The globs that matched none of the live names that were asked about, each with some near names.

        Where each glob matched some names, but the set has none of the names, the result is one entry that joins all
        globs.
        """
        lost = [text for text, _, _ in self._globs if text not in self._matched]
        if not lost and self._asked and not any(self._asked.values()):
            return {", ".join(text for text, _, _ in self._globs): []}
        return {text: meant(text.removeprefix("!"), self._asked) for text in lost}


def meant(text: str, asked: Collection[str], *, below: str = "*") -> list[str]:
    """Patterns or names that the user may have meant by a pattern that matched none of the names `asked`.

    These are: the object above it that is selected only as a whole; the names `below` a part of a module; the same
    pattern with a slash for its first dot, or with the container that it lacks; or near names.
    """
    wholes = [name for name in asked if text.startswith(f"{name}/")]
    if wholes:
        return [max(wholes, key=len)]
    names = {name[:end] for name in asked for end in _ends(name)}
    if any(name.startswith(f"{text}.") for name in names):
        return [f"{text}.{below}"]
    slashed = text.replace(".", "/", 1)
    if slashed in names:
        return [slashed]
    if slashed != text and any(name.startswith(f"{slashed}.") for name in names):
        return [f"{slashed}.{below}"]
    pattern = Pattern(text)
    cut = {name[:at] for name in names for at in _ends(name) if pattern.match(name[at + 1 :]) is not None}
    return [f"{container}/{text}" for container in sorted(cut)[:3]] or near(text, names)


def _ends(name: str) -> list[int]:
    """The positions at which the names of the containers of `name` end, and at which `name` itself ends."""
    return [index for index, letter in enumerate(name) if letter == "/"] + [len(name)]


def _checked(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"a glob must be a string, not {text!r}")
    return text


def check_matched(option: str, ranks: Sequence[Mapping[str, Collection[str]]], *, where: str) -> None:
    """Raise `IncompatibleError` for globs of an option that match nothing on any rank.

    `ranks` has, for each rank, the globs that matched nothing there, with near names.
    """
    nowhere = set(ranks[0]).intersection(*ranks[1:])
    if nowhere:
        close = {glob: sorted({name for rank in ranks for name in rank[glob]})[:3] for glob in sorted(nowhere)}
        action = "Give globs of live names; optimizers and objects with a state_dict have one name each."
        raise unmatched(option, close, where=where, action=action)


def unmatched(option: str, globs: Mapping[str, Collection[str]], *, where: str, action: str) -> IncompatibleError:
    """The error for globs of an option that match no name in `where`; `globs` gives near names for each."""
    lines = []
    for glob, close in globs.items():
        hint = f" (did you mean {', '.join(map(repr, close))}?)" if close else ""
        lines.append(f"{glob!r}{hint}")
    return IncompatibleError(
        f"{option} matches nothing in {where} with {', '.join(lines)}.",
        code={"select": "incompatible.select", "cast": "incompatible.cast"}[option],
        action=action,
    )
