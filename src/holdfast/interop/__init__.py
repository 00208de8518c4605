"""Checkpoints of other systems, read directly. One module for each format; `formats` has the table of them."""
