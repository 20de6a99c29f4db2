"""Proposals: many drafts in one step are what a loop of single decodes gives, whatever shares the frame."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippy_stage.engines import create_engine
from skippy_stage.engines.base import Batch, BatchOutput, StageEngine
from skippy_stage.errors import SkippyError
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.protocol import (
    FrameHeader,
    OpenStep,
    ProbeStep,
    ProposeStep,
    RecordStep,
    Restorable,
    SamplingParams,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    StopStep,
    TrimStep,
    VerifyStep,
)
from skippy_stage.runtime import StageRuntime
from skippy_stage.settings import StageSettings

from tests.scripted import LAYERS, VOCAB, ScriptedEngine, reference
from tests.stage.engines import tiny
from tests.stage.test_runtime import Stage, decode, opened, prefill

GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=2**63 + 11, sample_index=2)
SKIPPED = StepSkipped()


def propose(session: int, start: int, rows: int, drafts: int, epoch: int = 0) -> ProposeStep:
    return ProposeStep(session=session, epoch=epoch, pos_start=start, rows=rows, drafts=drafts)


def open_with(session: int, sampling: SamplingParams, room: int = 200) -> OpenStep:
    return OpenStep(session=session, max_tokens=room, sampling=sampling)


def tokens_of(status: object) -> list[int]:
    assert isinstance(status, StepOk), status
    return list(status.tokens)


def failure_of(status: object) -> str:
    assert isinstance(status, StepFailed), status
    return status.message


def decoded(engine: StageEngine, committed: Sequence[int], count: int, sampling: SamplingParams) -> list[int]:
    """The naive way: a prompt, then one decode step per frame, on a stage of its own."""
    stage = Stage(engine)  # type: ignore[arg-type]
    first = stage.frame(
        open_with(99, sampling), prefill(99, 0, len(committed), sample=True), tokens=list(committed)
    )[1]
    drawn = tokens_of(first)
    while len(drawn) < count:
        drawn += tokens_of(stage.frame(decode(99, len(committed) + len(drawn) - 1), tokens=drawn[-1:])[0])
    stage.frame(ended=(99,))
    return drawn


def known(stage: Stage, session: int) -> list[int]:
    """Tokens that the stage believes to be cached."""
    stage.runtime.check_integrity()
    state = stage.runtime._sessions.get(session)
    assert state is not None
    return state.tokens


def held(stage: Stage, session: int) -> list[int]:
    """Token ids behind the session's KV, after a check that the stage believes them to be these."""
    inputs = [column[0] for column in stage.engine.columns(session)]
    assert known(stage, session) == inputs
    return inputs


def rows_by_round(stage: Stage) -> list[dict[int, int]]:
    return [{rows.sequence: rows.rows for rows in batch.sequences} for batch in stage.engine.batches]


@pytest.fixture(scope="module")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageEngine]:
    """A real model, tiny and whole."""
    folder: Path = tiny.make_folder(tmp_path_factory.mktemp("draft"))
    engine = create_engine(
        StageSettings(
            name="draft",
            model=str(folder),
            first_layer=0,
            last_layer=tiny.LAYERS,
            threads=1,
            kv_tokens=2048,
            weights="f32",
        )
    )
    yield engine
    engine.shutdown()


@pytest.fixture(params=["scripted", "tiny"])
def engine(request: pytest.FixtureRequest) -> Iterator[StageEngine]:
    engine: StageEngine = (
        ScriptedEngine() if request.param == "scripted" else request.getfixturevalue("tiny_engine")
    )
    yield engine
    for sequence in engine.usage().cached:
        engine.close(sequence)


