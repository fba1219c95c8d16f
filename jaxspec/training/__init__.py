"""Trains drafters, and small targets, with the modules and parameter trees that also decode."""
