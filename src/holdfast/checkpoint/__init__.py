"""One checkpoint: opened by its seal, read by parts, verified, compared. Never imports torch."""
