"""This room says how the memory of nodes is protected against the loss of nodes: which nodes keep whose copies or
parity, what is lost with how many nodes, and what it costs in memory and network.

It is pure: it uses no clock, no files and no torch.
"""

from holdfast.protection.policies import Copies, Parity

__all__ = ["Copies", "Parity"]
