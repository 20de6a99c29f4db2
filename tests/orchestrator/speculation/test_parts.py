"""The parts of the decode machine by themselves: spec 12.8, 12.11, 12.12 and 12.15."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from skippy_orchestrator.deployment.speculation import (
    ExtensionSection,
    NativeMtpSection,
    NgramKind,
    NgramSection,
    SpeculationPlan,
)
from skippy_orchestrator.speculation.back_off import BackOff
from skippy_orchestrator.speculation.buffer import ProposalBuffer
from skippy_orchestrator.speculation.classify import Outcome, SerialDecision
from skippy_orchestrator.speculation.compose import Proposal, compose, ngram_limit
from skippy_orchestrator.speculation.epoch import Epoch, commit_of
from skippy_orchestrator.speculation.native_mtp import NativeMtp, Origin
from skippy_orchestrator.speculation.options import SpeculationOptions, after_restore
from skippy_orchestrator.speculation.proposers import Proposer, make_proposer
from skippy_orchestrator.speculation.widths import SerialWidth, VerifyWidth
from skippy_orchestrator.speculation.windows import VerifyWindows, WindowError
from skippy_orchestrator.speculation.work import Path, Work


def proposer_of(kind: NgramKind, least: int, most: int, proposal: int) -> Proposer:
    section = NgramSection(kind=kind, min_ngram=least, max_ngram=most, max_proposal_tokens=proposal)
    return make_proposer(section)


# Widths (12.8)


def serial(outcome: Outcome, commit: int = 1) -> SerialDecision:
    return SerialDecision(outcome, 0, commit)


def test_verify_width() -> None:
    width = VerifyWidth(1, 4)
    seen = [width.current]
    for full in (True, False, False, False):
        width.update(full=full)
        seen.append(width.current)
    assert seen == [2, 3, 2, 1, 1]


@pytest.mark.parametrize(
    ("window", "decisions", "expected"),
    [
        (
            4,
            [serial(Outcome.FULL_ACCEPT), serial(Outcome.EARLY_REJECT), serial(Outcome.TAIL_REJECT)],
            "4 4 3 4",
        ),
        (8, [serial(Outcome.FULL_ACCEPT)] * 5, "4 5 6 7 8 8"),
    ],
)
def test_adaptive_serial_width(window: int, decisions: Sequence[SerialDecision], expected: str) -> None:
    width = SerialWidth(window, adaptive=True)
    seen = [width.current]
    for decision in decisions:
        width.update(decision)
        seen.append(width.current)
    assert seen == [int(n) for n in expected.split()]
    assert (width.least, width.most) == (min(seen[:-1]), max(seen[:-1]))


def test_serial_width_after_an_early_reject() -> None:
    width = SerialWidth(8, adaptive=True)
    width.current = 6
    width.update(serial(Outcome.EARLY_REJECT, 5))
    assert (width.current, width.shrunk) == (5, 1)
    width.current = 2
    width.update(serial(Outcome.EARLY_REJECT, 1))
    assert width.current == 1
    width.update(serial(Outcome.EARLY_REJECT, 1))
    assert (width.current, width.shrunk) == (1, 2)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_serial_width_that_does_not_adapt(outcome: Outcome) -> None:
    width = SerialWidth(6, adaptive=False)
    width.update(serial(outcome))
    assert (width.current, width.grown, width.shrunk) == (6, 0, 0)
    stops = SerialWidth(6, adaptive=True)
    stops.update(serial(Outcome.ACCEPTED_STOP))
    stops.update(serial(Outcome.EARLY_REJECT_STOP))
    assert stops.current == 4


# Composition (12.11)


@pytest.mark.parametrize(
    ("native", "context", "total", "limit", "ngram", "expected"),
    [
        ([9, 10, 11], [], 2, 9, None, (9, 10)),
        ([9], [1, 9, 7, 1, 9, 7, 1], 3, 2, (2, 2), (9, 7, 1)),
        ([], [5, 9, 5], 4, 1, (1, 1), (9,)),
        ([], [5, 9, 5], 4, 2, (1, 1), (9, 5)),
    ],
)
def test_compose(
    native: Sequence[int],
    context: Sequence[int],
    total: int,
    limit: int,
    ngram: tuple[int, int] | None,
    expected: tuple[int, ...],
) -> None:
    proposer = None if ngram is None else proposer_of("cache", *ngram, 16)
    if proposer is not None:
        proposer.follow(context)
    proposal = compose(native, total, limit, 16, proposer)
    assert proposal.tokens == expected
    assert proposal.native == min(len(native), total)


def test_a_tail_of_one_token_is_dropped_where_more_were_allowed() -> None:
    proposer = proposer_of("suffix", 3, 16, 16)
    proposer.follow([1, 2, 3, 4, 1, 2, 3])
    assert compose([4, 1, 2, 3], 8, 4, 16, proposer).tokens == (4, 1, 2, 3, 4, 1, 2, 3)
    proposer.follow([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2])
    alone = proposer_of("suffix", 3, 16, 1)
    alone.follow([1, 2, 3, 4, 1, 2, 3])
    assert compose([], 8, 4, 16, alone) == Proposal((), 0, span_available=True)
    assert compose([], 8, 1, 16, alone).tokens == (4,)


def test_ngram_limit() -> None:
    assert [ngram_limit(4, available) for available in (3, 4, 9)] == [3, 4, 4]
    assert ngram_limit(4, 1) == 0
    assert [ngram_limit(0, available) for available in (0, 3, 9)] == [0, 0, 0]
    assert ngram_limit(1, 9) == 0


def test_buffer_goes_on_behind_a_free_token_that_fits() -> None:
    buffer = ProposalBuffer()
    buffer.fill(Proposal((9, 1, 2, 3), 1))
    assert buffer.window(2) == ((9, 1), 1)
    update = buffer.verified(2, 2, 2, full=True)
    assert (buffer.window(8), buffer.accepted) == (((3,), 0), 3)
    assert (update.ended, update.dependent_rejected) == (False, False)


def test_buffer_ends_behind_a_free_token_that_does_not_fit() -> None:
    buffer = ProposalBuffer()
    buffer.fill(Proposal((9, 10), 2))
    assert buffer.window(1) == ((9,), 1)
    update = buffer.verified(1, 1, 42, full=True)
    assert (len(buffer), update.dependent_rejected, update.native_rejected) == (0, True, True)
    buffer.fill(Proposal((9, 10), 1))
    buffer.window(1)
    assert not buffer.verified(1, 1, 42, full=True).native_rejected, "what was rejected was not the head's"


# Pipeline (12.12)


def window(drafts: Sequence[int], *, starts: bool) -> Work:
    return Work(Path.PIPELINED, 0, (), tuple(drafts), starts_epoch=starts)


def test_chunks_of_an_epoch() -> None:
    epoch = Epoch(1, Proposal((9, 1, 2, 3, 4), 1))
    assert not epoch.started
    assert epoch.next_chunk(3) == ((9, 1, 2), 1)
    assert epoch.started
    assert epoch.next_chunk(3) == ((3, 4), 0)
    assert epoch.candidates == 0


@pytest.mark.parametrize(("dependent", "expected"), [(True, 2), (False, 3)])
def test_commit_of_a_window_that_others_build_on(dependent: bool, expected: int) -> None:
    assert commit_of(2, 3, full=True, dependent=dependent) == expected
    assert commit_of(2, 1, full=False, dependent=dependent) == 1


@pytest.mark.parametrize(
    ("starts", "drafts", "boundary", "reply", "expected"),
    [
        (True, [11, 12], None, [11, 12, 13], (11, 12, 13)),
        (False, [11, 12], 11, [12, 13], (11, 12, 13)),
        (False, [11, 12, 13], 11, [12], (11, 12)),
    ],
)
def test_predictions_that_judge_a_window(
    starts: bool,
    drafts: Sequence[int],
    boundary: int | None,
    reply: Sequence[int],
    expected: tuple[int, ...],
) -> None:
    epoch = Epoch(1, Proposal((11, 12, 13)))
    epoch.boundary = boundary
    assert epoch.target_of(window(drafts, starts=starts), reply) == expected


def test_predictions_that_cannot_judge_a_window() -> None:
    epoch = Epoch(1, Proposal((11, 12, 13)))
    with pytest.raises(ValueError, match="without predictions"):
        epoch.target_of(window([11], starts=True), [])
    with pytest.raises(ValueError, match="boundary"):
        epoch.target_of(window([11], starts=False), [11])


def test_refill_goes_on_behind_the_optimistic_suffix() -> None:
    proposer = proposer_of("cache", 2, 2, 8)
    proposer.follow([1, 2, 3, 1, 2, 3, 1, 2])
    epoch = Epoch(1, Proposal(tuple(proposer.propose((), 2))))
    assert list(epoch.optimistic_suffix) == [3, 1]
    epoch.refill(proposer.propose(epoch.optimistic_suffix, 1))
    assert list(epoch.optimistic_suffix) == [3, 1, 2]
    assert (epoch.length, epoch.candidates) == (3, 3)


def test_windows_come_back_in_order_and_are_never_more_than_the_depth() -> None:
    windows = VerifyWindows(2, 0.0)
    assert [windows.open(0.0), windows.open(1.0)] == [1, 2]
    with pytest.raises(WindowError, match="depth is 2"):
        windows.open(1.0)
    with pytest.raises(WindowError, match="out of order, expected 1"):
        windows.complete_next(2, 1.0)
    windows.complete_next(1, 3.0)
    windows.complete_next(2, 6.0)
    with pytest.raises(WindowError, match="expected none"):
        windows.complete_next(3, 6.0)
    stats = windows.stats
    assert stats.occupancy_s == [0.0, 4.0, 2.0]
    assert (stats.parallel_s, stats.full_s, stats.average_in_flight) == (2.0, 2.0, 8 / 6)
    assert sum(stats.occupancy_s) == 6.0


@pytest.mark.parametrize("depth", [8, 9, 64])
def test_depths_can_be_filled(depth: int) -> None:
    windows = VerifyWindows(depth, 0.0)
    assert [windows.open(0.0) for _ in range(depth)] == list(range(1, depth + 1))
    assert windows.full
    assert windows.stats.max_in_flight == depth
    assert windows.supports_pipelining(1)
    assert not VerifyWindows(1, 0.0).supports_pipelining(4)


NGRAM = NgramSection(kind="suffix", min_ngram=3, max_ngram=16, max_proposal_tokens=8)


def test_the_plan_behind_a_whole_restored_prompt() -> None:
    mtp = NativeMtpSection(enabled=True, max_draft_tokens=3)
    plan = SpeculationPlan(native_mtp=mtp, ngram=NGRAM, extension=ExtensionSection(max_tokens=4))
    dropped = after_restore(plan, keep_ngrams=False)
    assert (dropped.ngram, dropped.extension, dropped.native_mtp) == (None, None, mtp)
    assert after_restore(plan, keep_ngrams=True) is plan


# Paths (7.2)


@pytest.mark.parametrize(
    ("mtp", "ngram", "extension", "draft", "depth", "expected"),
    [
        (0, 0, 0, 0, 4, ""),
        (0, 0, 0, 1, 4, "serial"),
        (0, 1, 0, 1, 4, "serial"),
        (0, 1, 0, 0, 1, "serial"),
        (0, 1, 0, 0, 4, "pipelined"),
        (1, 0, 0, 0, 4, "verify"),
        (1, 1, 1, 0, 1, "verify serial"),
        (1, 1, 1, 0, 4, "verify pipelined"),
        (1, 1, 0, 0, 4, "verify serial"),
    ],
)
def test_which_windows_a_plan_leads_to(
    mtp: bool, ngram: bool, extension: bool, draft: bool, depth: int, expected: str
) -> None:
    plan = SpeculationPlan(
        native_mtp=NativeMtpSection(enabled=bool(mtp)),
        draft_model=bool(draft),
        ngram=NGRAM if ngram else None,
        extension=ExtensionSection(max_tokens=4) if extension else None,
    )
    window = msgspec.structs.replace(plan.verify_window, pipeline_depth=depth)
    plan = msgspec.structs.replace(plan, verify_window=window)
    options = SpeculationOptions(plan, native_mtp=True, draft_model=bool(draft))
    paths = {
        "verify": options.verify_windows,
        "serial": options.serial_windows,
        "pipelined": options.pipelined,
    }
    assert " ".join(name for name, taken in paths.items() if taken) == expected
    assert options.speculates == bool(expected)


# The head's drafts (12.15, 7.7)


def native(**settings: Any) -> NativeMtp:
    section = NativeMtpSection(enabled=True, max_draft_tokens=3, **settings)
    return NativeMtp(SpeculationOptions(SpeculationPlan(native_mtp=section), native_mtp=True))


@pytest.mark.parametrize(
    ("drafted", "predicted", "label", "accepted", "rejected"),
    [
        ([12], [12], "accepted", 1, 0),
        ([12], [13], "rejected", 0, 1),
        ([], [12], "none", 0, 0),
        ([12, 13, 14], [12, 13, 99], "rejected", 2, 1),
        ([12, 13, 14], [99, 13, 14], "rejected", 0, 1),
    ],
)
def test_checks_of_a_draft(
    drafted: list[int], predicted: list[int], label: str, accepted: int, rejected: int
) -> None:
    mtp = native()
    assert mtp.check(drafted, predicted) == label
    assert (mtp.counters.accepted, mtp.counters.rejected) == (accepted, rejected)
    assert mtp.counters.accept_rate == (accepted / (accepted + rejected) if accepted + rejected else 0.0)


def test_a_serial_step_checks_the_first_token_of_what_was_pending() -> None:
    mtp = native()
    mtp.serial_answer(5, [6, 7])
    assert mtp.pending is not None
    assert (mtp.pending.tokens, mtp.pending.origin) == ((6, 7), Origin.INITIAL_SERIAL)
    mtp.serial_answer(6, [8])
    assert (mtp.counters.accepted, mtp.counters.rejected) == (1, 0)
    mtp.window_answer()
    mtp.serial_answer(9, [1])
    assert (mtp.counters.accepted, mtp.counters.rejected) == (1, 1)
    assert mtp.pending.tokens == (1,)
    assert mtp.pending.origin is Origin.SERIAL_AFTER_GAP
    mtp.adopt([4])
    assert mtp.pending.origin is Origin.VERIFY_NEXT


def test_cooldown_counts_serial_steps_and_drops_as_many_drafts_as_it_says() -> None:
    mtp = native(reject_cooldown_tokens=3, suppress_cooldown_draft_limit=2)
    mtp.serial_answer(1, [2])
    mtp.rejected()
    assert (mtp.cooldown, mtp.pending) == (3, None)
    pending = []
    for _ in range(4):
        mtp.serial_answer(1, [2])
        pending.append(mtp.pending is not None)
    assert pending == [False, False, True, True]
    assert (mtp.cooldown, mtp.counters.suppressed) == (0, 2)
    always = native(reject_cooldown_tokens=2, suppress_cooldown_drafts=True)
    always.rejected()
    always.serial_answer(1, [2])
    always.serial_answer(1, [2])
    assert always.pending is None
    always.serial_answer(1, [2])
    assert always.pending is not None


def test_a_taken_draft_is_cut_and_may_be_too_short_to_use() -> None:
    mtp = native(min_draft_tokens=2)
    mtp.serial_answer(1, [2, 3, 4, 5])
    taken = mtp.take(10)
    assert taken is not None
    assert (taken.tokens, mtp.usable(taken), mtp.pending) == ((2, 3, 4), (2, 3, 4), None)
    mtp.serial_answer(1, [2, 3, 4, 5])
    short = mtp.take(2)
    assert short is not None
    assert (short.tokens, mtp.usable(short)) == ((2,), ())


# Back-off


def test_a_proposer_that_does_not_pay_rests_longer_each_time() -> None:
    back_off = BackOff(enabled=True)
    generated, rests = 0, []
    while generated < 400:
        if back_off.rests_at(generated):
            generated += 1
            continue
        before = back_off.rests
        generated += 1
        back_off.update(0, generated)
        if back_off.rests > before:
            rests.append(sum(back_off.rests_at(generated + k) for k in range(200)))
    assert rests[:6] == [8, 16, 32, 64, 128, 128]


def test_a_proposer_that_pays_never_rests() -> None:
    back_off = BackOff(enabled=True)
    for generated in range(100):
        back_off.update(1 if generated % 2 else 0, generated)
        assert not back_off.rests_at(generated + 1)
    off = BackOff(enabled=False)
    for generated in range(100):
        off.update(0, generated)
        assert not off.rests_at(generated + 1)


def test_a_rest_ends_for_good_when_a_trial_pays() -> None:
    back_off = BackOff(enabled=True)
    for _ in range(5):
        back_off.update(0, 10)
    assert back_off.rests_at(11)
    back_off.update(4, 30)
    assert not back_off.rests_at(31)
