"""Recorded events of a run: their form in files, and what can be seen in them. Starts without torch."""
