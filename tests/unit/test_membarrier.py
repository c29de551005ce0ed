"""membarrier: registration and barrier."""

import pytest

from vmmd.driver import membarrier


def test_register_and_issue() -> None:
    """This kernel registers a process and gives a barrier, from the first call on and again."""
    if not membarrier.register():
        pytest.skip("this kernel, or the sandbox around it, has no membarrier")
    assert membarrier.register()
    assert membarrier.issue()


def test_unknown_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the call's number is unknown, it is reported as missing."""
    monkeypatch.setattr(membarrier, "_SYSCALL", None)
    assert not membarrier.register()
    assert not membarrier.issue()
