"""What `vmmctl doctor` reports: one finding a point, whatever a probe runs into."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

State = Literal["ok", "warn", "fail", "absent"]
"""`fail`: something that a daemon here needs; `absent`: not there, or not tried, and nothing is wrong with that."""


class Finding(NamedTuple):
    """One point: what is, and what to do about it (empty where there is nothing to do)."""

    name: str
    state: State
    what_is: str
    what_to_do: str = ""


Probe = Callable[[], Finding | Iterable[Finding]]


def look(name: str, probe: Probe) -> Iterator[Finding]:
    """The findings of one probe; one that raises ends in a finding of that name."""
    try:
        found = probe()
        yield from [found] if isinstance(found, Finding) else found
    except Exception as error:
        what_is = f"this probe itself failed with {type(error).__name__}: {error}"
        yield Finding(name, "warn", what_is, "report it, with the output of `vmmctl doctor --output json`")
