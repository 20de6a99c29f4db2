"""Probe, restore, record and stop in frames: their order among rows, leases, and what a failure leaves."""

from __future__ import annotations

import numpy as np
import pytest
from skippy_stage.prefix.activations import ActivationCache
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.protocol import (
    OpenStep,
    ProbeStep,
    RecordStep,
    Restorable,
    RestoreStep,
    Step,
    StepFailed,
    StepOk,
    StepSkipped,
    StopStep,
    TrimStep,
)
from skippy_stage.runtime import StageRuntime

from tests.scripted import LAYERS, ScriptedEngine, reference
from tests.stage.test_runtime import Stage, decode, opened, prefill

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
SKIPPED, OK = StepSkipped(), StepOk()


class PrefixStage(Stage):
    """A stage with a resident prefix store; ``first`` has all layers but the last one."""

    def __init__(self, *, first: bool = False, blocks: int = 64, activation_bytes: int = 0) -> None:
        super().__init__(ScriptedEngine(0, LAYERS - 1 if first else LAYERS, blocks=blocks))
        self.store = make_prefix_store(self.engine, "auto")
        self.runtime = StageRuntime(
            self.engine, "stage_0", prefixes=self.store, activations=ActivationCache(activation_bytes)
        )

    @property
    def leases(self) -> int:
        return self.store.status().leases

    def recorded(self, tokens: list[int] = PROMPT, session: int = 100) -> None:
        """Somebody else has been here."""
        statuses = self.frame(
            opened(session), prefill(session, 0, len(tokens)), record(session, len(tokens)), tokens=tokens
        )
        assert statuses == (OK, OK, OK)
        assert self.frame(StopStep(session=session)) == (OK,)


def probe(session: int, length: int = len(PROMPT)) -> ProbeStep:
    return ProbeStep(session=session, epoch=0, length=length)


def restore(session: int, length: int) -> RestoreStep:
    return RestoreStep(session=session, epoch=0, length=length)


def record(session: int, length: int, epoch: int = 0) -> RecordStep:
    return RecordStep(session=session, epoch=epoch, length=length)


@pytest.mark.parametrize("length", range(1, 10))
def test_probe_then_restore_and_the_first_rows_in_one_frame(length: int) -> None:
    stage = PrefixStage()
    stage.recorded()
    assert stage.frame(opened(), probe(1), tokens=PROMPT) == (OK, StepOk(restorable=Restorable(10)))
    assert stage.leases == 1
    expected = reference(PROMPT, 2)
    rest = len(PROMPT) - length
    statuses = stage.frame(restore(1, length), prefill(1, length, rest, sample=True), tokens=PROMPT[length:])
    assert statuses == (OK, StepOk(tokens=(expected[0],)))
    assert sum(rows.rows for rows in stage.engine.batches[-1].sequences) == rest
    assert stage.frame(decode(1, 10), tokens=expected[:1]) == (StepOk(tokens=(expected[1],)),)
    stage.frame(ended=(1,))
    assert stage.leases == 0
    stage.runtime.check_integrity()


def test_tokens_of_probes_and_rows_share_the_tensor() -> None:
    stage = PrefixStage()
    stage.recorded()
    statuses = stage.frame(
        *(opened(1), prefill(1, 0, 2), opened(2), probe(2), opened(3), prefill(3, 0, 10, sample=True)),
        tokens=[7, 8, *PROMPT, *PROMPT],
    )
    assert statuses[3] == StepOk(restorable=Restorable(10))
    assert statuses[5] == StepOk(tokens=tuple(reference(PROMPT, 1)))


def test_rows_without_a_restore_give_the_lease_back() -> None:
    stage = PrefixStage()
    stage.recorded()
    stage.frame(opened(), probe(1), tokens=PROMPT)
    statuses = stage.frame(prefill(1, 0, 10, sample=True), tokens=PROMPT)
    assert statuses == (StepOk(tokens=tuple(reference(PROMPT, 1))),)
    assert stage.leases == 0
    stage.runtime.check_integrity()


def test_a_record_comes_after_the_rows_that_it_names_and_a_stop_last() -> None:
    stage = PrefixStage()
    statuses = stage.frame(
        *(opened(), prefill(1, 0, 10, sample=True), record(1, 10), StopStep(session=1)), tokens=PROMPT
    )
    assert [type(status) for status in statuses] == [StepOk] * 4
    assert stage.engine.usage().cached == {}
    assert stage.store.status().tokens == 10
    # Behind a stop there is nothing left of the session.
    assert isinstance(stage.frame(decode(1, 10), tokens=[5])[0], StepFailed)
    stage.runtime.check_integrity()


def test_what_is_recorded_in_a_frame_can_be_probed_behind_it() -> None:
    stage = PrefixStage()
    stage.frame(opened(9), prefill(9, 0, 10, sample=True), tokens=PROMPT)
    statuses = stage.frame(record(9, 10), StopStep(session=9), opened(1), probe(1), tokens=PROMPT)
    assert statuses == (OK, OK, OK, StepOk(restorable=Restorable(10)))


def test_a_record_of_more_than_is_there_fails_and_records_nothing() -> None:
    stage = PrefixStage()
    (_, ok, failed) = stage.frame(opened(), prefill(1, 0, 4), record(1, 5), tokens=PROMPT[:4])
    assert ok == OK
    assert failed == StepFailed(code=failed.code, message="record of 5 positions, the session has 4")  # type: ignore[union-attr]
    assert stage.store.status().tokens == 0


