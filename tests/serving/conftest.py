"""One server for the tests of this folder. Imports nothing of the packages before a test runs,
because the hook that checks shapes has to be installed before them."""

import pytest


@pytest.fixture(scope="session")
def server():
    from running_server import QUEUED, running, until, warm_engine

    from jaxspec.serving.options import ServingOptions
    from jaxspec.serving.service import Phase

    with running(warm_engine, ServingOptions(max_queued_requests=QUEUED)) as one:
        until(lambda: one.service.phase is not Phase.STARTING, "the server is still starting")
        assert one.service.phase is Phase.READY, one.service.error
        yield one
    assert not one.errors
