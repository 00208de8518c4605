"""A real browser without a window. Tests with it are slow ones: no machine has it by itself."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Final

import pytest

BROWSER: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (apt-get install chromium)")


def opened(page: Path, *, script: str = "", is_dark: bool = False, width: int = 1000) -> str:
    """Open a copy of `page` and run `script` in it. Returns the text of the document after that."""
    copy = page.with_name("opened.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return _browse(copy, "--dump-dom", is_dark=is_dark, width=width).decode()


def found_by(page: Path, expression: str, *, is_dark: bool = False, width: int = 1000) -> str:
    """The value of a JavaScript expression in the opened page, as text."""
    script = f"document.title = 'found ' + ({expression})"
    (title,) = re.findall("<title>found (.*?)</title>", opened(page, script=script, is_dark=is_dark, width=width))
    return unescape(str(title))


def screenshot(page: Path, to: Path, *, is_dark: bool = False, width: int = 1000, height: int = 2400) -> None:
    """Write a picture of `page` to a PNG file."""
    _browse(page, f"--screenshot={to}", is_dark=is_dark, width=width, height=height)


def _browse(page: Path, *options: str, is_dark: bool, width: int, height: int = 2400) -> bytes:
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={page.parent / 'browser'}", f"--window-size={width},{height}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # nothing outside is reached
    command += ["--blink-settings=preferredColorScheme=0"] * is_dark
    done = subprocess.run([*command, *options, page.as_uri()], check=True, capture_output=True, timeout=100)
    return done.stdout
