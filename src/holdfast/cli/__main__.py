"""``python -m holdfast.cli``: the command line."""

from holdfast.cli import main

main()
