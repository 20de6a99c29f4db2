"""The deployment: the one description that everything else is generated from.

A deployment file is TOML with one table per section below. Every field has a default, a range and one
line of doc here; ``docs/configuration.md`` and every config.pbtxt are generated from it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from skippy_stage.settings import SettingsError

from skippy_orchestrator.deployment.scheduling import (
    PrefillSection,
    PrefixCacheSection,
    PrefixMode,
    SchedulerSection,
)
from skippy_orchestrator.deployment.section import Section
from skippy_orchestrator.deployment.serving import (
    DraftSection,
    KvSection,
    LimitsSection,
    ModelSection,
    PipelineSection,
    SamplingSection,
    ServerSection,
    StageSection,
)
from skippy_orchestrator.deployment.speculation import SpeculationPlan, SpeculationSection

__all__ = [
    "Deployment",
    "DraftSection",
    "KvSection",
    "LimitsSection",
    "ModelSection",
    "OrchestratorSettings",
    "PipelineSection",
    "PrefillSection",
    "PrefixCacheSection",
    "PrefixMode",
    "SamplingSection",
    "SchedulerSection",
    "Section",
    "ServerSection",
    "SpeculationPlan",
    "SpeculationSection",
    "StageSection",
    "effective_context",
    "load_deployment",
    "parse_deployment",
]


class Deployment(Section, frozen=True):
    """A deployment: all sections together."""

    model: ModelSection = ModelSection()
    pipeline: PipelineSection = PipelineSection()
    stages: tuple[StageSection, ...] = ()
    kv: KvSection = KvSection()
    scheduler: SchedulerSection = SchedulerSection()
    prefill: PrefillSection = PrefillSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    speculation: SpeculationSection = SpeculationSection()
    draft: DraftSection = DraftSection()
    limits: LimitsSection = LimitsSection()
    sampling: SamplingSection = SamplingSection()
    server: ServerSection = ServerSection()

    def __post_init__(self) -> None:
        most = self.scheduler.max_frame_rows
        for name in self.speculation.names:
            tokens = self.speculation.plan(name).most_tokens
            if tokens >= most:
                raise ValueError(
                    f"speculation.plans.{name}: got windows of {tokens} tokens, expected fewer than "
                    f"scheduler.max_frame_rows, {most}"
                )
        # Whether there is a head only the checkpoint knows.
        self.speculation.check(head=True, draft_model=bool(self.draft.path))


class OrchestratorSettings(Section, frozen=True, kw_only=True):
    """What the orchestrator model is told: its share of the deployment, and the stages by name."""

    model: str
    context_tokens: int = 0
    stages: Annotated[tuple[str, ...], Meta(min_length=1)]
    mtp_head: str = ""
    """The MTP head beside the model, as model.mtp_head."""
    draft_stage: str = ""
    """Triton model name of the draft model's stage; empty without one."""
    draft_model: str = ""
    draft_ahead: bool = True
    link_delay_ms: float = 0.0
    scheduler: SchedulerSection = SchedulerSection()
    prefill: PrefillSection = PrefillSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    speculation: SpeculationSection = SpeculationSection()
    limits: LimitsSection = LimitsSection()
    sampling: SamplingSection = SamplingSection()


def effective_context(wanted: int, model: int) -> int:
    """The context limit in tokens: ``wanted``, or the model's own when that is 0.

    Raises SettingsError when more is wanted than the model was made for.
    """
    if wanted > model:
        raise SettingsError(f"model.context_tokens: got {wanted}, expected at most {model}, the model's own")
    return wanted or model


def parse_deployment(text: str, source: str = "deployment") -> Deployment:
    """Read a deployment from TOML; raises SettingsError naming the key and the limit."""
    try:
        return msgspec.convert(tomllib.loads(text), Deployment)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source}: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from None


def load_deployment(path: Path) -> Deployment:
    """Read a deployment file; raises SettingsError when it cannot be read or is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return parse_deployment(text, str(path))
