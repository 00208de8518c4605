"""Tests of Megatron, Ray, torchtitan and torchft are collected where these are installed: in other environments."""

from __future__ import annotations

from importlib.util import find_spec

_FILES = {
    "megatron": ["test_megatron_checkpoints.py", "test_megatron_fsdp.py", "test_megatron_jobs.py"],
    "ray": ["test_ray_train.py"],
    "torchft": ["test_torchft.py"],
    "torchtitan": ["test_torchtitan_jobs.py"],
}

collect_ignore = [file for package, files in _FILES.items() if not find_spec(package) for file in files]
