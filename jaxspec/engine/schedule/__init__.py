"""Which requests run in a step, what runs, and what becomes of its results."""
