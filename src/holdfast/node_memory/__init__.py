"""The memory of a node: slots that outlive their processes, and the rules for changing them. No torch."""
