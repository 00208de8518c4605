"""This room says how a job gets its newest state back after nodes were lost: from which copy each file is read.

It is pure: it uses no clock, no files and no torch.
"""
