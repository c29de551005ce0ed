"""Stages and the table of them."""

import threading
from itertools import count

import pytest

from strata_client.timings import Recorder, as_lines, as_objects


def recorder() -> Recorder:
    """One whose clock goes on by a second at each look."""
    ticks = count(100.0)
    return Recorder(lambda: next(ticks))


def test_stages_of_several_threads_in_the_order_of_their_beginnings() -> None:
    """A stage has its thread, beginning and end; those that enclose others come first."""
    recorded = recorder()
    with recorded.stage("outer"):
        thread = threading.Thread(target=lambda: recorded.moment("there"), name="other")
        thread.start()
        thread.join()
    assert recorded.stages() == [("outer", "MainThread", 100.0, 102.0), ("there", "other", 101.0, 101.0)]


def test_a_stage_that_fails_is_recorded() -> None:
    """Where the time went is known also of what went wrong."""
    recorded = recorder()
    with pytest.raises(ValueError, match="no"), recorded.stage("bad"):
        raise ValueError("no")
    assert [stage.name for stage in recorded.stages()] == ["bad"]


def test_table_and_objects() -> None:
    """Both have each stage's beginning since zero and how long it took, in seconds."""
    recorded = recorder()
    recorded.add("interpreter", 99.5, 99.75)
    with recorded.stage("map"):
        pass
    assert as_objects(recorded.stages(), 99.5) == [
        {"stage": "interpreter", "thread": "MainThread", "began_s": 0.0, "took_s": 0.25},
        {"stage": "map", "thread": "MainThread", "began_s": 0.5, "took_s": 1.0},
    ]
    assert as_lines(recorded.stages(), 99.5) == [
        "             began s   took s  thread",
        "interpreter    0.000    0.250  MainThread",
        "map            0.500    1.000  MainThread",
    ]
