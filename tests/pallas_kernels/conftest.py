import pytest
from h100 import number_kernels


@pytest.fixture
def compiles_kernels_anew(compiles_anew, monkeypatch):
    """For tests of what the compiler says about a kernel, which it says only the first time."""
    number_kernels(monkeypatch)
