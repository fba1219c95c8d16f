"""Checkpoints on disk or on the hub: what they say, whether they fit, and their weights."""
