"""An export of a large tensor takes little memory, and reads and writes each byte once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from tests.support.command_line import ENVIRONMENT

NBYTES = 1 << 30
MEASURED = """
import json, re, sys
import holdfast
report = holdfast.export(*sys.argv[1:])
peak = 1024 * int(re.search("VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1])
print(json.dumps([peak, report.read_nbytes, report.written_nbytes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_an_export_of_a_tensor_of_one_gib_stays_below_512_mib(tmp_path: Path, to: str) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.arange(NBYTES // 4, dtype=torch.int32)}, 1)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "run"), str(tmp_path / "new"), to]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    peak, read, written = json.loads(done.stdout)
    assert peak < 512 << 20  # with Python, and with torch for DCP
    assert NBYTES <= read <= NBYTES + 4096
    assert NBYTES < written < NBYTES + 16384
