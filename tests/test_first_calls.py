"""The first calls of several threads at once: each works, and the interpreter lives."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

#: Threads that switch as often as possible, and whose first calls come at once.
SCRIPT = """
import sys, threading
sys.setswitchinterval(1e-6)
import torch, holdfast
barrier, failed = threading.Barrier(12), []
def work(number):
    state = {"w": torch.arange(10.0), "epoch": number}
    barrier.wait()
    try:
        holdfast.save(f"{sys.argv[1]}/{number}", state, 1)
        holdfast.load(f"{sys.argv[1]}/{number}", state)
        assert holdfast.open(f"{sys.argv[1]}/{number}").value("epoch") == number
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 20))])
def test_threads_whose_first_calls_come_at_once_do_not_crash_the_interpreter(tmp_path: Path, number: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


#: Forked processes. In each, threads use torch for the first time at one moment, after a call has begun.
FORKS = """
import os, threading, torch
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
torch.set_num_threads(2)
torch.empty(1 << 16, dtype=torch.float64).copy_(torch.ones(1 << 16))
num_failed = 0
for _ in range(20):
    if (pid := os.fork()) == 0:
        default_channel("load", deadline=Deadline(5.0))
        barrier, errors = threading.Barrier(6), []
        def work():
            barrier.wait()
            try:
                torch.empty(1 << 16, dtype=torch.float64).copy_(torch.ones(1 << 16))
            except RuntimeError as error:
                errors.append(error)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(len(errors))
    num_failed += os.waitpid(pid, 0)[1] != 0
assert not num_failed, num_failed
"""


def test_threads_of_a_forked_process_found_no_pool_of_threads_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_types_are_decoded_in_one_place_where_a_lock_is_held_for_the_first_time() -> None:
    root = Path(holdfast.__file__).parent
    calls = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("decode", "Decoder", "convert")
        if re.fullmatch(r"msgspec(\.\w+)?", ast.unparse(node.value))
    }
    assert calls == {"decoding.py"}
