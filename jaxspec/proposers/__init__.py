"""Proposers: they draft tokens that the target then verifies."""
