"""Where the time goes: named stages of this process, recorded by whichever thread goes through them.

A stage costs about a microsecond, so stages are always recorded, but there are none within the decode loop.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """A stage that has ended, on `time.monotonic`'s clock. A moment is one that takes no time."""

    name: str
    thread: str
    began_s: float
    ended_s: float


class Recorder:
    """Collects stages. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stages: list[Stage] = []  # an append is atomic

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Records what runs within; also when that fails."""
        began_s = self._clock()
        try:
            yield
        finally:
            self.add(name, began_s, self._clock())

    def add(self, name: str, began_s: float, ended_s: float) -> None:
        """Records a stage that was not gone through with `stage`."""
        self._stages.append(Stage(name, threading.current_thread().name, began_s, ended_s))

    def moment(self, name: str) -> None:
        """Records that something was reached."""
        now_s = self._clock()
        self.add(name, now_s, now_s)

    def stages(self) -> list[Stage]:
        """What has been recorded, in the order of the beginnings."""
        return sorted(self._stages, key=lambda stage: stage.began_s)


_recorder = Recorder()
stage = _recorder.stage
add = _recorder.add
moment = _recorder.moment
stages = _recorder.stages


def as_objects(recorded: Sequence[Stage], zero_s: float) -> list[dict[str, Any]]:
    """Stages for JSON: where each began, in seconds since `zero_s`, and how long it took."""
    return [
        {
            "stage": stage.name,
            "thread": stage.thread,
            "began_s": round(stage.began_s - zero_s, 4),
            "took_s": round(stage.ended_s - stage.began_s, 4),
        }
        for stage in recorded
    ]


def as_lines(recorded: Sequence[Stage], zero_s: float) -> list[str]:
    """Stages as a table for a person."""
    width = max((len(stage.name) for stage in recorded), default=0)
    return [f"{'':{width}}  began s   took s  thread"] + [
        f"{stage.name:{width}}  {stage.began_s - zero_s:7.3f}  {stage.ended_s - stage.began_s:7.3f}  {stage.thread}"
        for stage in recorded
    ]
