"""A request's own wish: the input ``speculation``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec
from skippy_stage.errors import InvalidArgument

from skippy_orchestrator.deployment.speculation import SpeculationPlan, SpeculationSection

_LIMITS: Final = ("window", "depth")


@dataclass(frozen=True, slots=True)
class Drafters:
    """What a deployment can draft with beside n-grams."""

    head: bool = False
    """The model has an MTP head."""
    model: bool = False
    """There is a draft model."""


NO_DRAFTERS: Final = Drafters()


def choose_plan(section: SpeculationSection, wish: str, drafters: Drafters) -> SpeculationPlan:
    """The plan for ``NAME``, ``LIMIT=N,...`` or ``NAME,LIMIT=N,...``; an empty wish is the default plan.

    Limits only lower what the plan allows: ``window`` the tokens of a window, ``depth`` the windows in flight.
    Raises InvalidArgument naming what there is.
    """
    parts = [part.strip() for part in wish.split(",") if part.strip()]
    name = parts.pop(0) if parts and "=" not in parts[0] else section.default
    names = section.available(head=drafters.head, draft_model=drafters.model)
    if name not in names:
        expected = f"one of {', '.join(names)}, or limits"
        if name in section.names:
            lacks = section.plan(name).lacks(head=drafters.head, draft_model=drafters.model)
            expected += f": `{name}` needs {lacks}"
        raise InvalidArgument("speculation", wish, expected)
    plan = section.plan(name)
    for part in parts:
        key, _, value = part.partition("=")
        if key.strip() not in _LIMITS or not value.strip().isdecimal() or int(value) < 1:
            raise InvalidArgument(
                "speculation",
                wish,
                f"limits {' and '.join(f'`{limit}=N`' for limit in _LIMITS)} with N at least 1",
            )
        plan = _limited(plan, key.strip(), int(value))
    return plan


def _limited(plan: SpeculationPlan, key: str, most: int) -> SpeculationPlan:
    window = plan.verify_window
    if key == "depth":
        window = msgspec.structs.replace(window, pipeline_depth=min(window.pipeline_depth, most))
        return msgspec.structs.replace(plan, verify_window=window)
    tokens = min(window.max_tokens, most)
    window = msgspec.structs.replace(window, max_tokens=tokens, min_tokens=min(window.min_tokens, tokens))
    return msgspec.structs.replace(
        plan, verify_window=window, speculative_window=min(plan.speculative_window, most)
    )
