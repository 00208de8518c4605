"""Tests of Megatron are collected where it is installed: in the environment of ``make test-megatron``."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("megatron") else ["test_megatron_checkpoints.py", "test_megatron_jobs.py"]
