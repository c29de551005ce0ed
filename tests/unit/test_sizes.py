"""How sizes are said."""

import pytest

from vmmd.sizes import size_text

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0.00 MiB"),
        (MIB, "1.00 MiB"),
        (96 * MIB, "96.00 MiB"),
        (384 * MIB, "0.38 GiB"),
        (3 << 28, "0.75 GiB"),
        (GIB, "1.00 GiB"),
    ],
)
def test_small_sizes_are_said_in_mib(n_bytes: int, text: str) -> None:
    """Sizes are in GiB, those below 0.1 GiB in MiB."""
    assert size_text(n_bytes) == text
