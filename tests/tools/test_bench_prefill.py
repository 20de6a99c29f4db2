"""``bench prefill`` without a server: what would run, what becomes of it; nothing here is timed."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from skippy_client import GenerationCancelled
from skippy_orchestrator.deployment import Deployment, PrefillSection, parse_deployment
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.errors import SkippyError
from skippy_stage.weights import locate
from skippy_tools.bench import prefill_server
from skippy_tools.bench.prefill_plan import FULL, QUICK, WARM_UP_TOKENS, Plan, Prompts, Variant, make_variants
from skippy_tools.bench.prefill_ratios import Own, prefill_ratios
from skippy_tools.bench.prefill_report import print_prefill_rows
from skippy_tools.bench.prefill_rows import (
    COLD,
    Gaps,
    Kind,
    PrefillRow,
    Sample,
    Setting,
    check_cache,
    gaps_within,
    make_row,
    policy_label,
    rows_of,
    summarize_gaps,
)
from skippy_tools.bench.prefill_server import PrefillServer
from skippy_tools.bench.report import write_json
from skippy_tools.bench.workload import chat_about_a_text, common_tokens

OWN = Own("adaptive-ramp", 0)
SERVER = Setting("server", 2, "adaptive-ramp", 0, 3, 64)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(locate(Deployment().model.path))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.make(locate(Deployment().model.path), FULL, Console())


# What is run


def find(variants: list[Variant], **fields: Any) -> list[Variant]:
    return [
        variant
        for variant in variants
        if all(asdict(Setting.of(variant.deployment))[name] == value for name, value in fields.items())
    ]


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_kind_of_server_is_planned(plan: Plan) -> None:
    variants = make_variants(Deployment(), plan)
    assert [find([each], stages=n)[0].cold for n, each in enumerate(variants[:3], 1)] == [plan.lengths] * 3
    assert all(each.repeats for each in variants[:3])
    assert [each.shares for each in variants[:3]] == [False, True, False]
    for policy in ("fixed:128", "fixed:256", "schedule:64,128,256"):
        (variant,) = find(variants, policy=policy)
        assert (variant.cold, variant.deployment.pipeline.stages) == (plan.policy_lengths, 2)
    pipelined, lock_step = find(variants, threads=1)
    assert pipelined.cold == lock_step.cold == (plan.lock_step_tokens,)
    assert [Setting.of(each.deployment).credits for each in (pipelined, lock_step)] == [3, 0]
    assert Setting.of(lock_step.deployment).policy == "lock-step"
    beside = [each for each in variants if each.interference]
    assert [Setting.of(each.deployment).prefill_rows_while_decoding for each in beside] == [64, 0]
    assert len({msgspec.json.encode(each.deployment) for each in variants}) == len(variants), (
        "servers of no use"
    )
    assert len({each.name for each in variants}) == len(variants)


def test_the_full_run_has_the_lengths_asked_for() -> None:
    assert FULL.lengths == (128, 512, 1000, 4000)
    assert FULL.policy_lengths == (1000, 4000)
    assert FULL.lock_step_tokens == FULL.beside_tokens == 4000
    assert FULL.rounds_of(WARM_UP_TOKENS) > FULL.rounds_of(4000) >= 3


def test_settings_of_the_deployment_are_kept() -> None:
    toml = """
        [prefill]
        policy = "fixed"
        chunk_tokens = 256
        credits = 0
        [prefix_cache]
        mode = "record"
        [scheduler]
        prefill_rows_while_decoding = 0
    """
    variants = make_variants(parse_deployment(toml), QUICK)
    assert not any(each.repeats or each.shares for each in variants), (
        "nothing is restored, so nothing to measure"
    )
    assert sum(each.interference for each in variants) == 1
    assert [Setting.of(each.deployment).credits for each in variants[-2:]] == [PrefillSection().credits, 0]


def test_policies_by_name() -> None:
    assert policy_label(PrefillSection()) == "adaptive-ramp"
    assert policy_label(PrefillSection(policy="fixed", chunk_tokens=64)) == "fixed:64"
    assert policy_label(PrefillSection(policy="schedule", schedule="64,128")) == "schedule:64,128"
    assert policy_label(PrefillSection(policy="fixed", credits=0)) == "lock-step"


# Prompts


def test_prompts_have_their_lengths(prompts: Prompts) -> None:
    assert {length: len(prompt) for length, prompt in prompts.by_length.items()} == {
        length: length for length in (128, 512, 1000, 4000)
    }
    assert len(set(prompts.running)) == 4


def test_questions_share_a_system_prompt_and_no_more(prompts: Prompts) -> None:
    system = prompts.system
    assert system is not None
    shared = common_tokens(system.first, system.second)
    assert FULL.shared_tokens <= shared < min(len(system.first), len(system.second)) - 1


def test_a_turn_of_a_chat_begins_with_the_turns_before(text: TextModel) -> None:
    chat = chat_about_a_text(text, 200)
    first = chat.prompt()
    second = chat.prompt(["About two lighthouses."])
    third = chat.prompt(["About two lighthouses.", "The old one."])
    assert len(first) >= 200
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    assert text.decode(third).count("About two lighthouses.") == 1
    assert chat.turns == 3


def test_common_tokens() -> None:
    assert common_tokens((1, 2, 3), (1, 2, 4, 5)) == 2
    assert common_tokens((1, 2), (1, 2, 3)) == 2
    assert common_tokens((), (1,)) == 0


# What is measured


def test_a_prompt_that_finds_something_else_is_an_error() -> None:
    for kind, cached in ((COLD, 0), (Kind("repeat", "full"), 99), (Kind("repeat", "full"), 100)):
        check_cache(kind, Sample(100, 1.0, cached))
    check_cache(Kind("chat", "prefix"), Sample(100, 1.0, 64))
    for kind, cached in (
        (COLD, 1),
        (Kind("repeat", "full"), 98),
        (Kind("chat", "prefix"), 0),
        (Kind("chat", "prefix"), 99),
    ):
        with pytest.raises(SkippyError, match=f"{kind.scenario}: the server had {cached} of 100"):
            check_cache(kind, Sample(100, 1.0, cached))


class CachingClient:
    """A client of a server that caches whatever it was asked under the same key, and answers with token 7."""

    def __init__(self, url: str, *, model: str) -> None:
        self.seen: dict[str, list[tuple[int, ...]]] = {}
        self.works = True

    def stream(self, **options: Any) -> list[SimpleNamespace]:
        prompt = tuple(options["input_ids"])
        known = self.seen.setdefault(options["prompt_cache_key"], [])
        cached = max((common_tokens(prompt, each) for each in known), default=0) if self.works else 0
        if options.get("temperature"):
            cached = min(cached, len(prompt) - 1)
        known.append((*prompt, 7))
        return [SimpleNamespace(token_ids=(7,), text="Yes.", cached_tokens=cached)]

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> PrefillServer:
    monkeypatch.setattr(prefill_server, "SkippyClient", CachingClient)
    process: Any = SimpleNamespace(endpoints=SimpleNamespace(grpc=""), model_name="")
    return PrefillServer(process)


def test_rounds_of_all_scenarios(server: PrefillServer, prompts: Prompts) -> None:
    assert prompts.system is not None
    assert prompts.conversation is not None
    prompt = prompts.by_length[128]
    for _ in range(2):  # a round finds nothing of the round before
        cold = server.cold(prompt)
        assert {kind: sample.cached_tokens for kind, sample in cold.items()} == {COLD: 0}
        again = server.repeats(prompt)
        assert {kind: sample.cached_tokens for kind, sample in again.items()} == {
            COLD: 0,
            ("repeat", "full"): 128,
            ("repeat-sampled", "full"): 127,
        }
        for name, measured in (
            ("system-prompt", server.system_prompt(prompts.system)),
            ("chat", server.chat(prompts.conversation)),
        ):
            known, fresh = measured[Kind(name, "prefix")], measured[Kind(name, "cold")]
            assert known.prompt_tokens == fresh.prompt_tokens
            assert FULL.shared_tokens <= known.shared_tokens == known.cached_tokens < known.prompt_tokens
            assert fresh.cached_tokens == fresh.shared_tokens == 0


def test_a_cache_that_does_not_work_is_an_error(server: PrefillServer, prompts: Prompts) -> None:
    server._client.works = False  # type: ignore[attr-defined]
    server.cold(prompts.by_length[128])
    with pytest.raises(SkippyError, match="not 'full'"):
        server.repeats(prompts.by_length[128])


class Running:
    """A stream of so many tokens, or of fewer when it is cancelled."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.over = threading.Event()
        self.cancelled = threading.Event()

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for _ in range(self._count):
            if self.over.is_set():
                return
            yield SimpleNamespace(token_ids=(7,), text="x", cached_tokens=0)
            if self.cancelled.wait(0.001):
                raise GenerationCancelled("stop")

    def cancel(self) -> None:
        self.cancelled.set()


