"""Records what the packaged model routes to: `python -m tests.bench.record_traces`.

- `stories`: conversations one after another, each a prompt and its story
- `together`: four conversations at once, a token each in turn
- `texts`: what the model was not made for: prose about software, code, a licence
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from strata_client.model_cache import open_model
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.run_options import DEFAULT_MODEL
from strata_client.sampler import Sampler, SamplerOptions
from strata_client.tokenizer import Tokenizer
from tests.bench.traces import Trace
from tests.helpers.file_memory import ArrayCache, FileMemory

ROOT = Path(__file__).parents[2]
PROMPTS = (
    "Once upon a time there was a little girl who loved",
    "The dragon was very old, and nobody in the village had ever seen",
    "Tom and Sue went to the park. They saw a big red ball and",
    "One night the moon fell into the sea. The fish",
    '"I am not afraid," said the mouse to the cat. "You',
    "In the kitchen, mother was baking a cake with milk and",
    "There was a robot that wanted to learn how to",
    "It rained all day. The boy looked out of the window and",
)
STORY_TOKENS = 240
TEXTS = ("README.md", "vmmd/core/ledger.py", "LICENSE", "docs/trades.md")
TEXT_TOKENS = 480


class Conversation:
    """One sequence; each call of `next` evaluates a token, or the prompt at first."""

    def __init__(self, model: Qwen3Moe, memory: FileMemory, tokens: Sequence[int], length: int, seed: int) -> None:
        self._model = model
        self._memory = memory
        self._tokens = list(tokens)
        self._length = length
        self._cache = ArrayCache(model, length)
        self._sampler = Sampler(SamplerOptions(seed=seed))
        self._done = 0

    def next(self) -> tuple[np.ndarray, bool]:
        """Evaluates; returns experts ``[tokens, layers, top_k]``, and whether they were a prompt's."""
        new, prompt = self._tokens[self._done :], self._done == 0
        self._memory.heat.clear()
        logits = self._model.forward(np.array(new, np.int32), self._done, self._memory, self._cache, prompt=prompt)
        self._done = len(self._tokens)
        self._tokens.append(self._sampler.sample(logits, set(self._tokens)))
        layers = range(self._model.params.n_layers)
        routed = np.stack([np.concatenate(self._memory.heat[layer, prompt]) for layer in layers], axis=1)
        return routed, prompt

    @property
    def over(self) -> bool:
        """Whether it is as long as it shall be."""
        return self._done >= self._length


def _record(name: str, n_experts: int, steps: Iterator[tuple[int, np.ndarray, bool]]) -> None:
    routed, prompt, conversation = [], [], []
    for number, experts, is_prompt in steps:
        routed.append(experts)
        prompt += [is_prompt] * len(experts)
        conversation += [number] * len(experts)
    trace = Trace(
        name, n_experts, np.concatenate(routed).astype(np.uint16), np.array(prompt), np.array(conversation, np.uint16)
    )
    print(trace.save(), len(trace), "tokens")


def _in_turns(conversations: Sequence[Conversation], at_once: int) -> Iterator[tuple[int, np.ndarray, bool]]:
    """Runs so many conversations at once, a step each in turn."""
    waiting = list(enumerate(conversations))
    running = [waiting.pop(0) for _ in range(at_once)]
    while running:
        for entry in list(running):
            yield (entry[0], *entry[1].next())
            if entry[1].over:
                running.remove(entry)
                running += [waiting.pop(0)] if waiting else []


def main() -> None:
    """Records all of them."""
    model_file, vocabulary = open_model(DEFAULT_MODEL, None)
    with model_file:
        model, tokenizer = Qwen3Moe(model_file), Tokenizer(vocabulary)
        memory = FileMemory(model_file, model)
        n_experts = model.params.n_experts

        def stories(seed: int) -> list[Conversation]:
            made = []
            for n, text in enumerate(PROMPTS):
                tokens = tokenizer.encode(text)
                made.append(Conversation(model, memory, tokens, len(tokens) + STORY_TOKENS, seed + n))
            return made

        _record("stories", n_experts, _in_turns(stories(1), 1))
        _record("together", n_experts, _in_turns(stories(100), 4))
        texts = [tokenizer.encode((ROOT / path).read_text())[:TEXT_TOKENS] for path in TEXTS]
        read = [Conversation(model, memory, tokens, len(tokens), 0) for tokens in texts]
        _record("texts", n_experts, _in_turns(read, 1))


if __name__ == "__main__":
    main()
