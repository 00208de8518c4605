"""Attacks on readers: what each does to a sound run, and a process with little time and memory that reads it."""
