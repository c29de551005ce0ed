"""What a test that needs a GPU does where there is none."""

import os

import pytest

from vmmd.driver.cuda_vmm import available


def require_gpu() -> None:
    """Skips where the CUDA driver cannot be used, by what is missing; fails instead with STRATA_REQUIRE_GPU=1."""
    if missing := available():
        reason = f"the CUDA driver cannot be used here; missing: {'; '.join(missing)}"
        if os.environ.get("STRATA_REQUIRE_GPU") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
