"""Native MTP through core, frames and stage runtimes, on engines whose head is right but for every fifth token.

The scripted head asserts what it has seen (tests/scripted.py), so a look-ahead token, a window's right rows or a
restored prefix that went wrong anywhere between fails these tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_orchestrator import sessions
from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.deployment.speculation import (
    ExtensionSection,
    NativeMtpSection,
    NgramSection,
    SpeculationPlan,
    VerifyWindowSection,
)
from skippy_stage.engines.base import DraftRows
from skippy_stage.errors import Cancelled
from skippy_stage.protocol import DecodeStep, OpenStep, PrefillStep, SamplingParams, VerifyStep

from tests.orchestrator.simulation import Simulation
from tests.orchestrator.speculation.test_in_core import Foresight
from tests.scripted import ScriptedEngine, cut, reference

PROMPT = [5, 17, 200, 33, 8, 91, 4, 250, 77, 12, 13]
SAMPLED = SamplingParams(temperature=0.7, seed=3, top_k=40)
NGRAM = NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=16)


def plan(drafts: int = 3, depth: int = 1, **options: object) -> SpeculationPlan:
    return SpeculationPlan(
        native_mtp=NativeMtpSection(enabled=True, max_draft_tokens=drafts),
        verify_window=VerifyWindowSection(max_tokens=8, pipeline_depth=depth),
        back_off=False,
        **options,  # type: ignore[arg-type]
    )


def composite(drafts: int = 3, depth: int = 1) -> SpeculationPlan:
    return plan(drafts, depth, ngram=NGRAM, extension=ExtensionSection(max_tokens=8))


def simulation(stages: int = 2, **options: object) -> Simulation:
    return Simulation(stages, engines=cut(stages, mtp=True), **options)  # type: ignore[arg-type]


def last_engine(sim: Simulation) -> ScriptedEngine:
    engine = sim.engines[-1]
    assert isinstance(engine, ScriptedEngine)
    return engine


def no_failures(sim: Simulation) -> bool:
    return sim.runtimes[-1].status().head.failures == 0


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("drafts", [1, 2, 4])
@pytest.mark.parametrize("late", [True, False])
def test_the_text_is_the_serial_one_in_fewer_steps(stages: int, drafts: int, late: bool) -> None:
    sim = simulation(stages)
    sim.drafts_late = late
    seen = sim.submit(1, PROMPT, 50, speculation=plan(drafts))
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 50)
    assert no_failures(sim)
    assert seen.speculation is not None
    source = seen.speculation.by_source["native-mtp"]
    assert source.accepted > 10
    steps = sum(
        isinstance(s, DecodeStep | VerifyStep) for stage, h in sim.headers if not stage for s in h.steps
    )
    assert steps < 40


def test_the_head_is_told_of_chunks_and_drafts_only_for_those_who_want_it() -> None:
    sim = simulation()
    sim.submit(1, PROMPT, 8, speculation=plan(2))
    sim.submit(2, PROMPT, 8)
    sim.check_empty()
    steps = [step for stage, header in sim.headers if not stage for step in header.steps]
    assert {s.session: s.drafts for s in steps if isinstance(s, OpenStep)} == {1: 2, 2: 0}
    chunks = [(s.session, s.sample, s.lookahead) for s in steps if isinstance(s, PrefillStep)]
    assert set(chunks) == {(1, False, 1), (1, True, 0), (2, False, 0), (2, True, 0)}


def test_sampled_text_is_the_serial_one() -> None:
    sim = simulation()
    seen = sim.submit(1, PROMPT, 40, sampling=SAMPLED, speculation=plan())
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 40, SAMPLED)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_head_and_ngrams_together(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    monkeypatch.setattr(sessions, "make_proposer", lambda _: Foresight(SamplingParams(), 0.1, 1))
    sim = simulation(3)
    seen = sim.submit(1, PROMPT, 60, speculation=composite(depth=depth))
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 60)
    assert no_failures(sim)
    assert seen.speculation is not None
    assert {name for name, s in seen.speculation.by_source.items() if s.accepted} == {
        "native-mtp",
        "foresight",
    }


def test_a_head_that_fails_costs_drafts_and_nothing_else() -> None:
    sim = simulation()

    def fault(rows: Sequence[DraftRows]) -> None:
        raise RuntimeError("no")

    last_engine(sim).draft_fault = fault
    seen = sim.submit(1, PROMPT, 30, speculation=plan())
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 30)
    assert sim.runtimes[-1].status().head.failures > 0


def test_a_model_without_a_head_decodes_as_if_the_plan_had_none() -> None:
    sim = Simulation(2)
    seen = sim.submit(1, PROMPT, 30, speculation=composite())
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 30)
    assert seen.speculation is not None
    assert "native-mtp" not in seen.speculation.by_source


@pytest.mark.parametrize("bypass", [False, True])
def test_behind_a_restored_prompt(bypass: bool) -> None:
    prefix = PrefixCacheSection(min_tokens=4, stride_tokens=4, bypass_native_mtp=bypass, replay_tokens=0)
    sim = simulation(prefix=prefix)
    prompt = PROMPT * 3
    for session in (1, 2, 3):
        seen = sim.submit(session, prompt, 20, speculation=plan())
        sim.run()
        assert seen.tokens == reference(prompt, 20)
        assert seen.cache is not None
        assert (seen.cache.hit_kind is not None) == (session > 1 and not bypass)
        assert bypass == (seen.cache.status == "bypass_native_mtp")
    sim.submit(4, [*prompt, 1, 2, 3], 20, speculation=plan())
    sim.check_empty()
    assert sim.seen[4].tokens == reference([*prompt, 1, 2, 3], 20)
    assert no_failures(sim)


def test_prefixes_that_no_head_has_seen_are_not_restored_for_those_who_draft() -> None:
    sim = simulation(prefix=PrefixCacheSection(min_tokens=4, stride_tokens=4, replay_tokens=0))
    prompt = PROMPT * 3
    sim.submit(1, prompt, 20)
    sim.run()
    seen = sim.submit(2, prompt, 20, speculation=plan())
    sim.check_empty()
    assert seen.cache is not None
    assert seen.cache.hit_kind is None
    assert no_failures(sim)


plans = st.one_of(
    st.builds(
        plan,
        st.integers(1, 6),
        st.sampled_from([1, 2, 4]),
        draft_acceptance_threshold=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    ),
    st.builds(composite, st.integers(1, 4), st.sampled_from([1, 2, 4])),
)


@given(st.data())
@settings(max_examples=100)
def test_any_plans_in_any_order_of_events_give_the_reference(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 3))
    sim = simulation(stages)
    sim.drafts_late = data.draw(st.booleans())
    wrong = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    made = sessions.make_proposer
    sessions.make_proposer = lambda _: Foresight(SamplingParams(), wrong, 1)
    try:
        texts = []
        for session in range(1, data.draw(st.integers(1, 3)) + 1):
            prompt = data.draw(st.lists(st.integers(0, 250), min_size=1, max_size=20))
            count = data.draw(st.integers(1, 24))
            texts.append((session, prompt, count))
            sim.submit(session, prompt, count, speculation=data.draw(plans))
            for _ in range(data.draw(st.integers(0, 6))):
                sim.advance(data.draw(st.integers(0, stages - 1)))
                sim.check_integrity()
        cancelled = data.draw(st.sampled_from([0, 0, 1]))
        if cancelled:
            sim.cancel(cancelled)
        sim.check_empty()
    finally:
        sessions.make_proposer = made
    for session, prompt, count in texts:
        if isinstance(sim.seen[session].error, Cancelled):
            continue
        assert sim.seen[session].tokens == reference(prompt, count)
    assert no_failures(sim)
