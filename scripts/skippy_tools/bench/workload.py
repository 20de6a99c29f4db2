"""The prompts that every subject gets, as token ids of the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from skippy_orchestrator.text.tokenizer import TextModel

_TEXT = (
    "The harbour town had two lighthouses, one old and one new, and nobody could agree which of them the ships "
    "should follow. The old one stood on the cliff above the fish market; its lamp was turned by hand, and its "
    "keeper wrote down every sail that passed. The new one stood on the mole, and nobody kept it at all. "
)

QUESTIONS = (
    "What is this text about?",
    "Which of the lighthouses has a keeper, and what does the keeper do?",
    "Where does the other one stand?",
)

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """What ``bench decode`` runs: short prompts that decode, and one long prompt that is only prefilled."""

    prompts: tuple[Tokens, ...]
    """As many different prompts of the same length as the largest concurrency."""
    long_prompt: Tokens
    decode_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of a short prompt."""
        return len(self.prompts[0])


def make_workload(
    model: Path, *, sequences: int, prompt_tokens: int, long_tokens: int, decode_tokens: int
) -> Workload:
    """The workload of ``bench decode``."""
    text = TextModel.load(model)
    prompts = different_prompts(text, sequences, prompt_tokens)
    return Workload(prompts, long_prompt(text, long_tokens), decode_tokens)


def different_prompts(text: TextModel, sequences: int, tokens: int) -> tuple[Tokens, ...]:
    """Short prompts cut from one text: number i starts i words later, so no two are equal."""
    words = _TEXT.split(" ")
    shifted = (" ".join(words[i:] + words[:i]) for i in range(sequences))
    return tuple(tuple(text.encode(piece * 2)[:tokens]) for piece in shifted)


def long_prompt(text: TextModel, tokens: int) -> Tokens:
    """One prompt of so many tokens."""
    return tuple(text.encode(_TEXT * (tokens // 40 + 1))[:tokens])


class Conversation:
    """What a user says in a chat; the answers come from the model, so a prompt is made when they are known."""

    def __init__(self, text: TextModel, system: str, questions: Sequence[str]) -> None:
        self._text = text
        self._system = system
        self._questions = questions

    @property
    def turns(self) -> int:
        """How often the user speaks."""
        return len(self._questions)

    def prompt(self, answers: Sequence[str] = ()) -> Tokens:
        """The prompt of the turn that comes after these answers.

        Raises InvalidArgument when the model has no chat template.
        """
        messages = [{"role": "system", "content": self._system}]
        asked = self._questions[: len(answers) + 1]
        for question, answer in zip_longest(asked, answers):
            messages.append({"role": "user", "content": question})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return tuple(self._text.encode_chat(json.dumps(messages)))


@dataclass(frozen=True, slots=True)
class SystemPrompt:
    """Two chats with the same system prompt and different questions."""

    first: Tokens
    second: Tokens


def shared_system_prompt(text: TextModel, tokens: int) -> SystemPrompt:
    """Chats whose system prompt has about so many tokens."""
    system = "Answer from this text. " + text.decode(long_prompt(text, tokens))
    return SystemPrompt(*(Conversation(text, system, [question]).prompt() for question in QUESTIONS[:2]))


def chat_about_a_text(text: TextModel, tokens: int) -> Conversation:
    """A chat of a few turns whose first message has about so many tokens."""
    first = f"{text.decode(long_prompt(text, tokens))}\n\n{QUESTIONS[0]}"
    return Conversation(text, "You answer in one short sentence.", [first, *QUESTIONS[1:]])


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from the start."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