class RunningClient:
    """A client whose streams have so many tokens, and whose prompts take a while."""

    count = 10**6
    prompts_end_streams = False

    def __init__(self, url: str, *, model: str) -> None:
        self.streams: list[Running] = []

    def stream(self, **options: Any) -> Running | list[SimpleNamespace]:
        if options["max_tokens"] > 1:
            self.streams.append(Running(self.count))
            return self.streams[-1]
        for stream in self.streams if self.prompts_end_streams else ():
            stream.over.set()
        time.sleep(0.05)
        return [SimpleNamespace(token_ids=(7,), text="x", cached_tokens=0)]

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(active=sum(not stream.cancelled.is_set() for stream in self.streams))


def test_a_prompt_beside_running_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_server, "SkippyClient", RunningClient)
    process: Any = SimpleNamespace(endpoints=SimpleNamespace(grpc=""), model_name="")
    running = [(1, 2), (3, 4)]
    measured = PrefillServer(process).interference(running, 5, (1, 2, 3))
    (sample,) = measured.values()
    assert (sample.prompt_tokens, sample.streams) == (3, 2)
    assert sample.gaps
    assert len(sample.quiet_gaps) >= 2 * 4
    monkeypatch.setattr(RunningClient, "prompts_end_streams", True)
    with pytest.raises(SkippyError, match="ended before"):
        PrefillServer(process).interference(running, 5, (1, 2, 3))
    monkeypatch.setattr(RunningClient, "count", 3)
    with pytest.raises(SkippyError, match="ended early"):
        PrefillServer(process).interference(running, 5, (1, 2, 3))


