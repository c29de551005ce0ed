"""Which tokens cells hold: the token page, written so that it is true at every moment."""

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from strata_api.v1 import names, pages

from strata_client.mapping import U64
from strata_client.transcript import Transcript


def test_what_cells_hold_in_common_with_a_prompt() -> None:
    """Cells are of use as far as their tokens are the prompt's, whichever of the two is longer."""
    transcript = Transcript.private(8)
    assert transcript.common([1, 2]) == 0
    transcript.add([1, 2])
    transcript.add([3])
    assert [transcript.common(t) for t in ([1, 2, 3, 4], [1, 2, 3], [1, 2], [1, 9, 3], [9], [])] == [3, 3, 2, 1, 0, 0]
    transcript.cut(5)
    assert transcript.complete == 3
    transcript.cut(1)
    assert (transcript.complete, transcript.common([1, 2, 3])) == (1, 1)
    transcript.add([7])
    assert transcript.common([1, 7, 3]) == 2


class Noted:
    """A token page that notes what it says after every write."""

    def __init__(self, words: npt.NDArray[np.uint64], said: list[tuple[int, list[int]]], begin: int = 0) -> None:
        self._words, self._said, self._begin = words, said, begin

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) and key.stop is None:
            return Noted(self._words, self._said, self._begin + key.start)
        return self._words[self._begin :][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._words[self._begin :][key] = value
        self._said.append((int(self._words[pages.WORD_COMPLETE]), self._words[pages.HEADER_WORDS :].tolist()))


def test_the_page_is_true_after_every_write() -> None:
    """No write lets a cell count whose token is not there yet, or count on while another token takes its place."""
    said: list[tuple[int, list[int]]] = []
    transcript = Transcript(cast(U64, Noted(np.zeros(pages.HEADER_WORDS + 8, np.uint64), said)))
    transcript.add([1, 2, 3])
    transcript.cut(1)
    transcript.add([8, 9])
    assert len(said) == 5
    assert {tuple(tokens[:complete]) for complete, tokens in said} == {(), (1,), (1, 2, 3), (1, 8, 9)}


@pytest.mark.parametrize("name", ["a", "A1", "my-story_2.txt", "x" * 64])
def test_names_of_conversations(name: str) -> None:
    """Letters, digits, dots, underscores and hyphens make a name."""
    assert names.conversation_problem(name) is None


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a b", "a/b", "x" * 65, "é", "a\n", "\x1b[31m"])
def test_names_that_are_none(name: str) -> None:
    """Everything else is refused in a line that can be shown on a terminal."""
    problem = names.conversation_problem(name)
    assert problem is not None and problem.isprintable()
