"""The parts that both models are built from."""
