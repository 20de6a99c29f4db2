"""D-16, D-19 and the table "Defaults and counts": what a request may say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_orchestrator.deployment import LimitsSection, SamplingSection, SpeculationSection
from skippy_orchestrator.requests import INPUTS, GenerationRequest, asks_status, parse_request
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.errors import InvalidArgument
from skippy_stage.protocol import SamplingParams
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

CONTEXT = 32
TYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_, "STRING": np.object_}
LIMITS = LimitsSection(
    default_max_tokens=10, max_text_bytes=200, max_stop_words=2, max_stop_bytes=8, max_cache_key_bytes=6
)


def byte_model(bos: bool) -> TextModel:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 256)]
        )
    table = [bytes([i]) for i in range(256)] + [b""]
    return TextModel(table, frozenset(), tokenizer, None)


NO_DEFAULTS = SamplingSection()
NO_PLANS = SpeculationSection()
PLAIN, WITH_BOS = byte_model(False), byte_model(True)


def tensor(name: str, value: Any) -> np.ndarray[Any, Any]:
    """As Triton hands it over: [1, n], strings as bytes."""
    values = value if isinstance(value, list) else [value]
    values = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array([values], TYPES[INPUTS[name].dtype])


def parse(
    text: TextModel = PLAIN,
    parameters: dict[str, object] | None = None,
    sampling: SamplingSection = NO_DEFAULTS,
    speculation: SpeculationSection = NO_PLANS,
    **values: Any,
) -> GenerationRequest:
    inputs = {
        name: value if isinstance(value, np.ndarray) else tensor(name, value)
        for name, value in values.items()
    }
    return parse_request(inputs, parameters or {}, text, LIMITS, sampling, CONTEXT, lambda: 1234, speculation)


def test_defaults() -> None:
    assert parse(text_input="ab") == GenerationRequest(
        prompt=tuple(PLAIN.encode("ab")), max_tokens=10, sampling=SamplingParams(seed=1234), seeded=False
    )


def test_everything_given() -> None:
    request = parse(
        input_ids=[1, 2, 256],
        max_tokens=3,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.05,
        seed=7,
        stream=True,
        ignore_eos=True,
        stop_words=["a", "b", "a"][:2],
        prompt_cache_key="team 1",
    )
    assert request == GenerationRequest(
        prompt=(1, 2, 256),
        max_tokens=3,
        sampling=SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=7),
        stream=True,
        ignore_eos=True,
        stop_words=("a", "b"),
        cache_key="team 1",
        seeded=True,
    )


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ({}, SamplingParams(seed=1234)),
        ({"temperature": 0.0}, SamplingParams(seed=1234)),
        ({"temperature": 1e-9}, SamplingParams(seed=1234)),
        ({"temperature": 1.0}, SamplingParams(temperature=1.0, seed=1234)),
        ({"temperature": 1.0, "top_k": 10**9}, SamplingParams(temperature=1.0, top_k=257, seed=1234)),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, SamplingParams(seed=1234)),
        ({"seed": 0}, SamplingParams(seed=0)),
        ({"seed": 2**64 - 1}, SamplingParams(seed=2**64 - 1)),
        ({"min_p": 1.0}, SamplingParams(min_p=1.0, seed=1234)),
        ({"temperature": 100.0}, SamplingParams(temperature=100.0, seed=1234)),
    ],
)
def test_sampling_values(given_values: dict[str, Any], expected: SamplingParams) -> None:
    assert parse(text_input="a", **given_values).sampling == expected


@pytest.mark.parametrize(
    ("given_key", "expected"), [("a", "a"), (" a b ", "a b"), ("", ""), (" \n", ""), ("Ä", "Ä")]
)
def test_the_cache_key_is_trimmed(given_key: str, expected: str) -> None:
    assert parse(text_input="a", prompt_cache_key=given_key).cache_key == expected


def test_a_seed_of_the_clients_own_is_told_from_a_drawn_one() -> None:
    assert parse(text_input="a", seed=1234).seeded
    assert not parse(text_input="a").seeded


def test_sampling_defaults_of_the_deployment() -> None:
    spec = SamplingSection(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    assert parse(text_input="a", sampling=spec).sampling == SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=1234
    )
    assert parse(text_input="a", sampling=spec, temperature=0.0).sampling.greedy


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -1.0, "0 to 100"),
        ("temperature", -1e-9, "0 to 100"),
        ("temperature", float("nan"), "0 to 100"),
        ("temperature", float("inf"), "0 to 100"),
        ("temperature", 101.0, "0 to 100"),
        ("top_p", 0.0, "more than 0"),
        ("top_p", -0.1, "0 to 1"),
        ("top_p", 1.1, "0 to 1"),
        ("top_p", float("nan"), "0 to 1"),
        ("top_k", -2, "0 to"),
        ("min_p", -0.5, "0 to 1"),
        ("min_p", 1.5, "0 to 1"),
        ("min_p", float("nan"), "0 to 1"),
        ("max_tokens", 0, "1 to"),
        ("max_tokens", -5, "1 to"),
        ("max_tokens", [1, 2], "one value"),
        ("seed", [1, 2], "one value"),
        ("stream", np.zeros((1, 0), bool), "one value"),
        ("temperature", np.zeros((2, 1), np.float32), "shape"),
        ("temperature", np.zeros((1, 1, 1), np.float32), "shape"),
        ("stop_words", ["a", "b", "c"], "at most 2"),
        ("stop_words", [""], "at least one character"),
        ("stop_words", ["123456789"], "at most 8"),
        ("stop_words", [b"\xff"], "UTF-8"),
        ("prompt_cache_key", "1234567", "at most 6"),
        ("prompt_cache_key", b"\xff", "UTF-8"),
        ("prompt_cache_key", ["a", "b"], "one value"),
    ],
)
def test_values_out_of_range(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field}: got .*, expected .*{limit}") as refusal:
        parse(text_input="a", **{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("values", "field", "limit"),
    [
        ({}, "text_input", "exactly one of text_input, input_ids, messages"),
        ({"text_input": "a", "input_ids": [1]}, "text_input and input_ids", "exactly one"),
        ({"text_input": "", "messages": "[]"}, "text_input and messages", "exactly one"),
        ({"text_input": ""}, "text_input", "at least one token"),
        ({"input_ids": []}, "input_ids", "at least one token"),
        ({"input_ids": [-1]}, "input_ids", "0 to 256"),
        ({"input_ids": [1, 257]}, "input_ids", "0 to 256"),
        ({"input_ids": [1] * CONTEXT}, "input_ids", f"at most {CONTEXT - 1}"),
        ({"text_input": "x" * CONTEXT}, "text_input", f"at most {CONTEXT - 1}"),
        ({"text_input": "x" * 201}, "text_input", "at most 200"),
        ({"text_input": b"\xff\xfe"}, "text_input", "UTF-8"),
        ({"text_input": ["a", "b"]}, "text_input", "one value"),
        ({"messages": '[{"role": "user", "content": "a"}]'}, "messages", "no chat template"),
    ],
)
def test_prompts_that_are_refused(values: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as refusal:
        parse(**values)
    assert refusal.value.field == field


def test_an_empty_text_is_the_bos_token_where_there_is_one() -> None:
    assert parse(WITH_BOS, text_input="").prompt == (256,)
    assert parse(WITH_BOS, text_input=" ").prompt[0] == 256
    assert len(parse(text_input=" ").prompt) == 1


@pytest.mark.parametrize(
    ("n_prompt", "asked", "granted"),
    [(1, 5, 5), (CONTEXT - 1, 5, 1), (CONTEXT - 3, 3, 3), (CONTEXT - 3, 4, 3), (5, 2**31 - 1, CONTEXT - 5)],
)
def test_max_tokens_is_capped_by_the_context(n_prompt: int, asked: int, granted: int) -> None:
    assert parse(input_ids=[1] * n_prompt, max_tokens=asked).max_tokens == granted


def test_the_default_of_max_tokens_is_capped_too() -> None:
    assert parse(input_ids=[1] * (CONTEXT - 4)).max_tokens == 4


@pytest.mark.parametrize("name", ["temperatur", "logprobs", "best_of", "Triton_x", "text_input"])
def test_unknown_parameters_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: got 1"):
        parse(text_input="a", parameters={name: 1})


def test_parameters_of_the_protocol_pass() -> None:
    passed = (
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "triton_enable_empty_final_response",
    )
    assert parse(text_input="a", parameters=dict.fromkeys(passed, 1)).prompt == tuple(PLAIN.encode("a"))


def test_status_stands_alone() -> None:
    assert asks_status({"status": tensor("status", True)}, {})
    assert not asks_status({"status": tensor("status", False), "text_input": tensor("text_input", "a")}, {})
    assert not asks_status({}, {})
    with pytest.raises(InvalidArgument, match=r"^status: .*not text_input"):
        asks_status({"status": tensor("status", True), "text_input": tensor("text_input", "a")}, {})
    with pytest.raises(InvalidArgument, match=r"^verbose"):
        asks_status({"status": tensor("status", True)}, {"verbose": 1})


anything = st.one_of(
    st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.booleans(),
)
arrays = st.builds(
    lambda values, rank: np.array(values, np.object_).reshape((1,) * (rank - 1) + (-1,)),
    st.lists(anything, max_size=3),
    st.integers(1, 3),
)


@given(st.dictionaries(st.sampled_from([name for name in INPUTS if name != "status"]), arrays, max_size=4))
def test_any_input_is_a_request_that_fits_or_a_refusal(inputs: dict[str, Any]) -> None:
    try:
        request = parse_request(inputs, {}, PLAIN, LIMITS, SamplingSection(), CONTEXT, lambda: 1, NO_PLANS)
    except InvalidArgument:
        return
    assert request.prompt
    assert request.max_tokens >= 1
    assert len(request.prompt) + request.max_tokens <= CONTEXT
    assert 0 <= request.sampling.temperature <= 100
    assert 0 < request.sampling.top_p <= 1
    assert request.seeded == ("seed" in inputs)
    assert request.cache_key == request.cache_key.strip()


def test_a_conversation_with_the_real_tokenizer(smollm2: TextModel) -> None:
    request = parse_request(
        {"messages": tensor("messages", '[{"role": "user", "content": "Hi"}]')},
        {},
        smollm2,
        LIMITS,
        SamplingSection(),
        8192,
        lambda: 1,
        NO_PLANS,
    )
    assert smollm2.decode(request.prompt).endswith("user\nHi\nassistant\n")


def test_how_to_speculate_is_the_request_s_wish_or_the_deployment_s_default() -> None:
    section = SpeculationSection(default="ngram")
    assert parse(text_input="x").speculation.ngram is None
    assert parse(text_input="x", speculation=section).speculation.ngram is not None
    wished = parse_wish("off", section)
    assert wished.speculation.ngram is None
    assert parse_wish("ngram,depth=1", NO_PLANS).speculation.verify_window.pipeline_depth == 1


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ("magic", "speculation: got 'magic', expected one of off, ngram"),
        ("ngram,window=0", "speculation: got 'ngram,window=0', expected limits"),
        ("x" * 5000, "speculation"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(wish: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_wish(wish, NO_PLANS)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 500


def parse_wish(wish: str, section: SpeculationSection) -> GenerationRequest:
    inputs = {"text_input": tensor("text_input", "x"), "speculation": tensor("speculation", wish)}
    return parse_request(inputs, {}, PLAIN, LIMITS, NO_DEFAULTS, CONTEXT, lambda: 1234, section)
