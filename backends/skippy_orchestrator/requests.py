"""Requests: from a client's tensors to a checked GenerationRequest.

The two tables are the orchestrator's whole surface: config.pbtxt, the aliases and the reference page are
made from them. Everything else that a client sends is refused by name, before any stage works
(rules and defaults: the table "Defaults and counts" of the design).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from skippy_stage.errors import InvalidArgument
from skippy_stage.protocol import SamplingParams

from skippy_orchestrator.deployment import LimitsSection, SamplingSection, SpeculationPlan, SpeculationSection
from skippy_orchestrator.speculation.options import NO_SPECULATION
from skippy_orchestrator.speculation.request import NO_DRAFTERS, Drafters, choose_plan
from skippy_orchestrator.text.tokenizer import TextModel

Inputs = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of the surface, without its batch dimension."""

    name: str
    dtype: str
    """Triton's name of the type, without ``TYPE_``."""
    dims: tuple[int, ...]
    doc: str


_FIELDS: Final = (
    Field("text_input", "STRING", (1,), "Prompt as text; give this, `input_ids` or `messages`."),
    Field("input_ids", "INT32", (-1,), "Prompt as token ids."),
    Field("messages", "STRING", (1,), 'Conversation as JSON, `[{"role": "user", "content": "..."}]`.'),
    Field("max_tokens", "INT32", (1,), "Most tokens to generate, at least 1; the context limit caps it."),
    Field("temperature", "FP32", (1,), "0 (or below 1e-5) is greedy; up to 100."),
    Field("top_k", "INT32", (1,), "Sample from the k likeliest tokens; 0 is off."),
    Field("top_p", "FP32", (1,), "Sample from the likeliest tokens that make up this probability; 1 is off."),
    Field("min_p", "FP32", (1,), "Leave out tokens less likely than this share of the likeliest; 0 is off."),
    Field("seed", "UINT64", (1,), "Same seed, same text; drawn and reported when left out."),
    Field("stream", "BOOL", (1,), "One response for every committed span instead of one in all."),
    Field("ignore_eos", "BOOL", (1,), "Go on after the end token, to `max_tokens`."),
    Field("stop_words", "STRING", (-1,), "Strings that end the text, which ends before them."),
    Field(
        "prompt_cache_key",
        "STRING",
        (1,),
        "Only requests with the same key share cached prefixes; spaces around it don't count, empty is none.",
    ),
    Field(
        "speculation",
        "STRING",
        (1,),
        "Plan of speculative decoding: `off`, a plan's name, limits such as `window=4,depth=1`, or a name and limits.",
    ),
    Field("status", "BOOL", (1,), "Ask for the state of the deployment instead of a generation."),
)
INPUTS: Final = {field.name: field for field in _FIELDS}
"""What a client may send; all of it is optional for Triton."""

OUTPUTS: Final = {
    field.name: field
    for field in (
        Field("text_output", "STRING", (1,), "Text of this response."),
        Field("output_ids", "INT32", (-1,), "Tokens of this response, without the end token."),
        Field("finish_reason", "STRING", (1,), "Empty until the last response: `stop` or `length`."),
        Field("num_input_tokens", "INT32", (1,), "Tokens of the prompt."),
        Field("num_output_tokens", "INT32", (1,), "Tokens of this response."),
        Field("seed", "UINT64", (1,), "The seed that was used."),
        Field(
            "cached_tokens",
            "INT32",
            (1,),
            "Prompt tokens that were not computed again; on the last response.",
        ),
        Field("cache_stats", "STRING", (1,), "What the prefix cache did, as JSON; on the last response."),
        Field("total_draft_tokens", "INT32", (1,), "Drafts that were verified; on the last response."),
        Field(
            "total_accepted_draft_tokens",
            "INT32",
            (1,),
            "Those of them that were right; on the last response.",
        ),
        Field("acceptance_rate", "FP32", (1,), "Their share, 0 without drafts; on the last response."),
        Field("status", "STRING", (1,), "State of the deployment as JSON, when asked for."),
    )
}
"""What a client gets."""

