"""Where bytes live: one small protocol (`holdfast.store.base`), its backends, and their deadlines."""
