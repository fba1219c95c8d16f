"""Measuring: requests to send, load on an engine, results, and where the time goes."""
