"""Greedy text is the reference's whatever is guessed ahead: real server, real model, all proposers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from skippy_client import Generation, InvalidRequest, SkippyClient
from skippy_tools.server import ServerProcess

from tests import golden
from tests.triton.support import client_of, generate_all
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

two_stages = pytest.mark.parametrize("server", [2], indirect=True)

CASES = golden.smollm2()
F32_TIE = 1e-3
KINDS = {"suffix": (3, 32), "cache": (1, 4), "simple": (2, 8)}
STAGES = (1, 2, 3)
AT_ONCE = 4
LINK_DELAY_MS = 5
"""Of three stages: windows are on their way long enough to be many."""
PLANS = "\n".join(
    f"""
[speculation.plans.{kind}]
speculative_window = 8
back_off = false
[speculation.plans.{kind}.ngram]
kind = "{kind}"
min_ngram = {least}
max_ngram = {most}
max_proposal_tokens = 32
[speculation.plans.{kind}.verify_window]
max_tokens = 8
pipeline_depth = 4
"""
    for kind, (least, most) in KINDS.items()
)


class Way(NamedTuple):
    """One way to speculate."""

    kind: str
    window: int
    depth: int
    stages: int

    @property
    def wish(self) -> str:
        return f"{self.kind},window={self.window},depth={self.depth}"


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Few rows in which every two values of two columns meet: greedily, always the row with most new pairs."""
    columns = range(len(values))
    pairs = {
        (i, a, j, b) for i, j in itertools.combinations(columns, 2) for a in values[i] for b in values[j]
    }
    rows = []

    def meets(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(columns, 2)} & pairs

    while pairs:
        row = max(itertools.product(*values), key=lambda row: len(meets(row)))
        pairs -= meets(row)
        rows.append(row)
    return rows


ALL = [Way(*row) for row in itertools.product(KINDS, range(1, 9), range(1, 5), STAGES)]
SOME = [Way(*row) for row in pairwise(list(KINDS), range(1, 9), range(1, 5), STAGES)]


@pytest.fixture(scope="module", params=STAGES)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    toml = f"""
[model]
context_tokens = 2048
[pipeline]
stages = {request.param}
weights = "f32"
link_delay_ms = {LINK_DELAY_MS if request.param == 3 else 0}
[scheduler]
frames_per_link = 4
[kv]
tokens = 8192
{PLANS}
"""
    with running(deployment(toml)) as server:
        yield server


@pytest.fixture
def stages(request: pytest.FixtureRequest) -> int:
    count = request.node.callspec.params["server"]
    assert isinstance(count, int)
    return count


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        yield client


ONE_WORD = "serving " * 48


@pytest.fixture(scope="module")
def one_word(server: ServerProcess) -> Generation:
    with client_of(server) as client:
        return client.generate(ONE_WORD, max_tokens=64, speculation="off")


def check(client: SkippyClient, ways: Sequence[Way], first: int = 0, at_once: int = AT_ONCE) -> int:
    """Every way with a prompt of its own, some at a time; returns the drafts that were right."""
    right = 0
    asked = [(CASES[i % len(CASES)], way.wish) for i, way in enumerate(ways, first)]
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        results = generate_all(client, [{**case.request(), "speculation": wish} for case, wish in some])
        for (case, _), result in zip(some, results, strict=True):
            assert isinstance(result, Generation)
            golden.assert_agrees(case, result.token_ids, F32_TIE)
            assert result.total_accepted_draft_tokens <= result.total_draft_tokens
            right += result.total_accepted_draft_tokens
    assert client.status().raw["integrity"] == ""
    return right


def test_the_array_covers_every_pair() -> None:
    for i, j in itertools.combinations(range(4), 2):
        assert {(way[i], way[j]) for way in SOME} == {(way[i], way[j]) for way in ALL}
    assert len(SOME) < 60


def test_text_is_the_reference_over_every_pair_of_choices(client: SkippyClient, stages: int) -> None:
    assert check(client, [way for way in SOME if way.stages == stages], 7 * stages) > 0
    in_flight = client.status().raw["speculation"]["in_flight"]
    assert in_flight["max_in_flight"] >= 2
    if stages == 3:
        assert in_flight["max_in_flight"] == 4
        assert in_flight["occupancy_s"][3] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_text_is_the_reference_over_all_choices_and_prompts(client: SkippyClient, stages: int) -> None:
    for way in ALL:
        if way.stages == stages:
            check(client, [way] * len(CASES), at_once=len(CASES))