SHAPES = {1: (5, 1), 2: (1, 8), 3: (7, 4), 4: (2, 64), 5: (3, 4)}
"""Session -> rows and drafts."""


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_drafts_of_a_batch_are_those_of_single_decodes(engine: StageEngine, sampling: SamplingParams) -> None:
    prompts = {session: tiny.random_tokens(rows, session).tolist() for session, (rows, _) in SHAPES.items()}
    expected = {
        session: decoded(engine, prompts[session], drafts, sampling)
        for session, (_, drafts) in SHAPES.items()
    }
    stage = Stage(engine)  # type: ignore[arg-type]
    stage.frame(*(open_with(session, sampling) for session in SHAPES))
    statuses = stage.frame(
        *(propose(session, 0, *shape) for session, shape in SHAPES.items()),
        tokens=[*itertools.chain.from_iterable(prompts.values())],
    )
    assert dict(zip(SHAPES, map(tokens_of, statuses), strict=True)) == expected
    cached = {session: rows + drafts - 1 for session, (rows, drafts) in SHAPES.items()}
    assert engine.usage().cached == cached
    stage.runtime.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_after_rejected_drafts_proposals_and_decodes_go_on(
    engine: StageEngine, sampling: SamplingParams
) -> None:
    committed = [3, 1, 4]
    stage = Stage(engine)  # type: ignore[arg-type]
    stage.frame(open_with(1, sampling))
    drafts = tokens_of(stage.frame(propose(1, 0, 3, 6), tokens=committed)[0])
    committed += [*drafts[:2], (drafts[2] + 1) % tiny.VOCAB]
    drafts = tokens_of(stage.frame(propose(1, 5, 1, 6), tokens=committed[5:])[0])
    assert drafts == decoded(engine, committed, 6, sampling)
    committed.append((drafts[0] + 1) % tiny.VOCAB)
    expected = decoded(engine, committed, 4, sampling)
    for position, token in enumerate([committed[-1], *expected[:3]]):
        (status,) = stage.frame(decode(1, 6 + position), tokens=[token])
        assert tokens_of(status) == expected[position : position + 1]
    assert known(stage, 1) == committed + expected[:3]


def test_sessions_draw_with_parameters_of_their_own_at_the_positions_of_the_target() -> None:
    """The noise belongs to seed, sample index and position: a target with the same model draws the same."""
    one, other = SEEDED, SamplingParams(temperature=1.3, seed=5, sample_index=1)
    stage = Stage()
    stage.frame(open_with(1, one), open_with(2, other), opened(3), prefill(1, 0, 2), tokens=[3, 1])
    statuses = stage.frame(
        propose(1, 2, 1, 12), propose(2, 0, 3, 12), propose(3, 0, 3, 12), tokens=[4, 3, 1, 4, 3, 1, 4]
    )
    drafts = [tokens_of(status) for status in statuses]
    assert drafts == [reference([3, 1, 4], 12, sampling) for sampling in (one, other, GREEDY)]
    assert len({tuple(each) for each in drafts}) == 3


def test_rounds_have_one_row_for_each_that_wants_more_and_the_rows_are_counted() -> None:
    stage = Stage()
    stage.frame(*map(opened, (1, 2, 3)))
    stage.accept(propose(1, 0, 3, 1), propose(2, 0, 2, 4), propose(3, 0, 1, 3), tokens=[1, 2, 3, 4, 5, 6])
    frame = stage.runtime.take(timeout=0)
    assert frame is not None
    result, hidden = stage.runtime.execute(frame)
    assert rows_by_round(stage) == [{1: 3, 2: 2, 3: 1}, {2: 1, 3: 1}, {2: 1, 3: 1}, {2: 1}]
    assert all(rows.logits == 1 for batch in stage.engine.batches for rows in batch.sequences)
    assert (result.rows, hidden) == (6 + 3 + 2, None)


def test_rejected_drafts_vanish_and_decode_goes_on() -> None:
    stage = Stage()
    prompt = [3, 1, 4]
    stage.frame(opened())
    drafts = tokens_of(stage.frame(propose(1, 0, 3, 5), tokens=prompt)[0])
    assert drafts == reference(prompt, 5)
    assert held(stage, 1) == prompt + drafts[:4]
    # The target takes two drafts and then goes its own way.
    committed = [*prompt, *drafts[:2], 99]
    again = tokens_of(stage.frame(propose(1, 5, 1, 3, epoch=1), tokens=[99])[0])
    assert again == reference(committed, 3)
    assert held(stage, 1) == committed + again[:2]
    # It takes none of these, and the draft model decodes by single steps as if nothing had been.
    committed.append(98)
    (status,) = stage.frame(decode(1, 6, epoch=1), tokens=[98])
    assert tokens_of(status) == reference(committed, 1)
    assert held(stage, 1) == committed


