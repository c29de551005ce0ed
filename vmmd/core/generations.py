"""Generations: when may a slot that was unpublished be written?

The rule, over the session page of ``strata_api.v1.pages``: a session is *behind*
generation G while its oldest unretired step reads under an older one. The daemon
rewrites entries, bumps the generation, issues a process-wide memory barrier, and
waits until no session of the arena is behind. ``tests/unit/test_generations.py``
explores all interleavings of this with store buffers, stops and deaths.
"""

from collections.abc import Sequence

from strata_api.v1 import pages


def is_behind(line: Sequence[int], generation: int) -> bool:
    """Whether a session, by its line of the session page, may still read under an older generation.

    `retired` is read first and once more at the end: the ring word of a step that
    retires in between may be another step's by then, so that counts as behind, and
    the caller looks again. A line that makes no sense (more steps in flight than the
    ring holds) counts as behind, which hurts its own domain alone.
    """
    retired = line[pages.WORD_RETIRED]
    launched = line[pages.WORD_LAUNCHED]
    if retired >= launched:
        return False
    if launched - retired > pages.STEPS_IN_FLIGHT_MAX:
        return True
    oldest = line[pages.WORD_RING + (retired + 1) % pages.RING_WORDS]
    return oldest < generation or line[pages.WORD_RETIRED] != retired
