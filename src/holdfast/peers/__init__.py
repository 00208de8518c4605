"""How keepers reach each other: their messages, the proof that both belong to one job, and TCP. No torch."""
