"""Checkpoints on disk or on the hub: their configs, whether a pair fits, and their weights."""
