"""What ``bench prefill`` runs: how much, on which servers, with which prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from skippy_orchestrator.deployment import Deployment, PrefillSection
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.errors import InvalidArgument

from skippy_tools.bench.prefill_rows import Setting, policy_label
from skippy_tools.bench.running import with_stages
from skippy_tools.bench.workload import (
    Conversation,
    SystemPrompt,
    Tokens,
    chat_about_a_text,
    different_prompts,
    long_prompt,
    shared_system_prompt,
)

STAGES = (1, 2, 3)
COMPARED_STAGES = 2
"""Stages of everything beside the cold and the repeated prompts."""
STREAMS = 4
STREAM_PROMPT_TOKENS = 64
WARM_UP_TOKENS = 1000
"""A longer prompt is cut to this for the rounds that don't count: it meets nothing new after that."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run; lengths in tokens."""

    rounds: int
    long_rounds: int
    """Rounds of prompts longer than WARM_UP_TOKENS, and of the prompt beside streams."""
    lengths: tuple[int, ...]
    policy_lengths: tuple[int, ...]
    lock_step_tokens: int
    shared_tokens: int
    """About the length of the system prompt, and of the text that the chat is about."""
    beside_tokens: int
    """Length of the prompt that comes in while streams run."""
    quiet_tokens: int
    """Tokens of every running stream before that prompt."""

    def rounds_of(self, tokens: int) -> int:
        """Rounds for a prompt of this length."""
        return self.rounds if tokens <= WARM_UP_TOKENS else self.long_rounds


FULL = Plan(
    rounds=5,
    long_rounds=3,
    lengths=(128, 512, 1000, 4000),
    policy_lengths=(1000, 4000),
    lock_step_tokens=4000,
    shared_tokens=1000,
    beside_tokens=4000,
    quiet_tokens=64,
)
QUICK = Plan(
    rounds=2,
    long_rounds=1,
    lengths=(128, 1000),
    policy_lengths=(1000,),
    lock_step_tokens=2000,
    shared_tokens=1000,
    beside_tokens=1000,
    quiet_tokens=32,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One server to be, and what is measured on it; lengths in tokens."""

    deployment: Deployment
    cold: tuple[int, ...] = ()
    repeats: bool = False
    """The cold prompts come again, too."""
    shares: bool = False
    """Chats that share a part of their prompts with earlier ones."""
    interference: bool = False

    @property
    def name(self) -> str:
        """For the progress bar."""
        setting = Setting.of(self.deployment)
        what = f"{setting.policy}" if self.cold else f"bound {setting.prefill_rows_while_decoding}"
        return f"server stages={setting.stages} threads={setting.threads} {what}"


def make_variants(deployment: Deployment, plan: Plan) -> list[Variant]:
    """The servers: the deployment as it is with 1, 2 and 3 stages, then with other settings.

    Cached prompts are left out where the deployment's prefix cache restores nothing.
    """
    caches = deployment.prefix_cache.mode == "lookup-record"
    variants = [
        Variant(
            with_stages(deployment, stages),
            plan.lengths,
            repeats=caches,
            shares=caches and stages == COMPARED_STAGES,
            interference=stages == COMPARED_STAGES,
        )
        for stages in STAGES
    ]
    base = with_stages(deployment, COMPARED_STAGES)
    seen = {policy_label(base.prefill)}
    for prefill in compared_policies(base.prefill):
        if policy_label(prefill) not in seen:
            seen.add(policy_label(prefill))
            variants.append(Variant(_changed(base, "prefill", prefill), plan.policy_lengths))
    single = _changed(base, "pipeline", msgspec.structs.replace(base.pipeline, threads=1))
    for credits in (base.prefill.credits or PrefillSection().credits, 0):
        prefill = msgspec.structs.replace(base.prefill, credits=credits)
        variants.append(Variant(_changed(single, "prefill", prefill), (plan.lock_step_tokens,)))
    if base.scheduler.prefill_rows_while_decoding:
        free = msgspec.structs.replace(base.scheduler, prefill_rows_while_decoding=0)
        variants.append(Variant(_changed(base, "scheduler", free), interference=True))
    return variants


def compared_policies(own: PrefillSection) -> list[PrefillSection]:
    """The chunk policies that are compared, with the deployment's own credits."""
    change = partial(msgspec.structs.replace, own)
    return [
        change(policy="adaptive-ramp"),
        change(policy="fixed", chunk_tokens=128),
        change(policy="fixed", chunk_tokens=256),
        change(policy="schedule", schedule="64,128,256"),
    ]


def _changed(deployment: Deployment, section: str, value: Any) -> Deployment:
    return msgspec.structs.replace(deployment, **{section: value})


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of the run, as token ids of the model's own tokenizer."""

    by_length: dict[int, Tokens]
    running: tuple[Tokens, ...]
    """Prompts of the streams that run beside another prompt."""
    system: SystemPrompt | None = None
    """None for a model without a chat template, as below."""
    conversation: Conversation | None = None

    @classmethod
    def make(cls, model: Path, plan: Plan, console: Console) -> Prompts:
        """Cut them from one text."""
        text = TextModel.load(model)
        lengths = {*plan.lengths, *plan.policy_lengths, plan.lock_step_tokens, plan.beside_tokens}
        by_length = {length: long_prompt(text, length) for length in lengths}
        running = different_prompts(text, STREAMS, STREAM_PROMPT_TOKENS)
        try:
            system = shared_system_prompt(text, plan.shared_tokens)
        except InvalidArgument:
            console.print("left out: chats, the model has no chat template")
            return cls(by_length, running)
        return cls(by_length, running, system, chat_about_a_text(text, plan.shared_tokens))
