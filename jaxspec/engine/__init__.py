"""The engine: speculative steps, each a transaction, for many requests at once."""
