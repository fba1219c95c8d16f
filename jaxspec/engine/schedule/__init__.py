"""Chooses the requests and the programs of each step, and processes the results."""
