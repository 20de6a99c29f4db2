"""What ``bench speculation`` measures: prompts of four kinds, ways to guess ahead, and how much of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
from skippy_orchestrator.deployment import Deployment, SchedulerSection, SpeculationSection
from skippy_orchestrator.text.tokenizer import TextModel

from skippy_tools.bench.running import with_stages
from skippy_tools.bench.workload import Tokens

KINDS: Final = ("copy", "chat", "code", "random")
PARTS: Final = ("peers", "server", "links")
"""Other programs; this server by kind of prompt, stages and depth; this server with slow links."""
RANDOM_TEMPERATURE: Final = 1.0
"""Random prompts are answered with sampled tokens: greedy ones would soon repeat themselves."""
RANDOM_SEED: Final = 7

_CODE: Final = '''class Ledger:
    """Accounts of a harbour, by the name of the ship."""

    def __init__(self, currency, limit=1000):
        self.currency = currency
        self.limit = limit
        self.accounts = {}
        self.closed = set()

    def charge(self, ship, amount, reason):
        if ship in self.closed:
            raise ValueError(f"{ship} has left the harbour")
        if amount > self.limit:
            raise ValueError(f"{amount} {self.currency} is above the limit")
        self.accounts.setdefault(ship, []).append((amount, reason))

    def balance(self, ship):
        return sum(amount for amount, _ in self.accounts.get(ship, []))

    def close(self, ship):
        total = self.balance(ship)
        self.closed.add(ship)
        self.accounts.pop(ship, None)
        return total
'''
_CHATS: Final = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short letter that asks a neighbour to water the plants next week.",
    "What should I see in Rome in two days?",
    "Give me three reasons to learn to swim.",
    "How does a bicycle stay upright?",
    "Describe how to make a simple vegetable soup.",
    "What is the difference between weather and climate?",
    "Tell me a story about a lighthouse keeper.",
)
_FUNCTIONS: Final = (
    'def fibonacci(n):\n    """The first n Fibonacci numbers as a list."""\n',
    'def read_lines(path):\n    """The lines of a file that are not empty."""\n',
    'class Stack:\n    """A stack with push, pop and peek."""\n\n    def __init__(self):\n',
    'def is_palindrome(text):\n    """Whether a text reads the same backwards."""\n',
    'def merge_sorted(left, right):\n    """Two sorted lists as one sorted list."""\n',
    'def count_words(text):\n    """How often each word occurs."""\n',
    'def gcd(a, b):\n    """The greatest common divisor."""\n',
    'class Matrix:\n    """A matrix with addition and multiplication."""\n\n    def __init__(self, rows):\n',
)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to guess ahead: a plan, and the limits that a request sets."""

    proposer: str
    """Name of the plan; ``off`` is serial decoding."""
    depth: int = 1
    window: int = 8

    @property
    def wish(self) -> str:
        """What a request says."""
        return (
            self.proposer
            if self.proposer == "off"
            else f"{self.proposer},window={self.window},depth={self.depth}"
        )


SERIAL: Final = Way("off", 1, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    kinds: tuple[str, ...]
    stages: tuple[int, ...]
    depths: tuple[int, ...]
    concurrency: tuple[int, ...]
    tokens: int
    rounds: int
    delays_ms: tuple[float, ...]
    """Of the simulated links, on four stages with copy prompts."""
    widths: tuple[int, ...]
    """Window widths that each depth may choose from where links are slow."""
    parts: tuple[str, ...] = PARTS


QUICK: Final = Plan(("copy", "chat", "random"), (2,), (2,), (1,), 48, 2, (20.0,), (8,))
FULL: Final = Plan(KINDS, (1, 2, 4), (1, 2, 4), (1, 8), 128, 5, (0.0, 5.0, 20.0), (1, 2, 4, 8, 16))


def narrowed(plan: Plan, **chosen: Sequence[object] | int | None) -> Plan:
    """The plan with what was chosen instead; None and nothing chosen leave a field as it is.

    Raises ValueError for a kind of prompts or a part that does not exist.
    """
    given = {name: tuple(v) if isinstance(v, list | tuple) else v for name, v in chosen.items() if v}
    for name, known in (("kinds", KINDS), ("parts", PARTS)):
        for value in given.get(name) or ():  # type: ignore[union-attr]
            if value not in known:
                raise ValueError(f"{name}: got {value!r}, expected some of {', '.join(known)}")
    return replace(plan, **given)  # type: ignore[arg-type]


def ways(depths: Sequence[int], *, head: bool) -> list[Way]:
    """Serial decoding, and every proposer that there is at every depth that it can have."""
    made = [SERIAL, *(Way("ngram", depth) for depth in depths)]
    if head:
        made += [Way("mtp", 1, 2), *(Way("composite", depth) for depth in depths)]
    return made


def prompts_of(kind: str, text: TextModel, count: int) -> tuple[Tokens, ...]:
    """So many different prompts of a kind."""
    made = []
    for i in range(count):
        if kind == "copy":
            code = _CODE.replace("Ledger", f"Ledger{i + 2}")
            copies = f"{code}\n# copy of ledger.py\n" * 2
            made.append(text.encode(f"# ledger.py\n{copies}class"))
        elif kind == "chat":
            question = _CHATS[i % len(_CHATS)]
            made.append(text.encode_chat(json.dumps([{"role": "user", "content": question}])))
        elif kind == "code":
            made.append(text.encode(_FUNCTIONS[i % len(_FUNCTIONS)]))
        else:
            draw = random.Random(i)
            made.append([draw.randrange(1000, text.vocab_size - 1000) for _ in range(120)])
    return tuple(map(tuple, made))


def deployment_of(base: Deployment, stages: int, delay_ms: float, head: Path | None) -> Deployment:
    """The deployment in so many stages, with slow links where that is asked for, and the head where there is one."""
    made = with_stages(base, stages)
    pipeline = msgspec.structs.replace(made.pipeline, link_delay_ms=delay_ms)
    model = msgspec.structs.replace(made.model, mtp_head=str(head) if head else made.model.mtp_head)
    return msgspec.structs.replace(
        made,
        pipeline=pipeline,
        model=model,
        speculation=_wide(msgspec.structs.replace(made, model=model)),
        scheduler=_deep(made, delay_ms),
    )


def _wide(base: Deployment) -> SpeculationSection:
    """The speculation section with plans whose limits a request can lower to all that is measured."""
    section = base.speculation
    plans = dict(section.plans)
    for name in ("ngram", "composite") if base.model.mtp_head else ("ngram",):
        plan = section.plan(name)
        window = msgspec.structs.replace(plan.verify_window, max_tokens=16, pipeline_depth=8)
        plans[name] = msgspec.structs.replace(plan, verify_window=window, speculative_window=16)
    return msgspec.structs.replace(section, plans=plans)


def _deep(base: Deployment, delay_ms: float) -> SchedulerSection:
    """Links that are slow take more frames at a time."""
    frames = max(base.scheduler.frames_per_link, 4) if delay_ms else base.scheduler.frames_per_link
    return msgspec.structs.replace(base.scheduler, frames_per_link=frames)
