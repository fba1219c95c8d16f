"""Caches of committed tokens as plain values: arguments and results, no hidden state."""