def test_after_all_drafts_were_taken_the_last_of_them_is_a_row_of_the_next() -> None:
    stage = Stage()
    prompt = [3, 1, 4]
    expected = reference(prompt, 10)
    stage.frame(opened())
    assert tokens_of(stage.frame(propose(1, 0, 3, 4), tokens=prompt)[0]) == expected[:4]
    # The target took four drafts and a free token: the last draft's row and the free token's are missing.
    assert tokens_of(stage.frame(propose(1, 6, 2, 5), tokens=expected[3:5])[0]) == expected[5:10]
    assert held(stage, 1) == prompt + expected[:9]


def test_a_proposal_ahead_of_the_session_fails() -> None:
    stage = Stage()
    stage.frame(opened(), propose(1, 0, 2, 3), tokens=[1, 2])
    (status,) = stage.frame(propose(1, 5, 1, 2), tokens=[9])
    assert failure_of(status) == "session is behind: has 4 positions, the step starts at 5"


def test_proposals_share_a_frame_with_rows_and_controls_of_others() -> None:
    stage = Stage()
    prompt = [3, 1, 4, 1, 5]
    expected = reference(prompt, 9)
    stage.frame(
        *(opened(1), prefill(1, 0, 5), opened(2), prefill(2, 0, 5), opened(4), prefill(4, 0, 5)),
        tokens=prompt * 3,
    )
    statuses = stage.frame(
        decode(1, 5),
        opened(3),
        propose(2, 5, 1, 8),
        TrimStep(session=2, epoch=0, length=6),
        prefill(3, 0, 5, sample=True),
        VerifyStep(session=4, epoch=0, pos_start=5, rows=3, window=1),
        StopStep(session=4),
        tokens=[expected[0], expected[0], *prompt, *expected[:3]],
    )
    assert [tokens_of(status) for status in statuses] == [
        expected[1:2],
        [],
        expected[1:9],
        [],
        expected[:1],
        expected[1:4],
        [],
    ]
    assert rows_by_round(stage)[1:] == [{1: 1, 2: 1, 3: 5, 4: 3}] + [{2: 1}] * 7
    assert known(stage, 2) == prompt + expected[:1], "the trim comes after all drafts"
    stage.runtime.check_integrity()


def test_a_record_behind_a_proposal_keeps_the_committed_positions_only() -> None:
    stage = Stage()
    store = make_prefix_store(stage.engine, "auto")
    stage.runtime = StageRuntime(stage.engine, "draft", prefixes=store)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    statuses = stage.frame(
        *(opened(1), propose(1, 0, 8, 6), RecordStep(session=1, epoch=0, length=8)), tokens=prompt
    )
    drafts = tokens_of(statuses[1])
    # Cut back into what the record shares, so that the block has to be copied.
    assert tokens_of(stage.frame(propose(1, 8, 1, 6), tokens=drafts[:1])[0]) == reference(prompt, 7)[1:]
    stage.frame(opened(2))
    (status,) = stage.frame(ProbeStep(session=2, epoch=0, length=10), tokens=prompt + drafts[:2])
    assert status == StepOk(restorable=Restorable(8))
    stage.runtime.check_integrity()


