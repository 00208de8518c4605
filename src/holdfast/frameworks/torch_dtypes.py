"""The dtypes of torch that can be stored."""

from __future__ import annotations

import torch

from holdfast.format.dtypes import DTYPES

#: The names of the dtypes that can be stored.
DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: name for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
