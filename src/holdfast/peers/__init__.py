"""The connections between keepers: messages, the proof that both belong to one job, and TCP. No torch."""
