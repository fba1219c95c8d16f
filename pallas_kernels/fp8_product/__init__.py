from pallas_kernels.fp8_product.api import fp8_product
from pallas_kernels.fp8_product.quantise import BLOCK, E4M3, quantised_blocks
from pallas_kernels.fp8_product.reference import bytes_of_products

__all__ = ["BLOCK", "E4M3", "bytes_of_products", "fp8_product", "quantised_blocks"]
