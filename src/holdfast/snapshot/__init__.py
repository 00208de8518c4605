"""A guarded, consistent copy of live state into a slot of the node's memory."""
