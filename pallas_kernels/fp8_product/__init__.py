from pallas_kernels.fp8_product.api import fp8_product, fp8_product_in_parts
from pallas_kernels.fp8_product.matrix import Fp8Matrix
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3, quantised_blocks
from pallas_kernels.fp8_product.reference import bytes_of_products
from pallas_kernels.fp8_product.rounded import RoundedRows, Rounding

__all__ = [
    "BLOCK",
    "E4M3",
    "Fp8Matrix",
    "RoundedRows",
    "Rounding",
    "bytes_of_products",
    "fp8_product",
    "fp8_product_in_parts",
    "quantised_blocks",
]
