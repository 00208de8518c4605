"""What a checkpoint's tensors become when they are loaded: rules for ``holdfast.load(..., mapping=rules)``.

    >>> from holdfast.mapping import Drop, Fuse, Rename
    >>> rules = [
    ...     Fuse([f"model/layers.{{i}}.{x}_proj.weight" for x in "qkv"], "model/layers.{i}.qkv.weight", groups=8),
    ...     Rename("model/layers.{i}.{rest:**}", "model/blocks.{i}.{rest}"),
    ...     Drop("optimizer"),
    ... ]

Rules apply in order, each to the names as the rules before it left them: first to what is stored, last what is
compared with the live state. A name that no rule matches stays as it is. Nothing is read and nothing copied for a rule:
elements go from where they are stored to where they belong.

The first field of a rule, `names`, is a pattern (``holdfast.format.patterns`` says what it matches). What matches a
parameter applies to its state in all optimizers, too.

A rule that matches nothing, makes a name that is there already, or does not fit the shapes is refused
(`IncompatibleError`, code ``incompatible.mapping``); one that makes no sense by itself is a `ValueError`.
"""

from holdfast.mapping.rules import (
    Cast,
    Crop,
    Drop,
    Fuse,
    Pad,
    Rename,
    Rule,
    Split,
    Stack,
    Transpose,
    Unstack,
    from_toml,
)

__all__ = [
    "Cast",
    "Crop",
    "Drop",
    "Fuse",
    "Pad",
    "Rename",
    "Rule",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
    "from_toml",
]
