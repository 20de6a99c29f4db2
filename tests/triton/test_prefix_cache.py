"""A prompt that was seen before: the same text, fewer rows, and the numbers that say so."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from skippy_client import Generation, SkippyClient
from skippy_stage.protocol import SamplingParams
from skippy_tools.server import ServerProcess

from tests.near_tie import assert_same_text
from tests.triton.support import assert_idle, client_of, http_generate
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

F16_TIE = 0.02
"""The same weights in batches of other shapes: f16 products round differently by far less (tests/stage)."""
TEXT = (
    "The harbour master counted the ships every evening and wrote their names into a long green book. "
    "Nobody had asked him to, and nobody ever read it, but the book was never a day behind."
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running(deployment("[prefix_cache]\nmin_tokens = 16")) as running_server:
        yield running_server


@pytest.fixture
def cached(server: ServerProcess) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        yield client


_keys = iter(range(1, 1 << 30))


def fresh_key() -> str:
    """A cache key that nobody has used: whatever is asked under it is computed."""
    return f"test-{next(_keys)}"


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that are no sentence, so that texts don't settle into a loop at once."""
    chance = random.Random(seed)
    return [chance.randrange(300, 20000) for _ in range(tokens)]


def ask(client: SkippyClient, prompt: list[int], key: str, count: int = 12, **options: Any) -> Generation:
    return client.generate(
        input_ids=prompt, max_tokens=count, ignore_eos=True, prompt_cache_key=key, **options
    )


def check(
    client: SkippyClient, prompt: list[int], cold: Generation, warm: Generation, what: str, **sampling: Any
) -> None:
    params = SamplingParams(**sampling) if sampling else None
    assert_same_text(prompt, cold.token_ids, warm.token_ids, F16_TIE, what, params)


def test_repeats_are_fused_then_replayed(cached: SkippyClient) -> None:
    prompt, key = prompt_of(200), fresh_key()
    cold = ask(cached, prompt, key, 20)
    assert (cold.cached_tokens, cold.cache_stats["status"]) == (0, "miss")  # type: ignore[index]
    assert cold.cache_stats["suffix_prefill_tokens"] == 199  # type: ignore[index]
    sampled = ask(cached, prompt, key, 20, temperature=0.8, seed=5)
    assert sampled.cache_stats["hit_kind"] == "chain_fused_exact_prefix"  # type: ignore[index]
    assert sampled.cached_tokens == 199
    again = ask(cached, prompt, key, 20)
    assert again.cache_stats["hit_kind"] == "chain_exact_replay"  # type: ignore[index]
    assert again.cached_tokens == 200
    assert again.cache_stats["restored_tokens"] == 207  # type: ignore[index]
    assert again.cache_stats["hit_stage_count"] == 2  # type: ignore[index]
    check(cached, prompt, cold, again, "replay")
    elsewhere = ask(cached, prompt, fresh_key(), 20, temperature=0.8, seed=5)
    assert elsewhere.cached_tokens == 0
    check(cached, prompt, elsewhere, sampled, "fused", temperature=0.8, seed=5)


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 47, 48, 49, 95, 96, 97, 158, 159])
def test_a_common_prefix_of_any_length(cached: SkippyClient, length: int) -> None:
    first = prompt_of(160, seed=1)
    other = [*first[:length], *prompt_of(30, seed=length)]
    key = fresh_key()
    ask(cached, first, key)
    warm = ask(cached, other, key)
    assert warm.cached_tokens == length
    assert warm.cache_stats["hit_kind"] == "chain_prefix"  # type: ignore[index]
    check(cached, other, ask(cached, other, fresh_key()), warm, f"prefix of {length}")


def test_another_middle_another_key_another_seed(cached: SkippyClient) -> None:
    prompt, key = prompt_of(120, seed=2), fresh_key()
    middle = [*prompt[:60], 777, *prompt[61:]]
    colds = {name: ask(cached, tokens, fresh_key()) for name, tokens in (("a", prompt), ("b", middle))}
    for _ in range(2):
        for name, tokens in (("a", prompt), ("b", middle)):
            check(cached, tokens, colds[name], ask(cached, tokens, key), name)
    for seed in (1, 2, 1):
        sampling = {"temperature": 0.9, "seed": seed}
        warm = ask(cached, prompt, key, **sampling)
        assert warm.cached_tokens >= 119
        check(cached, prompt, ask(cached, prompt, fresh_key(), **sampling), warm, f"seed {seed}", **sampling)


