"""Training of drafters, and of small targets, on the same modules and parameters that decode."""
