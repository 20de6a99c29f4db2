"""A request's own wish: what it may name, what limits do, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment import SpeculationPlan, SpeculationSection
from skippy_orchestrator.deployment.speculation import (
    NativeMtpSection,
    NgramSection,
    VerifyWindowSection,
)
from skippy_orchestrator.speculation.request import NO_DRAFTERS, Drafters
from skippy_orchestrator.speculation.request import choose_plan as choose_plan_of
from skippy_stage.errors import InvalidArgument

WIDE = SpeculationPlan(
    ngram=NgramSection(kind="cache", min_ngram=1, max_ngram=4, max_proposal_tokens=16),
    verify_window=VerifyWindowSection(min_tokens=3, max_tokens=12, pipeline_depth=6),
    speculative_window=10,
)
PLANS = SpeculationSection(plans={"wide": WIDE})
WIDE_IS_DEFAULT = SpeculationSection(default="wide", plans={"wide": WIDE})


def choose_plan(section: SpeculationSection, wish: str, drafters: Drafters = NO_DRAFTERS) -> SpeculationPlan:
    return choose_plan_of(section, wish, drafters)


def shape(plan: SpeculationPlan) -> tuple[int, int, int, int]:
    """Least and most tokens of a window, most at depth 1, and the depth."""
    window = plan.verify_window
    return window.min_tokens, window.max_tokens, plan.speculative_window, window.pipeline_depth


@pytest.mark.parametrize("wish", ["", "  ", ","])
def test_no_wish_is_the_default(wish: str) -> None:
    assert choose_plan(PLANS, wish) == SpeculationPlan()
    assert choose_plan(WIDE_IS_DEFAULT, wish) is WIDE


def test_names() -> None:
    assert PLANS.names == ("off", "composite", "draft", "mtp", "ngram", "wide")
    assert choose_plan(PLANS, "off") == SpeculationPlan()
    assert choose_plan(WIDE_IS_DEFAULT, "off").ngram is None
    assert choose_plan(PLANS, "wide") is WIDE
    ngram = choose_plan(PLANS, "ngram").ngram
    assert ngram is not None
    assert ngram.kind == "suffix"


@pytest.mark.parametrize(
    ("drafters", "there", "lacking"),
    [
        (NO_DRAFTERS, ["ngram"], {"mtp": "MTP head", "composite": "MTP head", "draft": "draft model"}),
        (Drafters(head=True), ["ngram", "mtp", "composite"], {"draft": "draft model"}),
        (Drafters(model=True), ["ngram", "draft"], {"mtp": "MTP head", "composite": "MTP head"}),
        (Drafters(head=True, model=True), ["ngram", "mtp", "composite", "draft"], {}),
    ],
)
def test_what_needs_a_drafter_is_there_where_the_drafter_is(
    drafters: Drafters, there: list[str], lacking: dict[str, str]
) -> None:
    for name in there:
        assert choose_plan(PLANS, name, drafters).most_tokens > 0
    for name, lack in lacking.items():
        with pytest.raises(InvalidArgument, match=rf"^speculation: .*`{name}` needs a .*{lack}"):
            choose_plan(PLANS, name, drafters)


def test_a_plan_of_the_deployment_may_replace_the_one_that_is_there_anyway() -> None:
    assert choose_plan(SpeculationSection(plans={"ngram": WIDE}), "ngram") is WIDE


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("wide,window=5", (3, 5, 5, 6)),
        ("wide,window=2", (2, 2, 2, 6)),
        ("wide,window=1,depth=1", (1, 1, 1, 1)),
        ("wide,depth=4", (3, 12, 10, 4)),
        (" wide , depth = 2 , window = 11 ", (3, 11, 10, 2)),
        ("depth=2", (3, 12, 10, 2)),
        ("window=500,depth=64", (3, 12, 10, 6)),
        ("wide,window=9,window=4", (3, 4, 4, 6)),
    ],
)
def test_limits_only_lower(wish: str, expected: tuple[int, ...]) -> None:
    assert shape(choose_plan(WIDE_IS_DEFAULT, wish)) == expected


@pytest.mark.parametrize(
    "wish", ["magic", "Wide", "wide,fast", "window", "wide=3", "window=0", "depth=-1", "depth=2.5", "window="]
)
def test_what_is_not_there_is_refused_by_name(wish: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        choose_plan(PLANS, wish)
    message = str(refused.value)
    assert message.startswith(f"speculation: got {wish!r}")
    assert "one of off, ngram, wide" in message or "`window=N` and `depth=N`" in message


@given(
    least=st.integers(1, 20),
    more=st.integers(0, 40),
    most=st.integers(0, 64),
    depth=st.integers(1, 64),
    window=st.integers(1, 600),
    limit=st.integers(1, 100),
)
def test_a_lowered_plan_is_a_valid_one(
    least: int, more: int, most: int, depth: int, window: int, limit: int
) -> None:
    plan = SpeculationPlan(
        ngram=WIDE.ngram,
        verify_window=VerifyWindowSection(min_tokens=least, max_tokens=least + more, pipeline_depth=depth),
        speculative_window=most,
    )
    section = SpeculationSection(default="p", plans={"p": plan})
    lowered = choose_plan(section, f"window={window},depth={limit}")
    assert all(a <= b for a, b in zip(shape(lowered), shape(plan), strict=True))
    assert lowered.most_tokens == min(plan.most_tokens, window)
    assert lowered.verify_window.min_tokens <= lowered.verify_window.max_tokens


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        (SpeculationPlan(), 0),
        (WIDE, 12),
        (SpeculationPlan(ngram=WIDE.ngram, speculative_window=9), 9),
        (SpeculationPlan(native_mtp=NativeMtpSection(enabled=True)), 4),
    ],
)
def test_the_most_drafts_of_one_window(plan: SpeculationPlan, most: int) -> None:
    assert plan.most_tokens == most
