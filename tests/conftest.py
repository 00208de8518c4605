"""Settings for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Read when torch is first imported, here and by the rank processes: several of them share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines that run tests are shared, so the time of one example says nothing about the code.
settings.register_profile("holdfast", deadline=None, print_blob=True)
settings.load_profile("holdfast")
