"""Speculation through core, frames and stage runtimes: the text is the serial one, whatever was guessed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_orchestrator import sessions
from skippy_orchestrator.deployment import PrefillSection, PrefixCacheSection, SchedulerSection
from skippy_orchestrator.deployment.speculation import NgramSection, SpeculationPlan, VerifyWindowSection
from skippy_stage.errors import Cancelled
from skippy_stage.protocol import DecodeStep, SamplingParams, VerifyStep, rows_of

from tests.orchestrator.simulation import OFF, Simulation
from tests.scripted import VOCAB, reference

PROMPT = [5, 17, 200, 33, 8, 91, 4, 250, 77]
NGRAM = NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=16)
SAMPLED = SamplingParams(temperature=0.7, seed=3, top_k=40)


def plan(window: int = 4, depth: int = 1, **options: object) -> SpeculationPlan:
    return SpeculationPlan(
        ngram=NGRAM,
        verify_window=VerifyWindowSection(max_tokens=window, pipeline_depth=depth),
        speculative_window=window,
        back_off=False,
        **options,  # type: ignore[arg-type]
    )


class Foresight:
    """A proposer that knows what the scripted model says, and is wrong with a given probability per token."""

    def __init__(self, sampling: SamplingParams, wrong: float, seed: int) -> None:
        self.name = "foresight"
        self._sampling = sampling
        self._wrong = wrong
        self._random = random.Random(seed)
        self._context: list[int] = []

    def follow(self, context: Sequence[int]) -> None:
        self._context = list(context)

    def propose(self, suffix: Sequence[int], limit: int) -> list[int]:
        text = [*self._context, *suffix]
        right = reference(text, limit, self._sampling)
        return [
            (token + 1) % VOCAB if self._random.random() < self._wrong else token
            for token in right[: self._random.randint(0, limit)]
        ]


@pytest.fixture
def foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "make_proposer", lambda _: Foresight(SamplingParams(), 0.2, 1))


@pytest.mark.usefixtures("foresee")
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_the_text_is_the_serial_one(stages: int, depth: int, window: int) -> None:
    sim = Simulation(stages)
    seen = sim.submit(1, PROMPT, 40, speculation=plan(window, depth))
    sim.check_empty()
    assert (seen.tokens, seen.finish_reason) == (reference(PROMPT, 40), "length")
    assert seen.speculation is not None
    assert seen.speculation.accepted_draft_tokens > 0
    assert sim.history.speculation == seen.speculation
    steps = sum(
        isinstance(s, DecodeStep | VerifyStep) for stage, h in sim.headers if not stage for s in h.steps
    )
    assert window == 1 or steps < 39, "windows saved no steps"


@pytest.mark.usefixtures("foresee")
def test_several_windows_of_one_sequence_are_in_flight() -> None:
    sim = Simulation(4)
    sim.submit(1, PROMPT, 60, speculation=plan(4, 4))
    most = 0
    moving = True
    while moving:
        moving = sum(sim.advance(stage) for stage in reversed(range(4))) > 0
        most = max(most, sum(session.steps_in_flight for session in sim.core._running.values()))
    sim.check_empty()
    assert most == 4
    assert sim.seen[1].tokens == reference(PROMPT, 60)


def test_stale_windows_are_skipped_by_stages_that_have_heard_of_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "make_proposer", lambda _: Foresight(SamplingParams(), 0.4, 2))
    sim = Simulation(3)
    seen = sim.submit(1, PROMPT, 60, speculation=plan(3, 4))
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 60)
    assert seen.speculation is not None
    assert seen.speculation.stale_windows > 0
    assert 0 < sim.skipped <= seen.speculation.stale_windows


@pytest.mark.usefixtures("foresee")
@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_max_tokens_inside_a_window(max_tokens: int) -> None:
    sim = Simulation(2)
    seen = sim.submit(1, PROMPT, max_tokens, speculation=plan(6, 3))
    sim.check_empty()
    assert (seen.tokens, seen.finish_reason) == (reference(PROMPT, max_tokens), "length")


@pytest.mark.usefixtures("foresee")
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("kind", ["end", "stop"])
def test_an_end_token_or_a_stop_string_inside_a_window(at: int, kind: str) -> None:
    whole = reference(PROMPT, 30)
    token = whole[at]
    first = whole.index(token)
    sim = Simulation(2, end_tokens=frozenset({token} if kind == "end" else ()))
    seen = sim.submit(1, PROMPT, 30, speculation=plan(6, 3), stop=token if kind == "stop" else None)
    sim.check_empty()
    assert seen.finish_reason == "stop"
    assert seen.tokens == whole[: first + (kind == "stop")]


class Pattern:
    """Full windows of which so many drafts are right, in turn."""

    name = "pattern"

    def __init__(self, right: Sequence[int]) -> None:
        self._right = itertools.cycle(right)
        self._context: list[int] = []

    def follow(self, context: Sequence[int]) -> None:
        self._context = list(context)

    def propose(self, suffix: Sequence[int], limit: int) -> list[int]:
        tokens, right = reference([*self._context, *suffix], limit), next(self._right)
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(tokens)]


@pytest.mark.parametrize("depth", [1, 3])
def test_kv_lengths_on_every_stage_after_any_pattern_of_rejections(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """D-29: no stage keeps the length that it hoped for; all hold what the last stage's answer left."""
    monkeypatch.setattr(sessions, "make_proposer", lambda _: Pattern([0, 1, 4, 0, 3, 4, 4, 2]))
    sim = Simulation(3)
    seen = sim.submit(1, PROMPT, 60, speculation=plan(4, depth))
    lengths: list[list[int]] = [[], [], []]
    executed, cuts = [0, 0, 0], [0, 0, 0]
    while not seen.ended:
        for stage in range(3):
            if not sim.advance(stage):
                continue
            header = [header for at, header in sim.headers if at == stage][executed[stage]]
            executed[stage] += 1
            for step in header.steps:
                cached = sim.engines[stage].usage().cached.get(1, 0)
                if isinstance(step, DecodeStep | VerifyStep) and cached:
                    stale = step.epoch < sim.core._running[1].epoch if 1 in sim.core._running else True
                    assert stale or cached == step.pos_start + rows_of(step), (stage, step)
                    cuts[stage] += bool(lengths[stage]) and step.pos_start < lengths[stage][-1]
                    lengths[stage].append(cached)
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 60)
    assert seen.speculation is not None
    assert seen.speculation.rejected_windows > 4
    if depth == 1:
        assert lengths[0] == lengths[1] == lengths[2]
    assert min(cuts) > 4