def test_gaps_count_that_overlap_the_prompt() -> None:
    arrivals = [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]
    assert gaps_within(arrivals, 1.5, 4.5) == [1.0, 2.0, 1.0]
    assert gaps_within(arrivals, 2.0, 4.0) == [2.0]
    assert gaps_within([3.0], 0.0, 9.0) == []
    assert summarize_gaps([0.001 * n for n in range(1, 102)]) == Gaps(51.0, 96.0, 101.0)
    assert summarize_gaps([]) is None


# What is said


def row(
    scenario: str = "cold",
    cache: str = "cold",
    *,
    tokens: int = 1000,
    ttft_s: float = 1.0,
    cached: int = 0,
    gaps: tuple[float, ...] = (),
    **setting: Any,
) -> PrefillRow:
    fields = {**asdict(SERVER), **setting}
    sample = Sample(tokens, ttft_s, cached, cached, 4 * bool(gaps), gaps, (0.01, 0.02) if gaps else ())
    return make_row(Setting(**fields), Kind(scenario, cache), [sample])


def test_rows_are_medians() -> None:
    kinds = [COLD, Kind("repeat", "full")]
    rounds = [{kind: Sample(100, seconds, 0, 0) for kind in kinds} for seconds in (0.4, 0.1, 0.2)]
    first, second = rows_of(SERVER, rounds)
    assert (first.scenario, first.cache, second.scenario, second.cache) == ("cold", "cold", "repeat", "full")
    assert (first.ttft_ms, first.ttft_min_ms, first.ttft_max_ms) == (200.0, 100.0, 400.0)
    assert (first.prompt_tokens_per_s, first.rounds, first.gaps) == (500.0, 3, None)
    assert (first.subject, first.stages, first.threads, first.credits) == ("server", 2, 0, 3)
    changing = [{COLD: Sample(tokens, 0.1)} for tokens in (101, 100, 108)]
    assert rows_of(SERVER, changing)[0].prompt_tokens == 101


