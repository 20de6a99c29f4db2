"""Greedy texts of a reference implementation, and what it takes to agree with them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class NearTie(UserWarning):
    """Two implementations rounded differently where two tokens were almost equally likely."""


@dataclass(frozen=True)
class Golden:
    """One prompt and its greedy continuation (make_golden.py)."""

    name: str
    prompt: str
    input_ids: list[int]
    output_ids: list[int]
    text: str
    logits: list[tuple[float, float]]
    """For every token, the highest logit and the second."""
    runners_up: list[int]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return self.name.startswith("chat_")

    def request(self) -> dict[str, object]:
        """Keyword arguments of the client for this prompt."""
        if self.is_chat:
            return {"messages": json.loads(self.prompt), "max_tokens": 64}
        return {"prompt": self.prompt, "max_tokens": 64}


def smollm2() -> list[Golden]:
    """The golden texts of SmolLM2-135M-Instruct."""
    cases = json.loads(Path(__file__).with_name("smollm2_greedy.json").read_text(encoding="utf-8"))
    return [Golden(**case) for case in cases]


def assert_agrees(golden: Golden, tokens: Sequence[int], tie: float) -> None:
    """Fail unless the tokens are the golden ones, or leave them at a near tie for the runner-up.

    A near tie is where the two highest logits were less than ``tie`` apart. It is shown as a warning, and
    what comes after it is not compared.
    """
    expected = golden.output_ids
    for at, (mine, theirs) in enumerate(zip(tokens, expected, strict=False)):
        if mine != theirs:
            (highest, second), runner_up = golden.logits[at], golden.runners_up[at]
            where = (
                f"{golden.name}: token {at} is {mine} instead of {theirs}; "
                f"logits {second:.5f} and {highest:.5f}, {highest - second:.5f} apart"
            )
            assert mine == runner_up, where
            assert highest - second < tie, where
            warnings.warn(NearTie(where), stacklevel=2)
            return
    assert len(tokens) == len(expected), f"{golden.name}: {len(tokens)} tokens instead of {len(expected)}"
