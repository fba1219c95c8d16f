"""How products are split over thread blocks, for shapes that were measured on a GPU.

    python scripts/tune_fp8_product.py

prints such lines. Here are the calls of Qwen3-8B and 4B with 128, 256 and 512 tokens, and those of
14B for which the plan's estimate is worse by 3 % or more. Other shapes are split by the estimate.
"""

Shape = tuple[int, int, int, str]
"""Tokens, outputs, inputs, and the dtype of the rows as they are multiplied."""

MEASURED: dict[Shape, tuple[int, int]] = {
    (128, 4096, 4096, "bfloat16"): (128, 4),
    (128, 24576, 4096, "bfloat16"): (192, 1),
    (128, 4096, 12288, "bfloat16"): (128, 4),
    (128, 6144, 4096, "bfloat16"): (192, 4),
    (256, 4096, 4096, "bfloat16"): (128, 2),
    (256, 24576, 4096, "bfloat16"): (192, 1),
    (256, 4096, 12288, "bfloat16"): (128, 2),
    (256, 6144, 4096, "bfloat16"): (192, 2),
    (512, 4096, 4096, "bfloat16"): (128, 1),
    (512, 24576, 4096, "bfloat16"): (256, 1),
    (512, 4096, 12288, "bfloat16"): (256, 2),
    (512, 6144, 4096, "bfloat16"): (192, 1),
    (128, 2560, 4096, "bfloat16"): (128, 4),
    (128, 19456, 2560, "bfloat16"): (128, 2),
    (128, 2560, 9728, "bfloat16"): (128, 4),
    (128, 6144, 2560, "bfloat16"): (192, 4),
    (256, 2560, 4096, "bfloat16"): (128, 2),
    (256, 19456, 2560, "bfloat16"): (256, 2),
    (256, 2560, 9728, "bfloat16"): (128, 2),
    (256, 6144, 2560, "bfloat16"): (192, 2),
    (512, 2560, 4096, "bfloat16"): (128, 1),
    (512, 19456, 2560, "bfloat16"): (128, 1),
    (512, 2560, 9728, "bfloat16"): (256, 2),
    (512, 6144, 2560, "bfloat16"): (192, 1),
    (128, 4096, 4096, "float8_e4m3fn"): (128, 2),
    (128, 24576, 4096, "float8_e4m3fn"): (192, 1),
    (128, 4096, 12288, "float8_e4m3fn"): (128, 2),
    (128, 6144, 4096, "float8_e4m3fn"): (128, 2),
    (256, 4096, 4096, "float8_e4m3fn"): (128, 2),
    (256, 24576, 4096, "float8_e4m3fn"): (192, 1),
    (256, 4096, 12288, "float8_e4m3fn"): (128, 2),
    (256, 6144, 4096, "float8_e4m3fn"): (128, 1),
    (512, 4096, 4096, "float8_e4m3fn"): (128, 1),
    (512, 24576, 4096, "float8_e4m3fn"): (192, 1),
    (512, 4096, 12288, "float8_e4m3fn"): (128, 1),
    (512, 6144, 4096, "float8_e4m3fn"): (192, 1),
    (128, 2560, 4096, "float8_e4m3fn"): (128, 4),
    (128, 19456, 2560, "float8_e4m3fn"): (256, 1),
    (128, 2560, 9728, "float8_e4m3fn"): (128, 4),
    (128, 6144, 2560, "float8_e4m3fn"): (128, 2),
    (256, 2560, 4096, "float8_e4m3fn"): (128, 2),
    (256, 19456, 2560, "float8_e4m3fn"): (128, 1),
    (256, 2560, 9728, "float8_e4m3fn"): (128, 2),
    (256, 6144, 2560, "float8_e4m3fn"): (128, 1),
    (512, 2560, 4096, "float8_e4m3fn"): (128, 1),
    (512, 19456, 2560, "float8_e4m3fn"): (128, 1),
    (512, 2560, 9728, "float8_e4m3fn"): (128, 1),
    (512, 6144, 2560, "float8_e4m3fn"): (192, 1),
    (256, 5120, 5120, "bfloat16"): (128, 1),
    (512, 5120, 17408, "float8_e4m3fn"): (256, 1),
    (64, 34816, 5120, "float8_e4m3fn"): (128, 1),
}
"""For each shape, the outputs of a thread block and the parts of the inputs."""
