"""The draft model's sessions: every proposal continues the text, whatever was guessed, batched or drafted ahead."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_orchestrator.deployment import SchedulerSection
from skippy_orchestrator.deployment.speculation import NgramSection, SpeculationPlan
from skippy_orchestrator.kv_budget import KvBudget
from skippy_orchestrator.speculation.draft_model import (
    DraftCounters,
    Drafted,
    DraftLimits,
    DraftPool,
)
from skippy_stage.engines.base import Batch, BatchOutput
from skippy_stage.protocol import (
    FrameHeader,
    OpenStep,
    PrefillStep,
    ProposeStep,
    SamplingParams,
    StopStep,
    rows_of,
)
from skippy_stage.runtime import StageRuntime

from tests.orchestrator.simulation import Simulation
from tests.scripted import VOCAB, ScriptedEngine, reference

PROMPT = [5, 17, 200, 33, 8, 91, 4, 250, 77]
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.7, seed=3, top_k=40)
LIMITS = DraftLimits(context_tokens=4096, vocab_size=VOCAB, max_frame_rows=64)


class Mistaken(ScriptedEngine):
    """A draft model: as the target, but for logits that stand one token further every few positions."""

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        output = super().forward(batch, threads=threads)
        if output.logits is None:
            return output
        wrong = [int(row.sum() * 10) % 4 == 0 for row in output.logits]
        moved = [np.roll(row, 1) if bad else row for row, bad in zip(output.logits, wrong, strict=True)]
        return BatchOutput(logits=np.stack(moved) if moved else output.logits)


def drafts_of(text: Sequence[int], count: int, sampling: SamplingParams) -> tuple[int, ...]:
    """What the draft model says, asked token by token over the whole text."""
    stage = Stage()
    pool = DraftPool(KvBudget(64, 16), LIMITS, DraftCounters(), ahead=False)
    drafts: list[int] = []
    for index in range(count):
        pool.open(index, [*text, *drafts], len(text) + count, sampling)
        assert pool.want(index, 1) is None
        (drafted,) = stage.run(pool)
        drafts += drafted.tokens
    return tuple(drafts)


@dataclass
class Stage:
    """A draft stage that executes a pool's frames."""

    engine: ScriptedEngine = field(default_factory=Mistaken)
    headers: list[FrameHeader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runtime: StageRuntime[None] = StageRuntime(self.engine, "draft", 0)

    def step(self, pool: DraftPool) -> list[Drafted] | None:
        """One frame, if there is one."""
        frame = pool.next_frame()
        if frame is None:
            return None
        header = FrameHeader(incarnation=1, frame=frame.number, steps=frame.steps)
        self.headers.append(header)
        self.runtime.accept(header, np.array(frame.tokens, np.int32), None, None)
        queued = self.runtime.take(timeout=0)
        assert queued is not None
        result, _ = self.runtime.execute(queued)
        self.runtime.check_integrity()
        return pool.frame_done(frame.number, result.statuses)

    def run(self, pool: DraftPool) -> list[Drafted]:
        """Frames until there is nothing to do."""
        seen: list[Drafted] = []
        while (drafted := self.step(pool)) is not None:
            seen += drafted
        return seen


def make(*, ahead: bool = True, blocks: int = 64, limits: DraftLimits = LIMITS) -> DraftPool:
    return DraftPool(KvBudget(blocks, 4), limits, DraftCounters(), ahead=ahead)


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_proposals_continue_the_text(data: st.DataObject) -> None:
    """Sessions of several texts, of which any part of a proposal is taken and other tokens come behind it."""
    draw = data.draw
    limits = DraftLimits(4096, VOCAB, draw(st.integers(8, 64)), draw(st.integers(0, 4)))
    pool, stage = make(ahead=draw(st.booleans()), blocks=400, limits=limits), Stage()
    sampling = draw(st.sampled_from([GREEDY, SEEDED]))
    texts: dict[int, list[int]] = {}
    wanted: dict[int, int] = {}
    guesses: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, ...]] = {}

    def answer(drafted: Drafted) -> None:
        count = wanted.pop(drafted.session)
        # What was drafted ahead is as long as the proposal before it.
        least = min(count, len(last.get(drafted.session, range(count))))
        assert least <= len(drafted.tokens) <= count
        assert drafted.tokens == drafts_of(texts[drafted.session], len(drafted.tokens), sampling)
        guesses[drafted.session] = last[drafted.session] = drafted.tokens

    for name in range(1, draw(st.integers(2, 12))):
        action = draw(st.sampled_from(["open", "want", "want", "step", "step", "close"]))
        free = sorted(texts.keys() - wanted.keys())
        if action == "open":
            texts[name] = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
            assert pool.open(name, texts[name], 90, sampling)
        elif action == "want" and free:
            session = draw(st.sampled_from(free))
            guessed = guesses.pop(session, ())
            taken = draw(st.integers(0, len(guessed)))
            other = draw(st.lists(st.integers(0, VOCAB - 1), min_size=int(taken == 0), max_size=2))
            texts[session] += [*guessed[:taken], *other]
            wanted[session] = draw(st.integers(1, 4))
            drafted = pool.want(session, wanted[session])
            if drafted is not None:
                answer(drafted)
        elif action == "step":
            for drafted in stage.step(pool) or ():
                answer(drafted)
        elif action == "close" and texts:
            session = draw(st.sampled_from(sorted(texts)))
            pool.close(session)
            texts.pop(session)
            wanted.pop(session, None)
        pool.check_integrity(set(texts))
    for drafted in stage.run(pool):
        answer(drafted)
    assert not wanted
    for session in texts:
        pool.close(session)
    stage.run(pool)
    assert pool.idle
    assert stage.engine.usage().cached == {}


