"""Measuring: what to run, how to load the engine, what came out, and where the time went."""
