"""A cache of lowered kernels that later processes read.

Lowering a kernel runs in Python and takes seconds. A kernel changes less often than the models that
call it, so it is kept apart from the programs that it is part of. Kernels that are missing can be
lowered by several processes at once.
"""

from pallas_kernels.kept.call import keep_lowered_kernels, kept, lowered_by_workers
from pallas_kernels.kept.files import Files
from pallas_kernels.kept.surroundings import hash_of_sources, settings

__all__ = [
    "Files",
    "hash_of_sources",
    "keep_lowered_kernels",
    "kept",
    "lowered_by_workers",
    "settings",
]