@dataclass
class Breaking:
    """A fault in some call for a session: 1 is the batch of the rows, 2 the first round behind it."""

    session: int
    call: int
    seen: int = 0

    def __call__(self, batch: Batch) -> None:
        present = [rows.sequence for rows in batch.sequences]
        # A batch that fails is run again one by one: that is no new call.
        if self.session in present and (len(present) > 1 or self.seen < self.call):
            self.seen += 1
        if self.session in present and self.seen == self.call:
            raise SkippyError("out of luck")


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_session_that_fails_in_a_round_fails_alone(call: int) -> None:
    stage = Stage()
    prompts = {1: [3, 1], 2: [4, 1, 5], 3: [9]}
    stage.frame(*map(opened, prompts), prefill(2, 0, 2), tokens=[4, 1])
    stage.engine.fault = Breaking(2, call)
    statuses = stage.frame(
        propose(1, 0, 2, 6),
        propose(2, 2, 1, 6),
        RecordStep(session=2, epoch=0, length=3),
        propose(3, 0, 1, 6),
        tokens=[3, 1, 5, 9],
    )
    assert failure_of(statuses[1]) == "out of luck"
    assert statuses[2] == SKIPPED
    assert tokens_of(statuses[0]) == reference(prompts[1], 6)
    assert tokens_of(statuses[3]) == reference(prompts[3], 6)
    batches = rows_by_round(stage)[1:]
    assert sum(2 in batch for batch in batches) == call - 1, "a failed session is in no later round"
    stage.runtime.check_integrity()
    # Nothing of the failed step counts; the epoch is over, and the next one starts where the step did.
    stage.engine.fault = None
    assert stage.frame(propose(2, 2, 1, 2), tokens=[5]) == (SKIPPED,)
    assert "has 2 positions" in failure_of(stage.frame(propose(2, 3, 1, 2, epoch=1), tokens=[5])[0])
    (status,) = stage.frame(propose(2, 2, 1, 4, epoch=2), tokens=[5])
    assert tokens_of(status) == reference(prompts[2], 4)
    assert held(stage, 2) == [*prompts[2], *reference(prompts[2], 3)]


class NotFinite(ScriptedEngine):
    """Its logits for a sequence are NaN from a position on."""

    def __init__(self, sequence: int, position: int) -> None:
        super().__init__()
        self.bad = (sequence, position)

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        output = super().forward(batch, threads=threads)
        assert output.logits is not None
        for row, rows in enumerate(batch.sequences):
            if (rows.sequence, rows.past) >= self.bad and rows.sequence == self.bad[0]:
                output.logits[row] = np.nan
        return output


def test_logits_that_are_not_finite_in_a_round_cost_the_others_nothing() -> None:
    """The batch gave drafts to those in front of the culprit already; run one by one, they get them once."""
    stage = Stage(NotFinite(2, 4))
    statuses = stage.frame(
        *(opened(1), propose(1, 0, 2, 7), opened(2), propose(2, 0, 2, 7), opened(3), propose(3, 0, 2, 7)),
        tokens=[1, 2, 3, 4, 5, 6],
    )
    assert "logits are not finite at position 5" in failure_of(statuses[3])
    assert tokens_of(statuses[1]) == reference([1, 2], 7)
    assert tokens_of(statuses[5]) == reference([5, 6], 7)
    assert held(stage, 1) == [1, 2, *reference([1, 2], 6)]
    assert held(stage, 3) == [5, 6, *reference([5, 6], 6)]


def test_stale_and_ended_proposals_are_skipped_without_rows() -> None:
    stage = Stage()
    stage.frame(opened(1), prefill(1, 0, 2), opened(2), prefill(2, 0, 2), tokens=[1, 2, 3, 4])
    stage.accept(propose(1, 2, 1, 4), propose(2, 2, 1, 4), tokens=[5, 6])
    stage.accept(propose(1, 2, 1, 4, epoch=1), tokens=[7], live_epochs=((1, 1),), ended=(2,))
    assert stage.execute() == (SKIPPED, SKIPPED)
    assert len(stage.engine.batches) == 1
    (status,) = stage.execute()
    assert tokens_of(status) == reference([1, 2, 7], 4)
    assert set(stage.engine.usage().cached) == {1}
    stage.runtime.check_integrity()


