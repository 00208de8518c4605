"""How the ranks of a job agree on one description of their state, one plan and one place for a checkpoint."""
