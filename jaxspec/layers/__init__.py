"""The parts that targets and drafters are built from."""