ROWS = [
    row(subject="transformers", stages=1, policy="whole", threads=2, credits=None, ttft_s=2.0),
    row(subject="llama_cpp_f16", stages=1, policy="fixed:512", threads=2, credits=None, ttft_s=0.9),
    row(stages=1, ttft_s=1.0),
    row(stages=1, tokens=128, ttft_s=0.1),
    row("repeat", "full", stages=1, tokens=128, ttft_s=0.05, cached=128),
    row(ttft_s=1.2),
    row("repeat", "full", ttft_s=0.006, cached=1000),
    row("repeat-sampled", "full", ttft_s=0.012, cached=999),
    row("system-prompt", "prefix", tokens=1036, ttft_s=0.1, cached=1013),
    row("system-prompt", "cold", tokens=1036, ttft_s=2.0),
    row("chat", "prefix", tokens=900, ttft_s=0.1, cached=890),
    row("chat", "cold", tokens=900, ttft_s=1.0),
    row("interference", tokens=4000, ttft_s=12.0, gaps=(0.1, 0.1)),
    row(policy="fixed:128", ttft_s=1.8),
    row(policy="schedule:64,128,256", ttft_s=0.6),
    row(tokens=4000, threads=1, ttft_s=6.0),
    row(tokens=4000, threads=1, ttft_s=9.0, policy="lock-step", credits=0),
    row("interference", tokens=4000, ttft_s=6.0, gaps=(0.4, 0.4), prefill_rows_while_decoding=0),
]


def test_ratios() -> None:
    assert prefill_ratios(ROWS, OWN) == [
        "pipelined / lock-step, 2 stages, 1 thread each, prefill of 4,000 tokens: 1.50x",
        "adaptive-ramp / fixed:128, 2 stages, prefill of 1,000 tokens: 1.50x",
        "adaptive-ramp / schedule:64,128,256, 2 stages, prefill of 1,000 tokens: 0.50x",
        "server with 1 stage / llama.cpp F16, prefill of 1,000 tokens: 0.90x",
        "server with 1 stage / transformers, prefill of 1,000 tokens: 2.00x",
        "server with 2 stages / llama.cpp F16, prefill of 1,000 tokens: 0.75x",
        "server with 2 stages / transformers, prefill of 1,000 tokens: 1.67x",
        "repeat, 2 stages, 1,000 of 1,000 tokens cached: 0.5 % of the cold TTFT",
        "repeat-sampled, 2 stages, 999 of 1,000 tokens cached: 1.0 % of the cold TTFT",
        "system-prompt, 2 stages, 1,013 of 1,036 tokens cached: 5.0 % of the cold TTFT",
        "chat, 2 stages, 890 of 900 tokens cached: 10.0 % of the cold TTFT",
        "p95 token gap beside a prompt / without one, bound 64 rows: 5.13x",
        "p95 token gap beside a prompt / without one, no bound: 20.51x",
        "bound 64 rows / none, p95 token gap beside a prompt: 0.25x",
        "bound 64 rows / none, longest token gap beside a prompt: 0.25x",
        "bound 64 rows / none, TTFT of the prompt: 2.00x",
    ]


def test_ratios_of_what_was_left_out() -> None:
    assert prefill_ratios(ROWS[:2], OWN) == []
    assert prefill_ratios([ROWS[5], ROWS[13]], Own("fixed:128", 0)) == [
        "fixed:128 / adaptive-ramp, 2 stages, prefill of 1,000 tokens: 0.67x"
    ]


def test_tables_fit_80_columns() -> None:
    console = Console(width=80, file=io.StringIO())
    rows = [*ROWS, row(tokens=4000, ttft_s=123.456, gaps=(99.0,), scenario="interference")]
    with console.capture() as shown:
        print_prefill_rows(console, rows, OWN)
    assert "…" not in shown.get()
    assert "pipelined / lock-step" in shown.get()
    with console.capture() as shown:
        print_prefill_rows(console, ROWS[:1], OWN)
    assert "cached" not in shown.get(), "a table without rows"


def test_rows_as_json(tmp_path: Path) -> None:
    write_json(tmp_path / "rows.json", ROWS)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(ROWS)
    wanted = {"subject", "stages", "policy", "prompt_tokens", "cache", "ttft_ms", "scenario", "cached_tokens"}
    assert all(wanted | {"rounds", "threads"} <= each.keys() for each in rows)
    assert rows[12]["gaps"] == {"median_ms": 100.0, "p95_ms": 100.0, "max_ms": 100.0}
