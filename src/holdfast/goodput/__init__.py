"""How often to save: failures, the time that saves and failures cost, and the intervals that cost least.

Pure: no clock, no files, no torch.
"""
