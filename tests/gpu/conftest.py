"""Frees what tests of wide models leave on a GPU, because other tests run there beside them."""

import gc

import pytest


@pytest.fixture(autouse=True)
def nothing_stays_on_the_gpu(request: pytest.FixtureRequest):
    yield
    if request.node.get_closest_marker("gpu"):
        import wide_pair

        wide_pair.engine.cache_clear()
        wide_pair.params.cache_clear()
        gc.collect()
