"""The memory tier of a node: slots that outlive the processes that fill them. Never imports torch."""
