"""The agreement of a job's ranks on one description of their state, one plan and one place for a checkpoint."""
