"""Random plans: the machine's text is the target's own, and its counters are the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.orchestrator.speculation.driving import Driver, plan_of
from tests.orchestrator.speculation.reference import ReferencePlan, Target, decode, target_function

PLANS = 5000
BATCH = 1000
COUNTED = ("serial_steps", "serial_windows", "verify_windows", "pipelined_windows", "stale_windows")


def drafter(function: Callable[[Sequence[int]], int], seed: int) -> Callable[[Sequence[int], int], list[int]]:
    """A draft model that is right four times of five."""

    def draft(context: Sequence[int], count: int) -> list[int]:
        rng = random.Random(f"{seed} {len(context)}")
        text = list(context)
        for _ in range(count):
            text.append(function(text) if rng.random() < 0.8 else 0)
        return text[len(context) :]

    return draft


def random_case(trial: int) -> dict[str, Any]:
    rng = random.Random(trial)
    vocabulary = rng.choice([5, 9, 17])
    function = target_function(vocabulary, trial, rng.choice([50, 80, 95, 99]))
    mtp = rng.choice([0, 1, 1])
    ngram = rng.choice([None, (3, 16, 8), (3, 16, 48), (4, 8, 12)])
    max_draft = rng.choice([1, 2, 3])
    plan = ReferencePlan(
        mtp=mtp,
        extension=rng.choice([0, 2, 6, 48]) if mtp and ngram else 0,
        ngram=ngram,
        max_draft=max_draft,
        min_draft=rng.choice([0, 1, max_draft]),
        verify_max=rng.choice([1, 2, 4, 8]),
        depth=rng.choice([1, 1, 2, 3, 8]),
        threshold=rng.choice([0, 0, 0.5, 1.0]),
        split=rng.choice([0, 0, 0.3, 1.0]),
        cooldown=rng.choice([0, 0, 2, 5]),
        suppress=rng.choice([False, True]),
        suppress_limit=rng.choice([0, 2]),
        window=rng.choice([1, 4, 8]),
        adaptive=rng.choice([False, True]),
        draft=rng.choice([None, None, drafter(function, trial)]) if not mtp else None,
    )
    target = {
        "function": function,
        "mtp": max_draft if mtp else 0,
        "mtp_errors": rng.choice([0, 0.2, 0.7]),
        "seed": trial,
        "stops_early": rng.choice([False, True]),
    }
    return {
        "plan": plan,
        "target": target,
        "function": function,
        "prompt": [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))],
        "max_tokens": rng.choice([1, 2, 3, 7, 20, 60]),
        "ends": rng.choice([(), (vocabulary - 1,)]),
    }


@pytest.mark.parametrize("first", range(0, PLANS, BATCH))
def test_text_and_counters_of_random_plans(first: int) -> None:
    totals = dict.fromkeys((*COUNTED, "max_in_flight"), 0)
    for trial in range(first, first + BATCH):
        case = random_case(trial)
        prompt, max_tokens, ends = case["prompt"], case["max_tokens"], case["ends"]
        serial = decode(prompt, max_tokens, Target(case["function"]), ends, ReferencePlan(), {})
        expected: dict[str, int] = {}
        text = decode(prompt, max_tokens, Target(**case["target"]), ends, case["plan"], expected)
        assert text == serial, f"the reference itself, {trial}"
        driver = Driver(
            plan_of(case["plan"]), prompt, max_tokens, Target(**case["target"]), ends, case["plan"].draft
        )
        assert driver.run() == serial, f"trial {trial}: {case['plan']}"
        counters, windows = driver.machine.counters, driver.machine.windows
        got = {name: getattr(counters, name) for name in COUNTED}
        got["max_in_flight"] = windows.stats.max_in_flight if counters.pipelined_windows else 0
        assert got == {name: expected.get(name, 0) for name in got}, f"trial {trial}: {case['plan']}"
        for name, value in got.items():
            totals[name] += value
    assert all(totals.values()), f"paths that were not taken: {totals}"


@pytest.mark.parametrize("late", [False, True])
def test_drafts_that_follow_their_answers_change_nothing(late: bool) -> None:
    """As above with the head's drafts as second responses; used behind rejected ones too, they save steps."""
    steps = {False: 0, True: 0}
    for trial in range(1000):
        case = random_case(trial)
        if not case["plan"].mtp:
            continue
        prompt, max_tokens, ends = case["prompt"], case["max_tokens"], case["ends"]
        target = {**case["target"], "stops_early": True}
        serial = decode(prompt, max_tokens, Target(case["function"]), ends, ReferencePlan(), {})
        expected: dict[str, int] = {}
        decode(prompt, max_tokens, Target(**target), ends, case["plan"], expected)
        for redraft in (False, True):
            plan = plan_of(case["plan"], redraft=redraft)
            driver = Driver(plan, prompt, max_tokens, Target(**target), ends, late=late)
            assert driver.run() == serial, f"trial {trial}: {case['plan']}"
            counters = driver.machine.counters
            steps[redraft] += counters.windows + counters.serial_steps
            if not redraft:
                got = {name: getattr(counters, name) for name in COUNTED}
                assert got == {name: expected.get(name, 0) for name in COUNTED}, f"trial {trial}"
    assert steps[True] < steps[False]