@pytest.mark.parametrize(("first", "last"), [(0, 3), (3, LAYERS)])
def test_a_stage_without_the_whole_model_refuses_and_keeps_what_it_has(first: int, last: int) -> None:
    engine = ScriptedEngine(first, last)
    runtime: StageRuntime[int] = StageRuntime(engine, "stage")
    steps: tuple[Step, ...] = (opened(1), opened(2), prefill(2, 0, 2), propose(1, 0, 2, 3))
    hidden = None if first == 0 else np.ones((4, 4), np.float32)
    header = FrameHeader(incarnation=1, frame=1, steps=steps)
    runtime.accept(header, np.array([1, 2, 3, 4], np.int32), hidden, 0)
    frame = runtime.take(timeout=0)
    assert frame is not None
    statuses = runtime.execute(frame)[0].statuses
    assert failure_of(statuses[3]) == (
        f"propose: the stage holds layers {first} to {last} of {LAYERS}, expected the whole model"
    )
    assert tokens_of(statuses[2]) == []
    assert engine.usage().cached == {1: 0, 2: 2}
    runtime.check_integrity()


def test_room_is_a_limit_for_drafts_too() -> None:
    """The last draft needs no position: it is never decoded."""
    stage = Stage()
    stage.frame(opened(room=6), prefill(1, 0, 2), tokens=[1, 2])
    (status,) = stage.frame(propose(1, 2, 2, 4), tokens=[3, 4])
    assert failure_of(status) == (
        "drafts: got 4, expected at most 3 behind position 3, the session has room for 6"
    )
    assert "room for 6" in failure_of(stage.frame(propose(1, 2, 5, 1, epoch=1), tokens=[3, 4, 5, 6, 7])[0])
    (status,) = stage.frame(propose(1, 2, 2, 3, epoch=2), tokens=[3, 4])
    assert tokens_of(status) == reference([1, 2, 3, 4], 3)
    assert stage.engine.cached(1) == 6


def test_a_stage_out_of_blocks_fails_who_finds_none() -> None:
    """Two sessions reach for the last block in the same round: one gets it."""
    stage = Stage(ScriptedEngine(blocks=3))
    statuses = stage.frame(
        *(opened(1, 8), propose(1, 0, 2, 5), opened(2, 8), propose(2, 0, 2, 5)), tokens=[1, 2, 3, 4]
    )
    assert tokens_of(statuses[1]) == reference([1, 2], 5)
    assert "no KV block is free" in failure_of(statuses[3])
    stage.runtime.check_integrity()


@dataclass
class Speculating:
    """A session that a draft stage runs ahead of."""

    committed: list[int]
    seen: int = 0
    """How many of them the draft stage has."""

    def verified(self, drafts: list[int], taken: int, token: int) -> None:
        """The target takes the first drafts, and then has a token of its own."""
        self.seen = len(self.committed) + min(taken, len(drafts) - 1)
        self.committed += [*drafts[:taken], token]


turns = st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(0, VOCAB - 1))
"""Drafts, how many of them the target takes, and the token that it has behind those."""


@settings(deadline=None)
@given(
    st.lists(st.lists(turns, min_size=3, max_size=3), min_size=1, max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.sampled_from([GREEDY, SEEDED]),
)
def test_drafts_are_the_models_own_whatever_was_taken_before(
    rounds: list[list[tuple[int, int, int]]], prompt: list[int], sampling: SamplingParams
) -> None:
    stage = Stage()
    sessions = [Speculating([*prompt, name]) for name in range(3)]
    stage.frame(*(open_with(name, sampling) for name in range(3)))
    for round_ in rounds:
        steps: list[Step] = []
        inputs: list[int] = []
        for name, (session, (count, _, _)) in enumerate(zip(sessions, round_, strict=True)):
            unseen = session.committed[session.seen :]
            steps.append(propose(name, session.seen, len(unseen), count))
            inputs += unseen
        statuses = stage.frame(*steps, tokens=inputs)
        for name, (session, (count, taken, token)) in enumerate(zip(sessions, round_, strict=True)):
            drafts = tokens_of(statuses[name])
            assert drafts == reference(session.committed, count, sampling)
            assert held(stage, name) == session.committed + drafts[:-1]
            session.verified(drafts, min(taken, count), token)
