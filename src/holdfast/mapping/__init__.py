"""Rules that change a checkpoint's names, shapes and dtypes on loading: ``holdfast.load(..., mapping=rules)``.

    >>> from holdfast.mapping import Drop, Fuse, Rename
    >>> rules = [
    ...     Fuse([f"model/layers.{{i}}.{x}_proj.weight" for x in "qkv"], "model/layers.{i}.qkv.weight", groups=8),
    ...     Rename("model/layers.{i}.{rest:**}", "model/blocks.{i}.{rest}"),
    ...     Drop("optimizer"),
    ... ]

Rules apply in order, each to the names as the rules before it left them: the first rule sees the stored names, and the
names after the last rule are compared with the live state. A name that no rule matches stays as it is. Rules cost no
reads and no copies: a load writes each stored element directly to its place in the live state.

The first field of a rule, `names`, is a pattern (``holdfast.format.patterns`` says what it matches). A rule that
matches a parameter also applies to the parameter's state in all optimizers.

A load refuses a rule that matches nothing, makes a name that exists already, or does not fit the shapes
(`IncompatibleError`, code ``incompatible.mapping``). Making a rule that is wrong by itself raises `ValueError`.
"""

from holdfast.mapping.families import Family, family
from holdfast.mapping.rules import (
    Cast,
    Crop,
    Drop,
    FromMegatron,
    Fuse,
    Pad,
    Rename,
    Rule,
    Split,
    Stack,
    ToMegatron,
    Transpose,
    Unstack,
    from_toml,
)

__all__ = [
    "Cast",
    "Crop",
    "Drop",
    "Family",
    "FromMegatron",
    "Fuse",
    "Pad",
    "Rename",
    "Rule",
    "Split",
    "Stack",
    "ToMegatron",
    "Transpose",
    "Unstack",
    "family",
    "from_toml",
]