def test_a_whole_proposal_that_is_taken_was_drafted_ahead() -> None:
    pool, stage, text = make(), Stage(), list(PROMPT)
    pool.open(1, text, 60, GREEDY)
    assert pool.want(1, 3) is None
    (first,) = stage.run(pool)
    text += first.tokens
    second = pool.want(1, 3)
    assert second is not None, "the next proposal was not there"
    assert second.tokens == drafts_of(text, 3, GREEDY)
    assert pool.counters.ahead_used == 1
    stage.run(pool)
    text.append((drafts_of(text, 1, GREEDY)[0] + 1) % VOCAB)
    assert pool.want(1, 3) is None, "a proposal for another text was given out"
    assert pool.counters.ahead_wasted == 1
    assert [drafted.tokens for drafted in stage.run(pool)] == [drafts_of(text, 3, GREEDY)]


def test_only_what_is_new_is_computed() -> None:
    pool, stage, text = make(ahead=False), Stage(), list(PROMPT)
    pool.open(1, text, 60, GREEDY)
    assert pool.want(1, 4) is None
    (drafted,) = stage.run(pool)
    for taken, other in ((2, 1), (4, 0), (0, 1)):
        text += [*drafted.tokens[:taken], *[(drafted.tokens[taken % 4] + 1) % VOCAB] * other]
        assert pool.want(1, 4) is None
        (drafted,) = stage.run(pool)
    proposals = [step for h in stage.headers for step in h.steps if isinstance(step, ProposeStep)]
    assert [step.rows for step in proposals] == [len(PROMPT), 1, 1, 1]
    assert [step.pos_start for step in proposals] == [0, 11, 15, 16]


