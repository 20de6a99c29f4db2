from __future__ import annotations

import numpy as np
from skippy_stage.protocol import FrameHeader, OpenStep, StepSkipped
from skippy_stage.runtime import StageRuntime

from tests.scripted import ScriptedEngine

NO_TOKENS = np.empty(0, np.int32)


def test_a_frame_taken_before_a_new_incarnation_came_in_leaves_nothing_in_it() -> None:
    engine = ScriptedEngine()
    runtime: StageRuntime[int] = StageRuntime(engine, "stage_0")
    opening = FrameHeader(incarnation=1, frame=1, steps=(OpenStep(session=1, max_tokens=8),))
    runtime.accept(opening, NO_TOKENS, None, 1)
    taken = runtime.take(0)
    assert taken is not None
    runtime.accept(FrameHeader(incarnation=2, frame=1), NO_TOKENS, None, 2)
    result, _ = runtime.execute(taken)
    assert result.statuses == (StepSkipped(),)
    assert engine.usage().cached == {}
    following = runtime.take(0)
    assert following is not None
    runtime.execute(following)
    runtime.check_integrity()
