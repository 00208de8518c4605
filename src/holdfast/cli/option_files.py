"""Files that options name."""

from __future__ import annotations

from pathlib import Path

from holdfast import mapping as rules
from holdfast.errors import ConfigurationError


def rules_in(path: str) -> tuple[rules.Rule, ...]:
    """The rules of the mapping file that ``--mapping`` names; none for ""."""
    return rules.from_toml(option_text(path, "mapping", code="config.mapping")) if path else ()


def option_text(path: str, option: str, *, code: str) -> str:
    """The text of the file that an option names. Raises `ConfigurationError` with `code` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error}.",
            code=code,
            action=f"Name a TOML file with --{option}.",
            path=path,
        ) from error
