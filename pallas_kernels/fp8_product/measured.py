"""How products are split over thread blocks, for shapes that were measured on a GPU.

    python scripts/tune_fp8_product.py

prints this table. Other shapes are split by the plan's estimates.
"""

Shape = tuple[int, int, int, str]
"""Tokens, outputs, inputs, and the dtype of the rows as they are multiplied."""

MEASURED: dict[Shape, tuple[int, int]] = {}
"""Outputs of a thread block, and parts of the inputs."""
