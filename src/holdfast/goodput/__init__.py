"""This room says how often a job should save: it has the failures of published fleets, a model of the time that saves
and failures cost, and the search for the intervals that cost least.

It is pure: it uses no clock, no files and no torch.
"""
