"""One request: its parameters, its progress and its output."""
