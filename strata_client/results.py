"""What a batch prints: a text or an object for each prompt, in the order of the prompts."""

from typing import Any

from strata_client.batch import Result
from strata_client.output import Output, say


class Results:
    """Prints the results of prompts in their order, each as soon as those before it are printed.

    Attributes:
        printed: how many there are.
        refused: how many of them have no text: there was no memory to begin with, or no daemon any more.
        prompt_tokens, tokens: of all that are printed.
    """

    def __init__(self, output: Output, *, as_json: bool) -> None:
        """`as_json`: objects instead of texts with a heading."""
        self._output = output
        self._as_json = as_json
        self._next = 0
        self._held: dict[int, Result] = {}
        self.printed = 0
        self.refused = 0
        self.prompt_tokens = 0
        self.tokens = 0

    def add(self, result: Result) -> None:
        """Takes one, in any order. Errors: as `Output.text`."""
        self._held[result.index] = result
        while self._next in self._held:
            self._print(self._held.pop(self._next))
            self._next += 1

    def flush(self) -> None:
        """Prints those that waited for others, which will not come. Errors: as `Output.text`."""
        for index in sorted(self._held):
            self._print(self._held.pop(index))

    def _print(self, result: Result) -> None:
        done, number = result.generation, result.index + 1
        if self._as_json:
            statistics: dict[str, Any] = {
                "prompt_tokens": done.prompt_tokens,
                "tokens": done.tokens,
                "reason": done.reason,
                "detail": done.detail,
                "prompt_s": round(done.prompt_s, 4),
                "decode_s": round(done.decode_s, 4),
                "tokens_per_s": round(done.tokens_per_s, 2),
            }
            self._output.object(prompt=number, text=result.text, tokens=list(result.tokens), statistics=statistics)
        else:
            self._output.text(f"{chr(10) if self.printed else ''}==> prompt {number} <==\n")
            self._output.text(result.text if result.text.endswith("\n") else result.text + "\n")
        if done.detail:
            say(f"strata: prompt {number}: {'the text ends here' if result.began else 'no text'}: {done.detail}")
        self.printed += 1
        self.refused += not result.began
        self.prompt_tokens += done.prompt_tokens
        self.tokens += done.tokens

    def summary(self, took_s: float) -> dict[str, Any]:
        """Figures of all that are printed, in so many seconds."""
        return {
            "prompts": self.printed,
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "batch_s": round(took_s, 4),
            "tokens_per_s": round(self.tokens / took_s, 2),
        }
