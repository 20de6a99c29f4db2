"""What the MTP head of a stage sees of frames, and the drafts behind their results, on the scripted engine.

The scripted head asserts that it has seen every position of a text and nothing else; see tests/scripted.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_stage import protocol
from skippy_stage.engines.base import DraftRows
from skippy_stage.errors import ProtocolError
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.protocol import (
    Draft,
    DraftResult,
    FrameHeader,
    OpenStep,
    PrefillStep,
    ProbeStep,
    RecordStep,
    RestoreStep,
    Step,
    StepOk,
    StopStep,
    VerifyStep,
)
from skippy_stage.runtime import StageRuntime

from tests.scripted import ScriptedEngine, reference
from tests.stage.test_runtime import Stage, decode


class Drafting(Stage):
    """A stage whose engine has a head; what came behind the last result is in ``follows``."""

    def __init__(self, *, prefixes: bool = False) -> None:
        super().__init__(ScriptedEngine(mtp=True))
        if prefixes:
            self.runtime = StageRuntime(
                self.engine, "stage_0", prefixes=make_prefix_store(self.engine, "auto")
            )
        self.follows: DraftResult | None = None

    def execute(self) -> tuple[object, ...]:
        frame = self.runtime.take(timeout=0)
        assert frame is not None
        result, _ = self.runtime.execute(frame)
        cached = self.engine.usage().cached
        self.follows = self.runtime.draft(frame)
        assert result.drafts_follow == (self.follows is not None)
        assert self.engine.usage().cached == cached
        self.runtime.check_integrity()
        return result.statuses

    def drafts(self) -> list[Draft]:
        assert self.follows is not None
        assert self.follows.frame == self.number
        return list(self.follows.drafts)


def opened(session: int = 1, drafts: int = 3, room: int = 100) -> OpenStep:
    return OpenStep(session=session, max_tokens=room, drafts=drafts)


def prefill(start: int, rows: int, *, sample: bool = False, session: int = 1) -> PrefillStep:
    return PrefillStep(
        session=session, epoch=0, pos_start=start, rows=rows, sample=sample, lookahead=int(not sample)
    )


def verify(start: int, rows: int, session: int = 1) -> VerifyStep:
    return VerifyStep(session=session, epoch=0, pos_start=start, rows=rows, window=1)


def expected(text: Sequence[int], count: int = 3) -> tuple[int, ...]:
    """What the scripted head drafts behind a text, computed by a head that sees it all at once."""
    stage = Drafting()
    stage.frame(
        OpenStep(session=1, max_tokens=len(text) + count, drafts=count),
        prefill(0, len(text) - 1, sample=True),
        tokens=list(text[:-1]),
    )
    (draft,) = stage.drafts()
    return draft.tokens


def test_drafts_behind_a_prompt_in_chunks_and_behind_decodes() -> None:
    stage = Drafting()
    prompt = [3, 1, 4, 1, 5]
    tokens = reference(prompt, 4)
    stage.frame(opened(), prefill(0, 2), tokens=prompt[:3])
    assert stage.follows is None
    stage.frame(prefill(2, 2), tokens=prompt[2:5])
    stage.frame(prefill(4, 1, sample=True), tokens=prompt[4:])
    (draft,) = stage.drafts()
    assert draft == Draft(session=1, epoch=0, pos_start=4, position=6, tokens=expected([*prompt, tokens[0]]))
    for i in range(3):
        stage.frame(decode(1, 5 + i), tokens=tokens[i : i + 1])
        (draft,) = stage.drafts()
        assert (draft.pos_start, draft.position) == (5 + i, 7 + i)
        assert draft.tokens == expected([*prompt, *tokens[: i + 2]])


@pytest.mark.parametrize("right", range(4))
def test_a_window_is_seen_up_to_its_first_wrong_draft(right: int) -> None:
    stage = Drafting()
    prompt = [3, 1, 4]
    tokens = reference(prompt, 9)
    stage.frame(opened(), prefill(0, 3, sample=True), tokens=prompt)
    window = [tokens[0], *tokens[1 : right + 1], *[(t + 1) % 250 for t in tokens[right + 1 : 4]]]
    stage.frame(verify(3, 4), tokens=window)
    (draft,) = stage.drafts()
    assert draft.position == 3 + right + 2
    assert draft.tokens == expected([*prompt, *tokens[: right + 2]])
    at = 3 + right + 1
    stage.frame(decode(1, at), tokens=[tokens[right + 1]])
    assert stage.drafts()[0].tokens == expected([*prompt, *tokens[: right + 3]])


def test_a_window_behind_one_that_was_wrong_is_owed_an_empty_draft() -> None:
    stage = Drafting()
    tokens = reference([7, 8], 9)
    stage.frame(opened(), prefill(0, 2, sample=True), tokens=[7, 8])
    stage.frame(verify(2, 3), tokens=[tokens[0], 9, 9])
    stage.frame(verify(5, 2), tokens=[9, 9])
    (draft,) = stage.drafts()
    assert (draft.pos_start, draft.tokens) == (5, ())
    stage.frame(verify(3, 3), tokens=tokens[1:4])
    assert stage.drafts()[0].tokens == expected([7, 8, *tokens[:5]])


def test_windows_that_follow_each_other_are_seen_as_one() -> None:
    stage = Drafting()
    tokens = reference([7, 8], 9)
    stage.frame(opened(), prefill(0, 2, sample=True), tokens=[7, 8])
    stage.frame(verify(2, 3), tokens=tokens[:3])
    stage.frame(verify(5, 2), tokens=tokens[3:5])
    assert stage.drafts()[0].tokens == expected([7, 8, *tokens[:6]])


def test_sessions_without_drafts_and_with_their_own_counts() -> None:
    stage = Drafting()
    stage.frame(
        opened(1, drafts=2),
        prefill(0, 2, sample=True),
        opened(2, drafts=0),
        prefill(0, 2, sample=True, session=2),
        opened(3, drafts=4),
        prefill(0, 1, sample=True, session=3),
        tokens=[1, 2, 1, 2, 5],
    )
    assert {draft.session: len(draft.tokens) for draft in stage.drafts()} == {1: 2, 3: 4}
    stage.frame(decode(2, 2), tokens=[3])
    assert stage.follows is None


def test_a_head_that_fails_fails_no_step() -> None:
    stage = Drafting()

    def fault(rows: Sequence[DraftRows]) -> None:
        raise RuntimeError("no")

    tokens = reference([7, 8], 4)
    stage.engine.draft_fault = fault
    statuses = stage.frame(opened(), prefill(0, 2, sample=True), tokens=[7, 8])
    assert statuses == (StepOk(), StepOk(tokens=(tokens[0],)))
    assert [draft.tokens for draft in stage.drafts()] == [()]
    stage.engine.draft_fault = None
    stage.frame(decode(1, 2), tokens=tokens[:1])
    assert [draft.tokens for draft in stage.drafts()] == [()], "it cannot draft over what it has not seen"
    head = stage.runtime.status().head
    assert (head.layers, head.drafts, head.failures) == (1, 0, 1)


def test_rows_of_a_batch_that_was_run_again_are_not_seen() -> None:
    stage = Drafting()
    calls: list[int] = []

    def fault(batch: object) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("together they do not work")

    stage.engine.fault = fault
    stage.frame(
        opened(1),
        prefill(0, 2, sample=True),
        opened(2),
        prefill(0, 2, sample=True, session=2),
        tokens=[1, 2, 3, 4],
    )
    assert {draft.session: bool(draft.tokens) for draft in stage.drafts()} == {1: False, 2: True}


def test_a_session_that_ends_in_the_frame_is_owed_nothing() -> None:
    stage = Drafting()
    stage.frame(opened(), prefill(0, 2, sample=True), StopStep(session=1), tokens=[1, 2])
    assert [draft.tokens for draft in stage.drafts()] == [()]


def test_a_restored_prefix_has_been_seen() -> None:
    stage = Drafting(prefixes=True)
    prompt = [5, 4, 3, 2, 1, 5, 4, 3, 2]
    stage.frame(
        opened(),
        prefill(0, 9, sample=True),
        RecordStep(session=1, epoch=0, length=8),
        tokens=prompt,
    )
    stage.frame(StopStep(session=1))
    stage.frame(opened(2), ProbeStep(session=2, epoch=0, length=8), tokens=prompt[:8])
    stage.frame(
        RestoreStep(session=2, epoch=0, length=8), prefill(8, 1, sample=True, session=2), tokens=prompt[8:]
    )
    assert stage.drafts()[0].tokens == expected([*prompt, reference(prompt, 1)[0]])


@given(st.data())
def test_whatever_windows_come_drafts_are_those_behind_the_text(data: st.DataObject) -> None:
    stage = Drafting()
    text = data.draw(st.lists(st.integers(0, 249), min_size=1, max_size=9))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=3)) | {len(text)})
    steps: list[Step] = [opened(drafts=2)]
    start = 0
    for end in cuts:
        last = end == len(text)
        stage.frame(*steps, prefill(start, end - start, sample=last), tokens=text[start : end + (not last)])
        steps, start = [], end
    text += reference(text, 1)
    for _ in range(data.draw(st.integers(1, 5))):
        true = reference(text, 6)
        right = data.draw(st.integers(0, 3))
        wrong = data.draw(st.integers(0, 3))
        window = [text[-1], *true[:right], *[(token + 1) % 250 for token in true[right : right + wrong]]]
        stage.frame(verify(len(text) - 1, len(window)), tokens=window)
        text += true[: right + 1]
        (draft,) = stage.drafts()
        assert draft.position == len(text)
        assert draft.tokens == expected(text, 2)


def test_draft_results_round_trip_and_counts_are_checked() -> None:
    result = DraftResult(
        incarnation=3, frame=4, drafts=(Draft(session=1, epoch=2, pos_start=5, position=7, tokens=(8, 9)),)
    )
    assert protocol.decode_reply(protocol.encode(result)) == result
    for drafts in (-1, protocol.MAX_DRAFTS + 1):
        header = FrameHeader(incarnation=1, frame=1, steps=(opened(drafts=drafts),))
        with pytest.raises(ProtocolError, match=f"open with {drafts} drafts, 0 to 64"):
            protocol.decode_request(protocol.encode(header))
