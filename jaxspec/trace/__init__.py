"""Recording, reading and drawing XLA profiles."""
