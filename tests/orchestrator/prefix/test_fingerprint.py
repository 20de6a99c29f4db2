"""I17: cached output serves a request only if every field that decides it is the same (spec 5.4)."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.prefix.fingerprint import namespace_of, replay_safe, sampling_fingerprint
from skippy_orchestrator.requests import GenerationRequest
from skippy_stage.protocol import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=7, sample_index=1)
GREEDY = msgspec.structs.replace(SAMPLED, temperature=0.0)


def changed(value: Any) -> list[Any]:
    """Other values of the same kind, the nearest ones among them."""
    if isinstance(value, float):
        return [math.nextafter(value, math.inf), value / 2, 0.25]
    return [value + 1, value + 256, value + 2**32]


ONE_CHANGE = [
    pytest.param(name, value, id=f"{name}={value}")
    for name in SamplingParams.__struct_fields__
    for value in changed(getattr(SAMPLED, name))
]


@pytest.mark.parametrize(("name", "value"), ONE_CHANGE)
def test_every_field_of_a_sampled_request_counts(name: str, value: Any) -> None:
    other = msgspec.structs.replace(SAMPLED, **{name: value})
    assert sampling_fingerprint(other) != sampling_fingerprint(SAMPLED)
    assert sampling_fingerprint(msgspec.structs.replace(other)) == sampling_fingerprint(other)


@pytest.mark.parametrize(("name", "value"), ONE_CHANGE)
def test_what_only_steers_the_drawing_does_not_split_greedy_requests(name: str, value: Any) -> None:
    other = sampling_fingerprint(msgspec.structs.replace(GREEDY, **{name: value}))
    assert (other == sampling_fingerprint(GREEDY)) == (name in ("seed", "sample_index"))


def test_all_of_these_differ() -> None:
    samplings = [msgspec.structs.replace(SAMPLED, **{p.values[0]: p.values[1]}) for p in ONE_CHANGE]
    metadata = [None, "", "{}", "<none>", "\0", "\1"]
    prints = {sampling_fingerprint(s, m) for s in [SAMPLED, GREEDY, *samplings] for m in metadata}
    assert len(prints) == (len(samplings) + 2) * len(metadata)


def test_values_that_compare_equal_are_told_apart_by_their_bits() -> None:
    zero, minus = (msgspec.structs.replace(SAMPLED, min_p=value) for value in (0.0, -0.0))
    assert sampling_fingerprint(zero) != sampling_fingerprint(minus)


numbers = st.floats(width=64) | st.integers()


@given(*[st.builds(SamplingParams, temperature=st.floats(0.1, 1), top_p=numbers, seed=numbers)] * 2)
def test_equal_prints_are_of_equal_fields(a: SamplingParams, b: SamplingParams) -> None:
    def fields(sampling: SamplingParams) -> list[object]:
        values = (getattr(sampling, name) for name in sampling.__struct_fields__)
        return [struct.pack("<d", v) if isinstance(v, float) else v for v in values]

    assert (sampling_fingerprint(a) == sampling_fingerprint(b)) == (fields(a) == fields(b))


class Longer(SamplingParams, frozen=True, kw_only=True):
    """What a later version may know: fields of kinds that today's has not."""

    bias: tuple[tuple[int, float], ...] = ()
    samplers: tuple[str, ...] = ()
    switch: bool = False
    other: object = 0


@pytest.mark.parametrize(
    "change",
    [
        {"bias": ((1, 2.0),)},
        {"bias": ((1, 2.0), (3, 4.0))},
        {"samplers": ("a", "b")},
        {"samplers": ("ab",)},
        {"samplers": ("a", "b", "")},
        {"switch": True},
        {"other": "0"},
        {"other": 0.0},
        {"other": False},
    ],
)
def test_new_fields_count_by_themselves(change: dict[str, object]) -> None:
    assert sampling_fingerprint(Longer(temperature=1.0)) != sampling_fingerprint(
        Longer(temperature=1.0, **change)
    )


def test_lists_do_not_run_together() -> None:
    lists = [(), ("",), ("", ""), ("a", "b"), ("ab",), ("b", "a"), (("a",), "b"), ("a", ("b",))]
    assert len({sampling_fingerprint(Longer(temperature=1.0, other=x)) for x in lists}) == len(lists)


def test_a_field_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(TypeError, match="no fingerprint of a dict"):
        sampling_fingerprint(Longer(temperature=1.0, other={}))


@pytest.mark.parametrize(
    ("sampling", "seeded", "safe"),
    [(GREEDY, True, True), (GREEDY, False, True), (SAMPLED, True, True), (SAMPLED, False, False)],
)
def test_output_is_kept_where_the_same_request_can_come_again(
    sampling: SamplingParams, seeded: bool, safe: bool
) -> None:
    request = GenerationRequest(prompt=(1,), max_tokens=1, sampling=sampling, seeded=seeded)
    assert replay_safe(request) is safe


def test_namespaces() -> None:
    assert namespace_of("tok", "k").endswith("openai:prompt_cache_key:k")
    assert "openai" not in namespace_of("tok", "")
    pairs = [("tok", ""), ("tok", "k"), ("", ""), ("", "k"), ("other", ""), ("other", "k")]
    pairs.append(("tokopenai:prompt_cache_key:k", ""))
    assert len({namespace_of(*pair) for pair in pairs}) == len(pairs)


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_a_namespace_is_one_of_its_tokenizer_and_key(a: str, b: str, c: str, d: str) -> None:
    assert (namespace_of(a, b) == namespace_of(c, d)) == ((a, b) == (c, d))
