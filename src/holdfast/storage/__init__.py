"""Where bytes live: one small protocol (`holdfast.storage.base`) and its backends."""
