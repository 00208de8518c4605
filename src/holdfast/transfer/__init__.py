"""How bytes move: pipelines that stream sources to files and files to targets through bounded memory. No torch.

The package is `holdfast.transfer`, and so is the public function that fills one live state from another. The import
system binds a package as an attribute of its parent whenever a part of it is imported, so no other object can keep that
name: the package itself can be called, and is that function. The function lives in ``holdfast.publishing``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType


class _Transfer(ModuleType):
    """This package, as the public function."""

    def __call__(self, *args: object, **options: object) -> object:
        return importlib.import_module("holdfast.publishing").transfer(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(importlib.import_module("holdfast.publishing").transfer)


sys.modules[__name__].__class__ = _Transfer