def test_real_ngrams_on_text_that_repeats() -> None:
    """The proposer itself, whose guesses here are mostly wrong: nothing is lost by them."""
    sim = Simulation(2)
    seen = sim.submit(1, PROMPT * 3, 80, speculation=plan(4, 2))
    sim.check_empty()
    assert seen.tokens == reference(PROMPT * 3, 80)


plans = st.builds(
    plan,
    st.integers(1, 8),
    st.sampled_from([1, 1, 2, 3, 4, 8]),
    adaptive_speculative_window=st.booleans(),
    draft_acceptance_threshold=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    draft_split_probability=st.sampled_from([0.0, 0.0, 0.3]),
)


def any_plans_in_any_order(data: st.DataObject) -> None:
    """Sessions of all plans together, over cancels, prefix hits, ends in windows and tiny KV budgets."""
    draw = data.draw
    wrong, seed = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.integers(0, 99))
    sampling = draw(st.sampled_from([SamplingParams(), SAMPLED]))
    foresees = draw(st.booleans()) or sampling is SAMPLED
    stages = draw(st.integers(1, 4))
    end = frozenset(draw(st.lists(st.integers(0, 250), max_size=3)))
    prefix = draw(st.sampled_from([OFF, PrefixCacheSection(min_tokens=2, replay_tokens=8)]))
    with pytest.MonkeyPatch.context() as patch:
        if foresees:
            patch.setattr(sessions, "make_proposer", lambda _: Foresight(sampling, wrong, seed))
        sim = Simulation(
            stages,
            scheduler=SchedulerSection(
                max_frame_rows=draw(st.integers(9, 40)),
                max_sessions=draw(st.integers(1, 6)),
                frames_per_link=draw(st.integers(1, 3)),
                min_group_rows=draw(st.integers(1, 4)),
                prefill_rows_while_decoding=draw(st.integers(0, 9)),
            ),
            prefill=PrefillSection(policy="fixed", chunk_tokens=draw(st.integers(1, 9)), credits=2),
            blocks=draw(st.integers(14, 40)),
            end_tokens=end,
            prefix=prefix,
        )
        asked: dict[int, int] = {}
        cancelled: set[int] = set()
        for session in range(1, draw(st.integers(1, 25))):
            match draw(st.sampled_from(["submit", "submit", "advance", "advance", "advance", "cancel"])):
                case "submit":
                    asked[session] = draw(st.integers(1, 30))
                    sim.submit(session, PROMPT, asked[session], sampling=sampling, speculation=draw(plans))
                case "advance":
                    for _ in range(draw(st.integers(1, 8))):
                        sim.advance(draw(st.integers(0, stages - 1)))
                case "cancel" if asked:
                    victim = draw(st.sampled_from(sorted(asked)))
                    cancelled.add(victim)
                    sim.cancel(victim)
            sim.check_integrity()
        sim.check_empty()
    for session, count in asked.items():
        seen = sim.seen[session]
        whole = reference(PROMPT, count, sampling)
        expected = whole[: next((i for i, token in enumerate(whole) if token in end), count)]
        if seen.error is None:
            assert seen.tokens == expected
            assert seen.finish_reason == ("length" if len(expected) == count else "stop")
        else:
            assert isinstance(seen.error, Cancelled)
            assert session in cancelled
            assert seen.tokens == expected[: len(seen.tokens)]


@given(st.data())
@settings(max_examples=150)
def test_any_plans_in_any_order_of_events_give_the_reference(data: st.DataObject) -> None:
    any_plans_in_any_order(data)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=5000)
def test_five_thousand_plans(data: st.DataObject) -> None:
    any_plans_in_any_order(data)


def test_windows_go_on_while_other_groups_are_out() -> None:
    """A session with windows in flight isn't held back by the groups of sessions without."""
    sim = Simulation(4, scheduler=SchedulerSection(min_group_rows=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions, "make_proposer", lambda _: Foresight(SamplingParams(), 0.0, 1))
        sim.submit(1, PROMPT, 60, speculation=plan(4, 4))
        for other in range(2, 6):
            sim.submit(other, [other], 60)
        sim.check_empty()
    both = [
        header
        for stage, header in sim.headers
        if stage == 0 and any(isinstance(step, VerifyStep) for step in header.steps) and len(header.steps) > 1
    ]
    assert both, "windows and decode rows share frames"
    for name in range(1, 6):
        assert sim.seen[name].tokens == reference(PROMPT if name == 1 else [name], 60)
