"""A service whose last stage has an MTP head: drafts come behind their results, through links and events."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from skippy_orchestrator.deployment import PrefixCacheSection, SpeculationPlan
from skippy_orchestrator.deployment.speculation import NativeMtpSection
from skippy_stage.engines.base import DraftRows
from skippy_stage.errors import InvalidArgument

from tests.orchestrator.serving import serving, wait_until
from tests.scripted import reference

PLAN = SpeculationPlan(native_mtp=NativeMtpSection(enabled=True, max_draft_tokens=3))


def drafted(s: object) -> int:
    return int(s.service.status()["stages"][-1]["head"]["drafts"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_drafts_are_made_used_and_counted(stages: int) -> None:
    with serving(stages, mtp=True, prefix=PrefixCacheSection(min_tokens=4, stride_tokens=4)) as s:
        for _ in range(2):
            clients = [s.submit([i, 7, 3, 9, 1, 4, 4], 40, speculation=PLAN) for i in range(5)]
            for i, client in enumerate(clients):
                assert client.finish() == "length"
                assert client.tokens == reference([i, 7, 3, 9, 1, 4, 4], 40)
                counters = client.spans[-1].speculation
                assert counters is not None
                assert counters.by_source["native-mtp"].accepted > 5
        s.wait_free()
        head = s.service.status()["stages"][-1]["head"]
        assert head["drafts"] > 0
        assert (head["layers"], head["failures"]) == (1, 0)


def test_a_head_that_hangs_is_a_lost_stage() -> None:
    with serving(2, mtp=True, limits={"frame_deadline_s": 100.0}) as s:
        stage = s.stages[-1]

        def fault(rows: Sequence[DraftRows]) -> None:
            stage.engine_is_stuck.set()
            stage.released.wait()

        stage.engine.draft_fault = fault
        client = s.submit([1, 2], 30, speculation=PLAN)
        stage.engine_is_stuck.wait()
        client.wait_for_tokens(1)  # the result is read, and now its drafts are waited for
        for _ in range(100):
            s.let_pass(101.0)
            time.sleep(0.05)
            if client.ended:
                break
        assert client.finish().startswith("INTERNAL: stage_1: no answer within 100 s")
        stage.engine.draft_fault = None
        stage.heal()
        s.wait_ready()
        again = s.submit([1, 2], 30, speculation=PLAN)
        assert again.finish() == "length"
        assert again.tokens == reference([1, 2], 30)


def test_a_stage_that_restarts_while_others_draft() -> None:
    with serving(2, mtp=True) as s:
        clients = [s.submit([i, 2], 5000, speculation=PLAN) for i in range(3)]
        wait_until(lambda: drafted(s) > 50, "drafts are made")
        s.stages[-1].restart()
        for client in clients:
            assert client.finish().startswith("INTERNAL: stage_1: ")
        s.wait_ready()
        again = s.submit([1, 2], 30, speculation=PLAN)
        assert again.finish() == "length"


@pytest.mark.parametrize("mtp", [False, True])
def test_a_plan_with_a_head_may_be_named_where_there_is_one(mtp: bool) -> None:
    with serving(1, mtp=mtp) as s:
        inputs = {
            "input_ids": np.array([[1, 2, 3]], np.int32),
            "speculation": np.array([[b"mtp"]], object),
        }
        if mtp:
            assert s.service.parse(inputs, {}).speculation.native_mtp.enabled
        else:
            with pytest.raises(InvalidArgument, match="`mtp` needs a model with an MTP head"):
                s.service.parse(inputs, {})