@two_stages
def test_with_other_sessions_in_the_batch(client: SkippyClient) -> None:
    wishes = ["off", "suffix", "cache,depth=1", "simple,window=3", "suffix,depth=2", "cache"]
    requests = [
        {**case.request(), "speculation": wish}
        for case, wish in zip(CASES, itertools.cycle(wishes), strict=False)
    ]
    for case, result in zip(CASES, generate_all(client, requests), strict=True):
        assert isinstance(result, Generation)
        golden.assert_agrees(case, result.token_ids, F32_TIE)


@two_stages
def test_behind_a_restored_prompt(client: SkippyClient) -> None:
    prompt = "serving " * 80
    first = client.generate(prompt, max_tokens=40, speculation="off")
    again = client.generate(prompt, max_tokens=40, speculation="suffix")
    assert again.cached_tokens > 0
    assert again.total_accepted_draft_tokens > 0
    assert (again.text, again.token_ids) == (first.text, first.token_ids)


@two_stages
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 4])
def test_one_word_many_times(client: SkippyClient, one_word: Generation, kind: str, depth: int) -> None:
    """D-27: a prompt that is one word 48 times."""
    guessed = client.generate(ONE_WORD, max_tokens=64, speculation=f"{kind},depth={depth}")
    assert guessed.token_ids == one_word.token_ids


@two_stages
def test_stop_words_and_max_tokens_inside_a_window(client: SkippyClient) -> None:
    prompt = "one two three four five six seven eight, " * 6
    whole = client.generate(prompt, max_tokens=48, speculation="off")
    for count in (1, 2, 3, 5, 8, 9, 10, 14):
        part = client.generate(prompt, max_tokens=count, speculation="suffix")
        assert part.token_ids == whole.token_ids[:count]
        assert part.finish_reason == "length"
    words = [word for word in dict.fromkeys(whole.text.split()) if len(word) > 2][:4]
    for word in words:
        plain = client.generate(prompt, max_tokens=48, stop_words=word, speculation="off")
        guessed = client.generate(prompt, max_tokens=48, stop_words=word, speculation="suffix")
        assert (guessed.text, guessed.token_ids, guessed.finish_reason) == (
            plain.text,
            plain.token_ids,
            plain.finish_reason,
        )


@two_stages
def test_seeded_sampling_is_the_same_with_every_proposer(client: SkippyClient) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 11}
    prompt = "A list of colours: red, green, blue, red, green, blue, red,"
    plain = client.generate(prompt, speculation="off", **options)
    wishes = [f"{kind},depth={depth}" for kind, depth in itertools.product(KINDS, (1, 3))]
    # Each with a cache of its own: the same request again would be replayed.
    requests = [
        {**options, "prompt": prompt, "speculation": wish, "prompt_cache_key": wish} for wish in wishes
    ]
    for guessed in generate_all(client, requests):
        assert isinstance(guessed, Generation)
        assert guessed.token_ids == plain.token_ids
        assert guessed.total_draft_tokens > 0


@two_stages
def test_what_was_guessed_is_counted(client: SkippyClient) -> None:
    before = client.status().raw["speculation"]
    result = client.generate(ONE_WORD, max_tokens=64, speculation="suffix")
    after = client.status().raw["speculation"]
    assert result.total_draft_tokens > result.total_accepted_draft_tokens - 1 > 0
    assert after["draft_tokens"] - before["draft_tokens"] == result.total_draft_tokens
    assert (
        after["accepted_draft_tokens"] - before["accepted_draft_tokens"] == result.total_accepted_draft_tokens
    )
    assert after["by_source"]["suffix"]["tokens"] > 0
    off = client.generate(ONE_WORD, max_tokens=8, speculation="off")
    assert (off.total_draft_tokens, off.acceptance_rate) == (0, None)


@two_stages
def test_a_wish_that_cannot_be_met_is_refused_by_name(client: SkippyClient) -> None:
    with pytest.raises(InvalidRequest, match=r"speculation: .*one of off, cache, ngram, simple, suffix"):
        client.generate("x", speculation="magic")
