"""Between Python values and Triton's protobuf messages: pure functions, shared by both clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from skippy_client import checks
from skippy_client.error_mapping import error_of_message
from skippy_client.errors import InvalidRequest, ServerFault
from skippy_client.types import (
    Chunk,
    GenerateOptions,
    HeadStatus,
    PrefixStatus,
    ServerStatus,
    SpeculationStatus,
    StageStatus,
)

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC waits up to two minutes between attempts by default; a server that restarts is back sooner.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Each client has its connection: channels with equal options would share one, and its fate.
    ("grpc.use_local_subchannel_pool", 1),
)


def build_request(model: str, prompt: str | None, **options: Unpack[GenerateOptions]) -> Any:
    """The ModelInferRequest of one streamed generation.

    Raises InvalidRequest for what can't be put on the wire: not exactly one prompt, a wrong type, a
    number outside its tensor's type. Ranges with a meaning are the server's to judge.
    """
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise InvalidRequest(f"{', '.join(sorted(unknown))}: no such option")
    given = {
        "prompt": prompt,
        "input_ids": options.get("input_ids"),
        "messages": options.get("messages"),
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequest(
            f"exactly one of prompt, input_ids and messages is needed, got {' and '.join(names) or 'none'}"
        )
    request_id = options.get("request_id")
    request = service_pb2.ModelInferRequest(
        model_name=model, id="" if request_id is None else checks.text_of("request_id", request_id)
    )
    if prompt is not None:
        _add_texts(request, "text_input", "prompt", [prompt])
    elif (ids := options.get("input_ids")) is not None:
        tokens = [checks.integer("input_ids", item, checks.INT32) for item in checks.items("input_ids", ids)]
        _add(request, "input_ids", np.array([tokens], dtype=np.int32))
    else:
        _add_texts(request, "messages", "messages", [_chat(options.get("messages"))])
    for name in ("max_tokens", "top_k"):
        if (value := options.get(name)) is not None:
            _add(request, name, np.array([[checks.integer(name, value, checks.INT32)]], dtype=np.int32))
    for name in ("temperature", "top_p", "min_p"):
        if (value := options.get(name)) is not None:
            _add(request, name, np.array([[checks.float32(name, value)]], dtype=np.float32))
    if (seed := options.get("seed")) is not None:
        _add(request, "seed", np.array([[checks.integer("seed", seed, checks.UINT64)]], dtype=np.uint64))
    if (ignore_eos := options.get("ignore_eos")) is not None:
        _add(request, "ignore_eos", np.array([[checks.boolean("ignore_eos", ignore_eos)]]))
    # One text is taken as a list of one: it would pass for a list of its characters otherwise.
    if (stop_words := options.get("stop_words")) is not None:
        words = [stop_words] if isinstance(stop_words, str) else checks.items("stop_words", stop_words)
        if words:
            _add_texts(request, "stop_words", "stop_words", words)
    if (key := options.get("prompt_cache_key")) is not None:
        _add_texts(request, "prompt_cache_key", "prompt_cache_key", [key])
    if (plan := options.get("speculation")) is not None:
        _add_texts(request, "speculation", "speculation", [plan])
    _add(request, "stream", np.array([[True]]))
    return request


def build_status_request(model: str) -> Any:
    """The ModelInferRequest that asks for the server's status."""
    request = service_pb2.ModelInferRequest(model_name=model)
    _add(request, "status", np.array([[True]]))
    return request


def _add(request: Any, name: str, value: npt.NDArray[Any]) -> None:
    request.inputs.add(name=name, datatype=np_to_triton_dtype(value.dtype), shape=value.shape)
    content = serialize_byte_tensor(value).item() if value.dtype == np.object_ else value.tobytes()
    request.raw_input_contents.append(content)


def _add_texts(request: Any, tensor: str, field: str, texts: Sequence[Any]) -> None:
    encoded = [checks.text_of(field, text).encode() for text in texts]
    _add(request, tensor, np.array([encoded], dtype=np.object_))


def _chat(messages: object) -> str:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages: got {checks.shown(messages)}, expected a list of role and content")
    try:
        return json.dumps(list(messages), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"messages: {error}") from error


def read_response(response: Any) -> InferResult:
    """The tensors of one ModelStreamInferResponse; raises the error it carries instead."""
    if response.error_message:
        raise error_of_message(response.error_message)
    return InferResult(response.infer_response)


