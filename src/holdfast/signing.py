"""The keys of this process, which sign the seals and commits that it writes, and verify those that it reads.

They come from the environment alone, so that every reader has them by the same way: ranks, keepers, the command line.
No record, message or log holds a key; records hold the first half of a digest of the key, by which a reader finds it.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError, CorruptError

#: The reader feature of checkpoints whose seal and commit are signed, and whose digests are SHA-256.
SIGNED: Final = "signed"
#: The environment variables: a file with keys, or the keys themselves; and whether readers refuse what is not signed.
FILE: Final = "HOLDFAST_SIGNING_KEY_FILE"
KEYS: Final = "HOLDFAST_SIGNING_KEYS"
REQUIRED: Final = "HOLDFAST_REQUIRE_SIGNATURE"

#: A key has 32 to 128 bytes.
_KEY: Final = re.compile(r"(?:[0-9a-fA-F]{2}){32,128}")
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})
_TAIL: Final = re.compile(rb',"key":"([0-9a-f]{32})","hmac":"([0-9a-f]{64})"')
_TAIL_NBYTES: Final = len(',"key":"') + 32 + len('","hmac":"') + 64 + len('"')

#: The next action where the process may be a keeper.
_IN_A_KEEPER: Final = (
    " If it is a keeper, a job with other keys started it: end it with holdfast node RUN --stop; the next save or "
    "restore starts one that has the keys of its job."
)

#: Files of keys that the log has told of.
_told: Final = set[str]()
_log = logging.getLogger(__name__)


class SigningKey(NamedTuple):
    """A secret key. `id` names it in records."""

    secret: bytes

    @property
    def id(self) -> str:
        """The name of the key, which tells nothing about it."""
        return hashlib.sha256(b"holdfast key " + self.secret).hexdigest()[:32]

    def hmac(self, data: bytes) -> str:
        """The HMAC-SHA256 of `data`, in hexadecimal digits."""
        return hmac.digest(self.secret, data, "sha256").hex()

    def __repr__(self) -> str:
        return f"SigningKey({self.id})"


def features() -> tuple[str, ...]:
    """The reader features of new checkpoints: `SIGNED` where this process has keys."""
    return (SIGNED,) if keys() else ()


def has_keys() -> bool:
    """Whether the environment of this process names keys. Reads no file."""
    return bool(os.environ.get(FILE) or os.environ.get(KEYS))


def keys() -> tuple[SigningKey, ...]:
    """The keys of this process; the first one signs. Empty where the environment names none.

    Raises `ConfigurationError`, code ``config.signing_key``, where it names some that cannot be used.
    """
    path, written = os.environ.get(FILE, ""), os.environ.get(KEYS, "")
    if not path and not written:
        return ()
    if path and written:
        raise _unusable(f"{FILE} and {KEYS} are both set")
    if path and not Path(path).is_absolute():
        raise _relative(path)
    try:
        text = _text_of(path) if path else written.replace(",", "\n")
    except (OSError, ValueError) as error:
        raise _unusable(f"the file '{path}' of {FILE} cannot be read ({error})") from error
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not found or not all(map(_KEY.fullmatch, found)):
        raise _unusable(f"the file '{path}'" if path else KEYS, "holds no key, or a line that is none")
    return tuple(SigningKey(bytes.fromhex(line)) for line in found)


def _text_of(path: str) -> str:
    """The text of a file with keys. The log tells once of one that all users of this machine may read."""
    with Path(path).open(encoding="ascii") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & stat.S_IROTH and path not in _told:
            _told.add(path)
            _log.warning("every user may read '%s' (mode %o), and sign with its keys: chmod 600 it", path, mode)
        return file.read()


def is_required() -> bool:
    """Whether this process refuses checkpoints that are not signed."""
    text = os.environ.get(REQUIRED, "").lower()
    if text not in _YES | _NO:
        raise _unusable(f"{REQUIRED}={text!r:.40}", "is neither 1 nor 0")
    return text in _YES


def signed(body: bytes) -> bytes:
    """`body`, a JSON object without its closing brace, with the members that sign it.

    Raises `ConfigurationError`, code ``config.signing_key``, where this process has no key.
    """
    mine = keys()
    if not mine:
        raise _no_key(
            "the manifest of this checkpoint demands a signature, and this process has no key for one", _IN_A_KEEPER
        )
    return body + f',"key":"{mine[0].id}","hmac":"{mine[0].hmac(body)}"'.encode("ascii")


def verified(body: bytes, *, path: str) -> bytes:
    """The `body` that `signed` made, without the members that sign it; `path` is for messages.

    Raises `CorruptError`, code ``corrupt.signature``, where no key of this process signed it, and `ConfigurationError`,
    code ``config.signing_key``, where the process has no key, or not the one that the signature names.
    """
    content, tail = body[:-_TAIL_NBYTES], _TAIL.fullmatch(body[-_TAIL_NBYTES:])
    if tail is None:
        raise _forged(path, "says that it is signed, and has no signature")
    mine = keys()
    if not mine:
        raise _no_key(f"'{path}' is signed, and this process has no key")
    name, found = tail[1].decode("ascii"), tail[2].decode("ascii")
    key = next((key for key in mine if key.id == name), None)
    if key is None:
        raise _no_key(f"'{path}' is signed with the key {name}, which this process does not have", _IN_A_KEEPER)
    if not hmac.compare_digest(key.hmac(content), found):
        raise _forged(path, f"does not match its signature by the key {name}")
    return content


def unsigned(path: str) -> CorruptError:
    """The error for a record that is not signed where signatures are required."""
    return CorruptError(
        f"'{path}' is not signed, but {REQUIRED} is set: anybody who may write there can have made or changed it.",
        code="corrupt.unsigned",
        action=f"Find out who wrote it. To read checkpoints of before you had a key, unset {REQUIRED}.",
        path=path,
    )


def _forged(path: str, what: str) -> CorruptError:
    return CorruptError(
        f"'{path}' {what}: somebody without the key made or changed it.",
        code="corrupt.signature",
        action="Do not use this checkpoint. Find out who may write there, and load another copy or an older one.",
        path=path,
    )


def _no_key(why: str, more: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"{why}.",
        code="config.signing_key",
        action=f"Set {FILE} to the file with the key, on all ranks.{more}",
    )


def _relative(path: str) -> ConfigurationError:
    """The error for a file that a keeper would not find: it works in another folder than the job that starts it."""
    return ConfigurationError(
        f"{FILE} has the path '{path}', which a keeper, in another working directory, would not find.",
        code="config.signing_key",
        action=f"Set it to the whole path, such as '{Path(path).expanduser().absolute()}'.",
    )


def _unusable(subject: str, what: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"{subject} {what}".rstrip() + ".",
        code="config.signing_key",
        action=f"Name in {FILE} a file with one key in each line, of 64 to 256 hexadecimal digits: the first one "
        "signs. Make one with: openssl rand -hex 32.",
    )