def test_long_prompts_come_in_chunks_and_wait_for_those_that_decode() -> None:
    limits = DraftLimits(4096, VOCAB, max_frame_rows=16, prefill_rows=3)
    pool, stage, text = make(limits=limits, ahead=False), Stage(), list(PROMPT)
    pool.open(1, text, 40, GREEDY)
    pool.open(2, list(range(50)), 80, GREEDY)
    assert pool.want(1, 4) is None
    drafted = stage.run(pool)
    assert [each.session for each in drafted] == [1]
    rows = [sum(map(rows_of, header.steps)) for header in stage.headers]
    assert max(rows) <= 16
    chunks = [s.rows for h in stage.headers for s in h.steps if isinstance(s, PrefillStep) and s.session == 2]
    assert chunks[0] <= 3, "a prompt came before drafts that are waited for"
    assert sum(chunks) == 49, "all but the last token"


def test_tokens_that_the_target_does_not_have_are_not_drafted() -> None:
    limits = DraftLimits(4096, vocab_size=100, max_frame_rows=64)
    for seed in range(20):
        text = [seed, *PROMPT]
        whole = drafts_of(text, 6, GREEDY)
        pool, stage = make(limits=limits), Stage()
        pool.open(1, text, 60, GREEDY)
        assert pool.want(1, 6) is None
        (drafted,) = stage.run(pool)
        known = next((i for i, token in enumerate(whole) if token >= 100), 6)
        assert drafted.tokens == whole[:known]


def test_without_room_or_context_a_session_is_refused() -> None:
    pool = make(blocks=10)
    assert pool.open(1, PROMPT, 30, GREEDY)
    assert not pool.open(2, PROMPT, 30, GREEDY)
    assert not make(limits=DraftLimits(20, VOCAB, 64)).open(3, PROMPT, 21, GREEDY)
    assert pool.want(2, 3) == Drafted(2)
    assert pool.counters.refused == 1


def test_a_session_whose_step_failed_drafts_no_more() -> None:
    def fault(batch: Batch) -> None:
        if any(rows.sequence == 1 for rows in batch.sequences):
            raise RuntimeError("boom")

    pool, stage = make(), Stage(Mistaken(fault=fault))
    for name in (1, 2):
        pool.open(name, list(PROMPT), 60, GREEDY)
        assert pool.want(name, 3) is None
    drafted = {each.session: each.tokens for each in stage.run(pool)}
    assert drafted == {1: (), 2: drafts_of(PROMPT, 3, GREEDY)}
    assert pool.want(1, 3) == Drafted(1)
    assert pool.counters.failed == 1
    assert stage.engine.usage().cached.keys() == {2}


def test_a_frame_that_was_not_sent_is_an_error() -> None:
    pool = make()
    with pytest.raises(ValueError, match="unasked"):
        pool.frame_done(1, [])


# Through the core.


