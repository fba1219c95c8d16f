"""The engine: one speculative transaction after another, for many requests at once."""