def parse_chunk(response: Any) -> Chunk:
    """The chunk in one ModelStreamInferResponse."""
    result = read_response(response)
    text = _scalar(result, "text_output")
    reason = _scalar(result, "finish_reason")
    if text is None or reason is None:
        missing = "text_output" if text is None else "finish_reason"
        raise ServerFault(f"a response came without {missing}; is this model a Skippy orchestrator?")
    ids = result.as_numpy("output_ids")
    seed = _scalar(result, "seed")
    cache_stats = _scalar(result, "cache_stats")
    return Chunk(
        text=_decoded("text_output", text),
        token_ids=() if ids is None else tuple(ids.ravel().tolist()),
        finish_reason=_decoded("finish_reason", reason),
        num_input_tokens=int(_scalar(result, "num_input_tokens") or 0),
        num_output_tokens=int(_scalar(result, "num_output_tokens") or 0),
        seed=None if seed is None else int(seed),
        cached_tokens=int(_scalar(result, "cached_tokens") or 0),
        cache_stats=None if cache_stats is None else _object("cache_stats", cache_stats),
        total_draft_tokens=int(_scalar(result, "total_draft_tokens") or 0),
        total_accepted_draft_tokens=int(_scalar(result, "total_accepted_draft_tokens") or 0),
    )


def _decoded(name: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ServerFault(f"{name} isn't UTF-8 at byte {error.start}") from error


def _object(name: str, text: str | bytes) -> dict[str, Any]:
    """The JSON object that an output is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServerFault(f"{name} isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise ServerFault(f"{name} isn't an object: {checks.shown(value)}")
    return value


def _scalar(result: InferResult, name: str) -> Any:
    """The one element of an output, or None where it is missing."""
    value = result.as_numpy(name)
    return None if value is None or value.size == 0 else value.reshape(-1)[0]


def parse_status_response(response: Any) -> ServerStatus:
    """The status in one ModelStreamInferResponse."""
    text = _scalar(read_response(response), "status")
    if text is None:
        raise ServerFault("a response came without status; is this model a Skippy orchestrator?")
    return parse_status(text)


def parse_status(text: str | bytes) -> ServerStatus:
    """The status in the server's JSON; what is missing or of another type is None."""
    report = _object("status", text)
    stages, counters = report.get("stages"), report.get("counters")
    speculation, draft = report.get("speculation"), report.get("draft")
    return ServerStatus(
        ready=report.get("ready") is True,
        reason=_text(report, "reason") or "",
        model=_text(report, "model"),
        active=_count(report, "active"),
        waiting=_count(report, "waiting"),
        stages=tuple(_stage(stage) for stage in stages if isinstance(stage, dict))
        if isinstance(stages, list)
        else (),
        counters={name: value for name, value in counters.items() if _is_number(value)}
        if isinstance(counters, dict)
        else {},
        speculation=_speculation(speculation) if isinstance(speculation, dict) else None,
        draft=_stage(draft) if isinstance(draft, dict) else None,
        raw=report,
    )


_STAGE_COUNTS: Final = (
    *("first_layer", "last_layer", "sessions", "frames", "rows", "busy_us", "rss_bytes"),
    *("kv_blocks", "kv_blocks_used", "kv_block_tokens"),
)
_PREFIX_COUNTS: Final = (
    *("entries", "blocks", "tokens", "bytes", "leases", "lookups", "hits", "restored_tokens"),
    *("recorded_tokens", "evicted", "dropped"),
    *("activation_bytes", "activation_hits", "activation_misses"),
)


def _stage(report: dict[str, Any]) -> StageStatus:
    prefix, head = report.get("prefix"), report.get("head")
    return StageStatus(
        name=_text(report, "name") or "?",
        ready=report.get("ready") is True,
        reason=_text(report, "reason") or "",
        engine=_text(report, "engine"),
        last_error=_text(report, "last_error"),
        prefix=_prefix(prefix) if isinstance(prefix, dict) else None,
        head=HeadStatus(**{name: _count(head, name) for name in ("layers", "drafts", "failures", "busy_us")})
        if isinstance(head, dict)
        else None,
        raw=report,
        **{name: _count(report, name) for name in _STAGE_COUNTS},
    )


def _prefix(report: dict[str, Any]) -> PrefixStatus:
    return PrefixStatus(
        payload=_text(report, "payload"), **{name: _count(report, name) for name in _PREFIX_COUNTS}
    )


def _speculation(report: dict[str, Any]) -> SpeculationStatus:
    length, sources = report.get("mean_acceptance_length"), report.get("by_source")
    return SpeculationStatus(
        draft_tokens=_count(report, "draft_tokens"),
        accepted_draft_tokens=_count(report, "accepted_draft_tokens"),
        mean_acceptance_length=float(length) if isinstance(length, int | float) else None,
        by_source={
            source: (_count(of, "tokens") or 0, _count(of, "accepted") or 0)
            for source, of in (sources.items() if isinstance(sources, dict) else ())
            if isinstance(of, dict)
        },
    )


def _text(report: dict[str, Any], name: str) -> str | None:
    value = report.get(name)
    return value if isinstance(value, str) else None


def _count(report: dict[str, Any], name: str) -> int | None:
    value = report.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
