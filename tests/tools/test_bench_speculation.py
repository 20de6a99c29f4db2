"""What ``bench speculation`` runs and says."""

from __future__ import annotations

import numpy as np
import pytest
from skippy_orchestrator.deployment import Deployment, ModelSection
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.engines.base import Batch, SequenceRows
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate
from skippy_tools.bench import modelled
from skippy_tools.bench.report import median_interval
from skippy_tools.bench.speculation_plan import (
    FULL,
    KINDS,
    SERIAL,
    deployment_of,
    narrowed,
    prompts_of,
    ways,
)
from skippy_tools.bench.speculation_rows import Sample, Setting, ratios, row_of
from skippy_tools.paths import HEAD_FILE


def test_a_row_is_the_median_and_its_times_are_of_pairs() -> None:
    row = row_of(
        Setting("server", "copy", "ngram", 2, 8, 2),
        [Sample(30, 10, 5), Sample(90, 10, 10), Sample(60, 0, 0)],
        [Sample(30), Sample(30), Sample(20)],
    )
    assert (row.decode_tokens_per_s, row.acceptance) == (60, 0.75)
    assert (row.times_serial, row.times_serial_interval) == (3.0, (1.0, 3.0))


@pytest.mark.parametrize(
    ("values", "interval"),
    [
        ([], None),
        ([2.0], (2.0, 2.0)),
        ([3.0, 1.0, 2.0, 5.0, 4.0], (1.0, 5.0)),
        ([*range(6)], (0, 5)),
        ([*range(8)], (0, 7)),
        ([*range(9)], (1, 7)),
        ([*range(15)], (3, 11)),
        ([*range(20)], (5, 14)),
    ],
)
def test_the_interval_of_a_median(values: list[float], interval: tuple[float, float] | None) -> None:
    """Against a table of the sign test: 1 of 6 to 8 values from each end, 2 of 9, 4 of 15, 6 of 20."""
    assert median_interval(values) == interval


def test_a_part_of_the_plan_is_measured_alone() -> None:
    plan = narrowed(FULL, kinds=["random"], stages=[2], depths=[], rounds=15, tokens=None)
    assert (plan.kinds, plan.stages, plan.depths) == (("random",), (2,), FULL.depths)
    assert (plan.rounds, plan.tokens, plan.parts) == (15, FULL.tokens, FULL.parts)
    for chosen in ({"kinds": ["poems"]}, {"parts": ["peer"]}):
        with pytest.raises(ValueError, match=r"expected some of (copy|peers), "):
            narrowed(FULL, **chosen)


def test_what_rows_say_about_each_other() -> None:
    rows = [
        row_of(Setting("transformers_lookup", "copy", "lookup"), [Sample(50)], None),
        row_of(Setting("server", "copy", "off", stages=2), [Sample(40)], None),
        row_of(Setting("server", "copy", "ngram", 1, 8, 2), [Sample(100)], None),
        row_of(Setting("server", "copy", "ngram", 2, 8, 2), [Sample(200)], None),
        row_of(Setting("server_modelled", "copy", "off", stages=4, link_delay_ms=20), [Sample(10)], None),
        row_of(Setting("server_modelled", "copy", "ngram", 1, 16, 4, 1, 20), [Sample(40)], None),
        row_of(Setting("server_modelled", "copy", "ngram", 4, 16, 4, 1, 20), [Sample(90)], None),
    ]
    assert ratios(rows) == [
        "copy, 2 stages: ngram at its best depth / serial: 5.00x",
        "copy, 2 stages: ngram / transformers_lookup: 4.00x",
        "server_modelled, 20 ms per link, best widths: depth 4 / depth 1: 2.25x",
        "server_modelled, 20 ms per link, best widths: depth 4 / serial: 9.00x",
    ]


def test_prompts_and_ways() -> None:
    text = TextModel.load(locate(ModelSection().path))
    for kind in KINDS:
        prompts = prompts_of(kind, text, 8)
        assert len(set(prompts)) == 8, kind
    assert [way.wish for way in ways((1, 2), head=False)] == [
        "off",
        "ngram,window=8,depth=1",
        "ngram,window=8,depth=2",
    ]
    assert ways((1,), head=True)[0] is SERIAL


@pytest.mark.parametrize("head", [None, HEAD_FILE])
def test_a_deployment_lets_requests_have_all_that_is_measured(head: object) -> None:
    made = deployment_of(Deployment(), 4, 20.0, head)  # type: ignore[arg-type]
    assert (made.pipeline.stages, made.pipeline.link_delay_ms) == (4, 20.0)
    assert made.speculation.plan("ngram").verify_window.pipeline_depth == 8
    assert ("composite" in made.speculation.plans) == (head is not None)


def test_modelled_stages_give_one_text_however_they_are_cut() -> None:
    def engine(first: int, last: int) -> modelled.ModelledEngine:
        return modelled.create(
            StageSettings(
                name="m", model=ModelSection().path, first_layer=first, last_layer=last, kv_tokens=512
            )
        )

    whole, first, second = engine(0, 30), engine(0, 10), engine(10, 30)
    for each in (whole, first, second):
        each.open(1, 400)
    tokens = np.arange(200, dtype=np.int32)
    rows = [SequenceRows(1, 0, 200, 3)]
    alone = whole.forward(Batch(rows, tokens)).logits
    hidden = first.forward(Batch([SequenceRows(1, 0, 200)], tokens)).hidden
    cut = second.forward(Batch(rows, tokens, hidden)).logits
    assert alone is not None
    assert cut is not None
    np.testing.assert_array_equal(alone, cut)
    assert alone.argmax(1).tolist() == [198 - 128, 199 - 128, 200 - 128]


def test_modelled_text_goes_on_with_what_its_prompt_repeats() -> None:
    copied = [*range(100, 130)]
    assert modelled.period_of([7, 8, *copied, 9, *copied[:20]]) == 31
    assert modelled.period_of([1, 2] * 20) == 2
    assert modelled.period_of(copied) == modelled.period_of([1]) == modelled.PERIOD
