"""The contents of a node's memory, and who may change them: slots that outlive their processes. No torch."""
