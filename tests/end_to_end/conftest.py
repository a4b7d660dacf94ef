"""What the runs of whole commands have in common."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    """Tiny programs run for microseconds; what takes time is compiling them, in every process that is started here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
        yield