def test_after_a_failed_row_step_its_record_is_skipped() -> None:
    stage = PrefixStage()

    def fault(batch: object) -> None:
        raise RuntimeError("out of luck")

    stage.engine.fault = fault
    _, failed, skipped, stopped = stage.frame(
        opened(), prefill(1, 0, 10, sample=True), record(1, 10), StopStep(session=1), tokens=PROMPT
    )
    assert isinstance(failed, StepFailed)
    assert (skipped, stopped) == (SKIPPED, OK)
    assert stage.store.status().tokens == 0
    stage.runtime.check_integrity()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([restore(1, 4)], "restore of 4 positions: 0 probed, room for 100, 0 held"),
        ([probe(1), restore(1, 11)], "restore of 11 positions: 10 probed"),
        ([probe(1), restore(1, 4), restore(1, 4)], "restore of 4 positions: 0 probed, room for 100, 4 held"),
        ([probe(1), restore(1, 4), probe(1)], "probe of a session that holds 4 positions"),
    ],
)
def test_controls_out_of_place_fail_their_session_alone(steps: list[Step], message: str) -> None:
    stage = PrefixStage()
    stage.recorded()
    probes = sum(isinstance(step, ProbeStep) for step in steps)
    *_, failed, other = stage.frame(*(opened(1), *steps, opened(2)), tokens=PROMPT * probes)
    assert isinstance(failed, StepFailed)
    assert message in failed.message
    assert other == OK
    stage.frame(ended=(1, 2))
    assert stage.leases == 0
    stage.runtime.check_integrity()


def test_a_restore_of_what_was_never_leased_names_the_lease() -> None:
    stage = PrefixStage()
    stage.recorded(PROMPT[:6])
    stage.frame(opened(), probe(1), tokens=PROMPT)
    (failed,) = stage.frame(restore(1, 8))
    assert isinstance(failed, StepFailed)
    assert "restore of 8 positions, 6 are leased" in failed.message


def test_a_new_incarnation_drops_leases_and_keeps_records() -> None:
    stage = PrefixStage()
    stage.recorded()
    stage.frame(opened(), probe(1), tokens=PROMPT)
    stage.number = 0
    stage.accept(incarnation=2)
    stage.execute()
    assert stage.leases == 0
    assert stage.engine.usage().cached == {}
    stage.accept(opened(1), probe(1), tokens=PROMPT, incarnation=2)
    assert stage.execute() == (OK, StepOk(restorable=Restorable(10)))


def test_a_prefix_in_another_namespace_is_not_found() -> None:
    stage = PrefixStage()
    stage.recorded()
    other = OpenStep(session=1, max_tokens=20, namespace="other")
    assert stage.frame(other, probe(1), tokens=PROMPT) == (OK, StepOk(restorable=Restorable(0)))


def test_a_cut_back_session_does_not_change_what_it_recorded() -> None:
    """A rejected window behind a record: the record stays as it was (immutable blocks)."""
    stage = PrefixStage()
    stage.frame(opened(9), prefill(9, 0, 10), record(9, 10), tokens=PROMPT)
    stage.frame(TrimStep(session=9, epoch=0, length=5))
    stage.frame(prefill(9, 5, 4), tokens=[99, 98, 97, 96])
    stage.frame(opened(), probe(1), tokens=PROMPT)
    statuses = stage.frame(restore(1, 9), prefill(1, 9, 1, sample=True), tokens=PROMPT[9:])
    assert statuses[1] == StepOk(tokens=tuple(reference(PROMPT, 1)))
    stage.runtime.check_integrity()


def test_first_chunks_are_not_computed_again_where_their_rows_and_kv_are_known() -> None:
    """Spec 4.9, on a first stage: the known rows are sent on, at their place in the frame."""
    stage = PrefixStage(first=True, activation_bytes=1 << 16)
    stage.accept(opened(9), prefill(9, 0, 6), record(9, 6), tokens=PROMPT[:6])
    _, hidden = stage.runtime.execute(stage.runtime.take(timeout=0))  # type: ignore[arg-type]
    stage.frame(StopStep(session=9))
    computed = len(stage.engine.batches)
    stage.accept(
        *(opened(1), opened(2), opened(3)),
        *(prefill(1, 0, 3), prefill(2, 0, 6), prefill(3, 0, 2)),
        tokens=[5, 6, 7, *PROMPT[:6], 8, 9],
    )
    result, rows = stage.runtime.execute(stage.runtime.take(timeout=0))  # type: ignore[arg-type]
    assert result.statuses == (OK,) * 6
    assert rows is not None
    assert hidden is not None
    assert np.array_equal(rows[3:9], hidden)
    (batch,) = stage.engine.batches[computed:]
    assert [item.sequence for item in batch.sequences] == [1, 3]
    assert stage.engine.usage().cached == {1: 3, 2: 6, 3: 2}
    assert stage.runtime.status().prefix.activation_hits == 1
    stage.runtime.check_integrity()


def test_known_rows_without_their_kv_are_computed() -> None:
    stage = PrefixStage(first=True, activation_bytes=1 << 16)
    stage.frame(opened(9), prefill(9, 0, 6), StopStep(session=9), tokens=PROMPT[:6])
    computed = len(stage.engine.batches)
    assert stage.frame(opened(1), prefill(1, 0, 6), tokens=PROMPT[:6]) == (OK, OK)
    assert len(stage.engine.batches) == computed + 1
    status = stage.runtime.status().prefix
    assert (status.activation_hits, status.activation_misses) == (0, 2)
    stage.runtime.check_integrity()