def plan(window: int = 4, **options: object) -> SpeculationPlan:
    return SpeculationPlan(draft_model=True, speculative_window=window, back_off=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_the_text_is_the_serial_one(stages: int, window: int, ahead: bool, sampling: SamplingParams) -> None:
    sim = Simulation(stages, draft=Mistaken(), draft_ahead=ahead)
    seen = sim.submit(1, PROMPT, 60, sampling=sampling, speculation=plan(window))
    other = sim.submit(2, PROMPT[::-1], 40, sampling=sampling, speculation=plan(3))
    plain = sim.submit(3, PROMPT[2:], 40, sampling=sampling)
    sim.check_empty()
    assert seen.tokens == reference(PROMPT, 60, sampling)
    assert other.tokens == reference(PROMPT[::-1], 40, sampling)
    assert plain.tokens == reference(PROMPT[2:], 40, sampling)
    assert seen.speculation is not None
    assert seen.speculation.accepted_draft_tokens > 10
    assert seen.speculation.by_source.keys() == {"draft-model"}
    assert 0 < seen.speculation.acceptance_rate < 1
    assert seen.speculation.draft_s > 0
    assert sim.draft_counters.sessions == 2
    assert (sim.draft_counters.ahead_used > 0) == (ahead and window > 1) or window == 1


def test_sessions_draft_in_one_frame() -> None:
    sim = Simulation(1, draft=Mistaken(), draft_ahead=False)
    for name in range(1, 5):
        sim.submit(name, [name, *PROMPT], 30, speculation=plan())
    sim.check_empty()
    together = max(len([rows for rows in batch.sequences if rows.rows == 1]) for batch in sim_batches(sim))
    assert together == 4


def sim_batches(sim: Simulation) -> list[Batch]:
    assert sim.draft_engine is not None
    return sim.draft_engine.batches


def test_a_draft_model_that_dies_costs_nothing_but_drafts() -> None:
    for when in range(0, 60, 3):
        sim = Simulation(2, draft=Mistaken())
        seen = sim.submit(1, PROMPT, 40, speculation=plan())
        other = sim.submit(2, PROMPT[1:], 40, speculation=plan(3))
        order = random.Random(when)
        for _ in range(when):
            stage = order.randrange(3)
            sim.advance_draft() if stage == 2 else sim.advance(stage)
        sim.lose_draft()
        late = sim.submit(3, PROMPT[2:], 20, speculation=plan())
        sim.check_empty()
        assert seen.tokens == reference(PROMPT, 40)
        assert other.tokens == reference(PROMPT[1:], 40)
        assert late.tokens == reference(PROMPT[2:], 20)


def test_without_room_in_the_draft_model_ngrams_draft() -> None:
    ngram = NgramSection(kind="suffix", min_ngram=3, max_ngram=8, max_proposal_tokens=8)
    sim = Simulation(1, draft=Mistaken(blocks=2))
    seen = sim.submit(1, PROMPT * 3, 80, speculation=plan(ngram=ngram))
    sim.check_empty()
    assert seen.tokens == reference(PROMPT * 3, 80)
    assert sim.draft_counters.refused == 1


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_order_of_events_gives_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    sampling = draw(st.sampled_from([GREEDY, SEEDED]))
    stages = draw(st.integers(1, 3))
    sim = Simulation(
        stages,
        scheduler=SchedulerSection(max_frame_rows=draw(st.integers(10, 40)), max_sessions=4),
        draft=Mistaken(blocks=draw(st.integers(8, 60))),
        draft_ahead=draw(st.booleans()),
    )
    asked: dict[int, int] = {}
    cancelled: set[int] = set()
    for name in range(1, draw(st.integers(2, 20))):
        match draw(st.sampled_from(["submit", "submit", "advance", "advance", "draft", "cancel", "lose"])):
            case "submit":
                asked[name] = draw(st.integers(1, 30))
                sim.submit(
                    name, PROMPT, asked[name], sampling=sampling, speculation=plan(draw(st.integers(1, 6)))
                )
            case "advance":
                for _ in range(draw(st.integers(1, 6))):
                    sim.advance(draw(st.integers(0, stages - 1)))
            case "draft":
                sim.advance_draft()
            case "cancel" if asked:
                cancelled.add(draw(st.sampled_from(sorted(asked))))
                sim.cancel(max(cancelled))
            case "lose" if draw(st.integers(0, 3)) == 0:
                sim.lose_draft()
        sim.check_integrity()
    sim.check_empty()
    for name, count in asked.items():
        if sim.seen[name].error is None:
            assert sim.seen[name].tokens == reference(PROMPT, count, sampling)
        else:
            assert name in cancelled


def test_sessions_are_opened_once_and_stopped_once() -> None:
    pool, stage = make(), Stage()
    for name in (1, 2, 3):
        pool.open(name, list(PROMPT), 60, GREEDY)
        pool.want(name, 2)
        stage.run(pool)
        pool.close(name)
        pool.close(name)
    stage.run(pool)
    steps = [step for header in stage.headers for step in header.steps]
    assert [s.session for s in steps if isinstance(s, OpenStep)] == [1, 2, 3]
    assert [s.session for s in steps if isinstance(s, StopStep)] == [1, 2, 3]
