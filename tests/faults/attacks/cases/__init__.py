"""One attack per file: what it does, the code of the error that it must give, and the doing."""
