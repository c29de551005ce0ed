"""What the client says and refuses before any memory is leased."""

from pathlib import Path

import click
import pytest
from strata_api.v1 import memory_pb2 as wire

from strata_client.connection import NoDaemon, dial, runtime_directories
from strata_client.opening import choose_context
from strata_client.prompts import ClientError
from strata_client.sequence import growth_line


def test_growth_line_has_the_numbers_of_all_trades() -> None:
    """The line names cells, size, slots given, experts moved and slots occupied, summed over arenas."""
    trades = [
        wire.Trade(slots=50, experts_moved=20, slots_occupied=6000, slots_total=6015),
        wire.Trade(slots=6, experts_moved=1, slots_occupied=359, slots_total=400),
    ]
    assert growth_line(24576, 386547057, trades) == (
        "strata: K/V grown to 24576 cells (0.36 GiB); the expert cache gave 56 slots for it, "
        "21 hotter experts moved to colder ones' slots (6359 of 6415 slots hold experts)"
    )


def test_growth_without_slots_has_no_line() -> None:
    """A growth from free slabs, or by slabs that held no slots, says nothing."""
    assert growth_line(160, 1 << 20, []) == ""
    assert growth_line(160, 1 << 20, [wire.Trade(slabs=1)]) == ""


@pytest.mark.parametrize(
    ("asked", "model", "tokens", "room", "context"),
    [(None, 4096, 10, 64, 256), (None, 4096, 200, 64, 512), (None, 512, 500, 64, 512), (64, 512, 64, 5, 64)],
)
def test_context_holds_prompt_and_text(asked: int | None, model: int, tokens: int, room: int, context: int) -> None:
    """Without --context it is what is needed, in multiples of 256, at most the model's."""
    assert choose_context(asked, model, tokens, room) == context


@pytest.mark.parametrize("asked", [0, -5, 513])
def test_context_out_of_range_is_refused(asked: int) -> None:
    """--context outside 1 to the model's own is a usage error that names the limit."""
    with pytest.raises(click.UsageError, match=f"--context is {asked}; it must be 1 to 512"):
        choose_context(asked, 512, 3, 5)


def test_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    """65 tokens do not go into 64 cells; a text to measure may be longer."""
    with pytest.raises(ClientError, match=r"65 tokens and the context is 64"):
        choose_context(64, 512, 65, 5)
    assert choose_context(64, 512, 65, None) == 64


def test_socket_names_a_directory_or_a_socket_in_it() -> None:
    """--socket takes the runtime directory or the path of its vmmd.sock."""
    assert runtime_directories("/run/x/vmmd.sock") == runtime_directories("/run/x") == [Path("/run/x")]


@pytest.mark.parametrize("directory", ["/nonexistent/run", "/tmp/" + "d" * 120])
def test_no_daemon_is_an_error_of_its_own(directory: str) -> None:
    """A missing directory and a path that no socket can have both mean that there is no daemon."""
    with pytest.raises(NoDaemon, match="no daemon at"):
        dial(runtime_directories(directory))