def test_the_next_turn_of_a_chat(cached: SkippyClient) -> None:
    messages = [{"role": "user", "content": TEXT + " What is the book for?"}]
    key = fresh_key()
    first = cached.generate(messages=messages, max_tokens=24, prompt_cache_key=key)  # type: ignore[arg-type]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
    second = cached.generate(messages=messages, max_tokens=12, prompt_cache_key=key)  # type: ignore[arg-type]
    cold = cached.generate(messages=messages, max_tokens=12, prompt_cache_key=fresh_key())  # type: ignore[arg-type]
    assert second.cached_tokens > first.num_input_tokens
    assert cold.cached_tokens == 0
    assert second.text == cold.text


def test_the_numbers_add_up(cached: SkippyClient) -> None:
    before = cached.status().raw["counters"]
    prompt, key = prompt_of(100, seed=3), fresh_key()
    results = [ask(cached, prompt, key, 4) for _ in range(3)]
    after = assert_idle(cached).raw["counters"]
    delta = {name: after[name] - before[name] for name in before}
    assert delta["cached_tokens"] == sum(r.cached_tokens for r in results) == 200
    assert (delta["prefix_queries"], delta["prefix_hits"], delta["hits_exact_replay"]) == (2, 2, 2)
    assert delta["replayed_tokens"] == 8
    assert delta["prompt_tokens"] == 300
    for stage in cached.status().raw["stages"]:
        assert stage["prefix"]["payload"] == "resident-kv"
        assert stage["prefix"]["restored_tokens"] >= 200
        assert stage["prefix"]["leases"] == 0


def test_generate_over_http_says_what_was_cached(server: ServerProcess) -> None:
    body = {"text_input": TEXT, "max_tokens": 3, "prompt_cache_key": fresh_key()}
    cold, warm = (http_generate(server, body) for _ in range(2))
    assert (cold[0], warm[0]) == (200, 200)
    assert cold[1]["cached_tokens"] == 0
    assert warm[1]["cached_tokens"] == warm[1]["num_input_tokens"]
    assert json.loads(warm[1]["cache_stats"])["hit_kind"] == "chain_exact_replay"
    assert warm[1]["text_output"] == cold[1]["text_output"]


def test_the_kill_switch_beats_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_PREFIX_CACHE", "Off")
    with running(deployment()) as server, client_of(server) as client:
        results = [client.generate(input_ids=prompt_of(100), max_tokens=3) for _ in range(2)]
        assert [r.cached_tokens for r in results] == [0, 0]
        assert results[1].cache_stats["status"] == "disabled"  # type: ignore[index]
        assert all(stage["prefix"]["payload"] == "off" for stage in client.status().raw["stages"])


@dataclass
class Soak:
    """Clients that share prefixes on a server whose KV budget is far too small for all of them."""

    server: ServerProcess
    prompts: list[list[int]]
    colds: list[Generation]
    done: int = 0
    cached_tokens: int = 0
    problems: list[str] = field(default_factory=list)

    def work(self, number: int, until: float) -> None:
        chance = random.Random(number)
        with SkippyClient(self.server.endpoints.grpc, model=self.server.model_name, timeout=120) as client:
            while time.monotonic() < until and not self.problems:
                which = chance.randrange(len(self.prompts))
                stream = client.stream(input_ids=self.prompts[which], max_tokens=10, ignore_eos=True)
                try:
                    if chance.random() < 0.1:
                        time.sleep(chance.random() * 0.2)
                        stream.cancel()
                        continue
                    result = stream.result()
                    assert_same_text(
                        self.prompts[which], self.colds[which].token_ids, result.token_ids, F16_TIE, "soak"
                    )
                    self.done += 1
                    self.cached_tokens += result.cached_tokens
                except Exception as error:
                    self.problems.append(f"{type(error).__name__}: {error}")
                except AssertionError as error:
                    self.problems.append(str(error))


def soak(seconds: float) -> None:
    stems = [prompt_of(length, seed=length) for length in (40, 100, 180, 260)]
    chance = random.Random(5)
    prompts = [
        [*chance.choice(stems)[: chance.randrange(30, 260)], *prompt_of(chance.randrange(1, 60), seed=i)]
        for i in range(60)
    ]
    toml = "[model]\ncontext_tokens = 512\n[kv]\ntokens = 2048\n[prefix_cache]\nmin_tokens = 16"
    with running(deployment(toml)) as server, client_of(server) as client:
        colds = [ask(client, prompt, fresh_key(), 10) for prompt in prompts]
        run = Soak(server, prompts, colds)
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=run.work, args=(i, until)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert run.problems == []
        status = assert_idle(client)
        assert run.cached_tokens > 0
        for stage in status.raw["stages"]:
            assert stage["prefix"]["evicted"] > 100
            assert stage["prefix"]["blocks"] <= stage["kv_blocks"] == 128


def test_sixteen_clients_that_share_prefixes_for_a_quarter_minute() -> None:
    soak(15)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixteen_clients_that_share_prefixes_for_five_minutes() -> None:
    soak(300)
