"""What ``skippy status`` shows, from reports alone."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from skippy_client import wire
from skippy_client.cli_status import PLAIN_WIDTH, busy_shares, render_status

PREFIX = {
    "payload": "resident-kv",
    "entries": 40,
    "blocks": 1200,
    "tokens": 19000,
    "bytes": 3 * 2**20,
    "lookups": 10,
    "hits": 4,
    "restored_tokens": 7654,
    "evicted": 2,
}


def status_text(report: dict[str, object]) -> str:
    console = Console(width=PLAIN_WIDTH, file=io.StringIO())
    with console.capture() as shown:
        console.print(render_status(wire.parse_status(json.dumps(report))))
    return shown.get()


def test_status_table() -> None:
    stage = {
        "name": "skippy_stage_0",
        "ready": False,
        "reason": "gone [since] noon",
        "engine": "torch",
        "first_layer": 0,
        "last_layer": 15,
        "kv_blocks": 200,
        "kv_blocks_used": 50,
        "busy_us": 1_500_000,
        "rss_bytes": 512 * 2**20,
        "last_error": "broke",
    }
    text = status_text({"ready": False, "reason": "lost it", "model": "m", "active": 2, "stages": [stage]})
    for shown in (
        "not ready",
        "lost it",
        "active 2",
        "waiting -",
        "[0, 15)",
        "50/200 (25%)",
        "1.5 s",
        "512 MiB",
    ):
        assert shown in text
    assert "gone [since] noon" in text, "a server's text is not markup"


def test_busy_share_is_the_stage_time_between_two_looks() -> None:
    def at(busy: int) -> object:
        return wire.parse_status(json.dumps({"stages": [{"name": "a", "busy_us": busy}, {"name": "b"}]}))

    assert busy_shares(at(1_000_000), at(1_250_000), 0.5) == {"a": 0.5}  # type: ignore[arg-type]
    assert busy_shares(at(1_000_000), at(3), 0.5) == {}, "a stage that started anew"  # type: ignore[arg-type]


def rows_of(text: str) -> list[list[str]]:
    """The words of the lines behind the head of the prefix cache's table."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("stage  prefix cache"))
    return [line.split() for line in lines[head + 1 :]]


def test_prefix_cache_of_every_stage() -> None:
    stages: list[dict[str, Any]] = [
        {"name": "a", "ready": True, "prefix": PREFIX},
        {"name": "b", "ready": True, "prefix": {"payload": "off", "lookups": 0, "hits": 0}},
        {"name": "c", "ready": True, "prefix": {}},
        {"name": "d", "ready": True},
    ]
    assert rows_of(status_text({"ready": True, "stages": stages})) == [
        ["a", "resident-kv", "40", "1,200", "19,000", "3", "MiB", "4/10", "(40%)", "7,654", "2"],
        ["b", "off", "-", "-", "-", "-", "0/0", "-", "-"],
        ["c", *["-"] * 8],
    ], "a stage that says nothing of it has no row"


@pytest.mark.parametrize(
    ("counters", "line"),
    [
        (
            {"prefix_queries": 10, "prefix_hits": 8, "cached_tokens": 6000, "prompt_tokens": 10000},
            "prefix cache  hits 8/10 (80%)  cached 6,000/10,000 (60%) prompt tokens",
        ),
        (
            {"prefix_queries": 0, "prefix_hits": 0, "cached_tokens": 0, "prompt_tokens": 0},
            "prefix cache  hits 0/0  cached 0/0 prompt tokens",
        ),
        (
            {"prefix_hits": 1, "replayed_tokens": 8},
            "prefix cache  hits 1/-  replayed 8 output tokens",
        ),
        ({"requests": 3, "prompt_tokens": 10}, None),
        ({"prefix_hits": "many"}, None),
        (None, None),
    ],
)
def test_prefix_cache_totals(counters: dict[str, Any] | None, line: str | None) -> None:
    text = status_text({"ready": True, "counters": counters, "stages": [{"name": "a", "ready": True}]})
    shown = [shown.rstrip() for shown in text.splitlines() if "prefix cache" in shown]
    assert shown == ([] if line is None else [line])


def test_prefix_cache_that_is_off() -> None:
    stage = {"name": "a", "ready": True, "prefix": {"payload": "off"}}
    text = status_text({"ready": True, "counters": {"prefix_hits": 0}, "stages": [stage]})
    assert [line.rstrip() for line in text.splitlines() if "prefix" in line] == ["prefix cache off"]


def test_prefix_cache_fits_the_plain_width() -> None:
    large = {name: 987_654_321 if isinstance(value, int) else value for name, value in PREFIX.items()}
    text = status_text({"ready": True, "stages": [{"name": "skippy_stage_0", "prefix": large}]})
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= PLAIN_WIDTH


@pytest.mark.parametrize(
    ("speculation", "line"),
    [
        (
            {
                "draft_tokens": 2000,
                "accepted_draft_tokens": 500,
                "mean_acceptance_length": 1.625,
                "by_source": {
                    "suffix": {"tokens": 1500, "accepted": 450},
                    "native-mtp": {"tokens": 500, "accepted": 50},
                    "cache": {"tokens": 0, "accepted": 0},
                },
            },
            "speculation  right 500/2,000 (25%)  tokens per window 1.62  suffix 30%  native-mtp 10%",
        ),
        ({"draft_tokens": 4, "accepted_draft_tokens": 0}, "speculation  right 0/4 (0%)"),
        ({"draft_tokens": 4, "by_source": ["suffix"]}, "speculation  right -/4"),
        ({"draft_tokens": 0, "accepted_draft_tokens": 0, "mean_acceptance_length": 0.0}, None),
        ("much", None),
        (None, None),
    ],
)
def test_speculation_totals(speculation: object, line: str | None) -> None:
    text = status_text({"ready": True, "speculation": speculation})
    shown = [shown.rstrip() for shown in text.splitlines() if "speculation" in shown]
    assert shown == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (
            {"layers": 1, "drafts": 1234, "failures": 0, "busy_us": 2_500_000},
            "MTP head  drafts 1,234  busy 2.5 s",
        ),
        (
            {"layers": 1, "drafts": 5, "failures": 2, "busy_us": 100_000},
            "MTP head  drafts 5  busy 0.1 s  failures 2",
        ),
        ({"layers": 0, "drafts": 0, "failures": 0, "busy_us": 0}, None),
        (None, None),
    ],
)
def test_the_head_of_the_last_stage(head: object, line: str | None) -> None:
    stages = [{"name": "a", "ready": True}, {"name": "b", "ready": True, "head": head}]
    text = status_text({"ready": True, "stages": stages})
    assert [row.rstrip() for row in text.splitlines() if "head" in row] == ([] if line is None else [line])


def test_the_draft_models_stage_is_the_last_row() -> None:
    draft = {
        "name": "skippy_draft",
        "ready": False,
        "reason": "starting",
        "sessions": 3,
        "busy_us": 1_000_000,
    }
    report = {"ready": True, "stages": [{"name": "skippy_stage_0", "ready": True}], "draft": draft}
    *_, stage, last = [row.split() for row in status_text(report).splitlines() if row.startswith("skippy")]
    assert stage[:2] == ["skippy_stage_0", "ready"]
    assert last[:4] == ["skippy_draft", "not", "ready:", "starting"]
    before, after = (
        wire.parse_status(json.dumps({"draft": {"name": "d", "busy_us": busy}})) for busy in (0, 500_000)
    )
    assert busy_shares(before, after, 2.0) == {"d": 0.25}