_PROMPTS: Final = ("text_input", "input_ids", "messages")
_GREEDY_BELOW: Final = 1e-5
_MAX_TEMPERATURE: Final = 100.0
_MAX_PLAN_BYTES: Final = 256
_MAX_INT32: Final = 2**31 - 1
_PASSED_PARAMETERS: Final = frozenset(
    {"priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"}
)
"""Request parameters of Triton's own clients and protocols, which mean nothing here."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation that may run: everything checked, defaults filled in."""

    prompt: tuple[int, ...]
    """At least one token, and at least one fewer than the context."""
    max_tokens: int
    """At least 1; prompt and max_tokens together fit the context."""
    sampling: SamplingParams
    stream: bool = False
    ignore_eos: bool = False
    stop_words: tuple[str, ...] = ()
    cache_key: str = ""
    """Who shares cached prefixes: requests with an equal key. Trimmed; empty is those without one."""
    chat_prefix: int = 0
    """Tokens of the prompt that a conversation's next turn will begin with too; 0 where that is not known."""
    speculation: SpeculationPlan = NO_SPECULATION
    """How tokens are guessed ahead; the text does not depend on it."""
    seeded: bool = True
    """Whether the client gave the seed; False when it was drawn here, and so will not come again."""


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Refuse request parameters that nothing here reads; HTTP turns unknown JSON keys into them."""
    for name, value in parameters.items():
        if name not in _PASSED_PARAMETERS and not name.startswith("triton_"):
            raise InvalidArgument(name, value, f"one of the inputs {', '.join(INPUTS)}")


def parse_request(
    inputs: Inputs,
    parameters: Mapping[str, object],
    text: TextModel,
    limits: LimitsSection,
    sampling: SamplingSection,
    context_tokens: int,
    draw_seed: Callable[[], int],
    speculation: SpeculationSection,
    drafters: Drafters = NO_DRAFTERS,
    *,
    finds_chat_prefix: bool = False,
) -> GenerationRequest:
    """Check a request.

    ``inputs`` are Triton's tensors by name, ``[1, n]`` or ``[n]``, strings as object arrays of bytes. Raises
    InvalidArgument with field, value and limit. ``draw_seed`` is called when the request has no seed.
    ``finds_chat_prefix``: conversations are tokenized a second time, to know what their next turn will share.
    """
    check_parameters(parameters)
    # The cheap checks come first: a prompt may take a second to tokenize.
    max_tokens = _integer(inputs, "max_tokens", limits.default_max_tokens, 1, _MAX_INT32)
    params = _sampling(inputs, text, sampling, draw_seed)
    stop_words = _stop_words(inputs, limits)
    cache_key = _cache_key(inputs, limits)
    plan = _plan(inputs, speculation, drafters)
    stream, ignore_eos = _flag(inputs, "stream"), _flag(inputs, "ignore_eos")
    field, prompt = _prompt(inputs, text, limits)
    room = context_tokens - len(prompt)
    if room < 1:
        raise InvalidArgument(
            field,
            f"{len(prompt)} tokens",
            f"at most {context_tokens - 1}: the context is {context_tokens} tokens, and one must be left to generate",
        )
    chat_prefix = 0
    if finds_chat_prefix and field == "messages":
        chat_prefix = text.chat_prefix(_text(field, _one(inputs, field), limits.max_text_bytes), prompt)
    return GenerationRequest(
        prompt=prompt,
        max_tokens=min(max_tokens, room),
        sampling=params,
        stream=stream,
        ignore_eos=ignore_eos,
        stop_words=stop_words,
        cache_key=cache_key,
        chat_prefix=chat_prefix,
        speculation=plan,
        seeded="seed" in inputs,
    )


def asks_status(inputs: Inputs, parameters: Mapping[str, object]) -> bool:
    """Whether this is a question for the status; raises InvalidArgument when it is that and something else."""
    if not _flag(inputs, "status"):
        return False
    check_parameters(parameters)
    others = [name for name in inputs if name != "status"]
    if others:
        raise InvalidArgument("status", True, f"no other input beside it, not {', '.join(others)}")
    return True


def _prompt(inputs: Inputs, text: TextModel, limits: LimitsSection) -> tuple[str, tuple[int, ...]]:
    """The field that holds the prompt, and its tokens."""
    given = [name for name in _PROMPTS if name in inputs]
    if len(given) != 1:
        raise InvalidArgument(
            " and ".join(given) or "text_input",
            "all of them" if given else None,
            f"exactly one of {', '.join(_PROMPTS)}",
        )
    (field,) = given
    if field == "input_ids":
        tokens = _values(inputs, field)
        for token in tokens:
            if type(token) is not int or not 0 <= token < text.vocab_size:
                raise InvalidArgument(field, token, f"token ids of 0 to {text.vocab_size - 1}")
    else:
        value = _text(field, _one(inputs, field), limits.max_text_bytes)
        tokens = text.encode(value) if field == "text_input" else text.encode_chat(value)
    if not tokens:
        raise InvalidArgument(field, "", "a prompt of at least one token")
    return field, tuple(tokens)


def _sampling(
    inputs: Inputs, text: TextModel, defaults: SamplingSection, draw_seed: Callable[[], int]
) -> SamplingParams:
    temperature = _real(inputs, "temperature", defaults.temperature, 0.0, _MAX_TEMPERATURE)
    top_p = _real(inputs, "top_p", defaults.top_p, 0.0, 1.0)
    if top_p == 0.0:
        raise InvalidArgument("top_p", 0.0, "more than 0, at most 1")
    return SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_k=min(_integer(inputs, "top_k", defaults.top_k, 0, _MAX_INT32), text.vocab_size),
        top_p=top_p,
        min_p=_real(inputs, "min_p", defaults.min_p, 0.0, 1.0),
        seed=_integer(inputs, "seed", 0, 0, 2**64 - 1) if "seed" in inputs else draw_seed(),
    )


def _stop_words(inputs: Inputs, limits: LimitsSection) -> tuple[str, ...]:
    if "stop_words" not in inputs:
        return ()
    values = _values(inputs, "stop_words")
    if len(values) > limits.max_stop_words:
        raise InvalidArgument("stop_words", f"{len(values)} strings", f"at most {limits.max_stop_words}")
    words = [_text("stop_words", value, limits.max_stop_bytes) for value in values]
    if "" in words:
        raise InvalidArgument("stop_words", "", "strings of at least one character")
    return tuple(dict.fromkeys(words))


def _cache_key(inputs: Inputs, limits: LimitsSection) -> str:
    if "prompt_cache_key" not in inputs:
        return ""
    value = _one(inputs, "prompt_cache_key")
    return _text("prompt_cache_key", value, limits.max_cache_key_bytes).strip()


def _plan(inputs: Inputs, section: SpeculationSection, drafters: Drafters) -> SpeculationPlan:
    if "speculation" not in inputs:
        return section.plan(section.default)
    return choose_plan(section, _text("speculation", _one(inputs, "speculation"), _MAX_PLAN_BYTES), drafters)


def _values(inputs: Inputs, name: str) -> list[Any]:
    array = inputs[name]
    if array.ndim > 2 or (array.ndim == 2 and array.shape[0] != 1):
        raise InvalidArgument(name, f"shape {list(array.shape)}", "shape [1, n]")
    values: list[Any] = array.reshape(-1).tolist()
    return values


def _one(inputs: Inputs, name: str) -> Any:
    values = _values(inputs, name)
    if len(values) != 1:
        raise InvalidArgument(name, f"{len(values)} values", "one value, shape [1, 1]")
    return values[0]


def _integer(inputs: Inputs, name: str, default: int, low: int, high: int) -> int:
    if name not in inputs:
        return default
    value = _one(inputs, name)
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(name, value, f"an integer of {low} to {high}")
    return value


def _real(inputs: Inputs, name: str, default: float, low: float, high: float) -> float:
    if name not in inputs:
        return default
    value = _one(inputs, name)
    # NaN fails both comparisons.
    if not isinstance(value, float) or not low <= value <= high:
        raise InvalidArgument(name, value, f"a finite number of {low:g} to {high:g}")
    # float32 can't hold 0.9: what was meant is the shortest decimal that gives the same float32.
    return float(str(np.float32(value)))


def _flag(inputs: Inputs, name: str) -> bool:
    value = _one(inputs, name) if name in inputs else False
    if not isinstance(value, bool):
        raise InvalidArgument(name, value, "true or false")
    return value


def _text(name: str, value: object, limit: int) -> str:
    """A string value: Triton hands over bytes."""
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes):
        raise InvalidArgument(name, value, "a string")
    if len(data) > limit:
        raise InvalidArgument(name, f"{len(data)} bytes", f"at most {limit}")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, data, "UTF-8") from None
