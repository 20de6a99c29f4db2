"""The prompts that every subject gets, as token ids of the model's own tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skippy_orchestrator.text.tokenizer import TextModel

_TEXT = (
    "The harbour town had two lighthouses, one old and one new, and nobody could agree which of them the ships "
    "should follow. The old one stood on the cliff above the fish market; its lamp was turned by hand, and its "
    "keeper wrote down every sail that passed. The new one stood on the mole, and nobody kept it at all. "
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run: short prompts that decode, and one long prompt that is only prefilled."""

    prompts: tuple[tuple[int, ...], ...]
    """As many different prompts of the same length as the largest concurrency."""
    long_prompt: tuple[int, ...]
    decode_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of a short prompt."""
        return len(self.prompts[0])


def make_workload(
    model: Path, *, sequences: int, prompt_tokens: int, long_tokens: int, decode_tokens: int
) -> Workload:
    """Cut the workload from one text: sequence i starts i words later, so no two prompts are equal."""
    text = TextModel.load(model)
    words = _TEXT.split(" ")
    prompts: list[tuple[int, ...]] = []
    for i in range(sequences):
        shifted = " ".join(words[i:] + words[:i])
        prompts.append(tuple(text.encode(shifted * 2)[:prompt_tokens]))
    long_prompt = tuple(text.encode(_TEXT * (long_tokens // 40 + 1))[:long_tokens])
    return Workload(tuple(prompts), long_prompt, decode_tokens)
