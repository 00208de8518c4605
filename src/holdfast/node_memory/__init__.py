"""What lies in the memory of a node, and who may change it: slots that outlive their processes. No torch."""
