"""Trains drafters and small targets, with the same modules and parameter trees as decoding."""
