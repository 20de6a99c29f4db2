"""Messages to bytes and back, checked: what does not fit is refused by name and limit."""

from __future__ import annotations

import msgspec

from skippy_stage.errors import ProtocolError
from skippy_stage.protocol.messages import (
    MAX_DRAFTS,
    MAX_FRAME_ROWS,
    MAX_HEADER_BYTES,
    MAX_STEPS,
    PROTOCOL_VERSION,
    FrameHeader,
    Reply,
    Request,
    StageStatus,
)
from skippy_stage.protocol.steps import (
    OpenStep,
    PrefillStep,
    ProbeStep,
    ProposeStep,
    RecordStep,
    RestoreStep,
    RowStep,
    Step,
    TrimStep,
    VerifyStep,
    rows_of,
)

_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Reply) -> bytes:
    """Encode a message for a ``header`` or ``result`` tensor."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """Decode and check what a stage was sent.

    Raises ProtocolError for another version (by name and number), for malformed content and for
    limits exceeded (spec 2.2: negative counts are always refused).
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"frame header of {len(data)} bytes, limit {MAX_HEADER_BYTES}")
    try:
        request: Request = _request_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed frame header: {error}") from None
    if request.version != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {request.version}, this stage speaks {PROTOCOL_VERSION}")
    if isinstance(request, FrameHeader):
        _check_frame(request)
    return request


def decode_reply(data: bytes) -> Reply:
    """Decode what a stage answered; raises ProtocolError when it is malformed or of another version."""
    try:
        reply: Reply = _reply_decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"malformed stage reply: {error}") from None
    if isinstance(reply, StageStatus) and reply.version != PROTOCOL_VERSION:
        raise ProtocolError(f"stage speaks protocol {reply.version}, expected {PROTOCOL_VERSION}")
    return reply


def _check_frame(header: FrameHeader) -> None:
    if header.frame < 1:
        raise ProtocolError(f"frame number {header.frame}, the first is 1")
    if len(header.steps) > MAX_STEPS:
        raise ProtocolError(f"{len(header.steps)} steps in a frame, limit {MAX_STEPS}")
    total = 0
    seen: set[int] = set()
    for step in header.steps:
        _check_step(step)
        total += rows_of(step)
        if isinstance(step, RowStep):
            if step.session in seen:
                raise ProtocolError(f"session {step.session} has two row steps in one frame")
            seen.add(step.session)
    if total > MAX_FRAME_ROWS:
        raise ProtocolError(f"{total} rows in a frame, limit {MAX_FRAME_ROWS}")


def _check_step(step: Step) -> None:
    if isinstance(step, RowStep) and (step.pos_start < 0 or step.epoch < 0):
        raise ProtocolError(f"step with position {step.pos_start} and epoch {step.epoch}")
    match step:
        case PrefillStep() | VerifyStep() | ProposeStep() if step.rows < 1:
            raise ProtocolError(f"step with {step.rows} rows, at least 1")
        case ProposeStep() if not 1 <= step.drafts <= MAX_DRAFTS:
            raise ProtocolError(f"propose of {step.drafts} drafts, 1 to {MAX_DRAFTS}")
        case PrefillStep() if step.lookahead < 0:
            raise ProtocolError(f"step with {step.lookahead} look-ahead tokens")
        case OpenStep() if not 0 <= step.drafts <= MAX_DRAFTS:
            raise ProtocolError(f"open with {step.drafts} drafts, 0 to {MAX_DRAFTS}")
        case OpenStep() if step.max_tokens < 1:
            raise ProtocolError(f"open with room for {step.max_tokens} tokens")
        case TrimStep() if step.length < 0:
            raise ProtocolError(f"trim to {step.length} tokens")
        case ProbeStep() | RestoreStep() | RecordStep() if not 1 <= step.length <= MAX_FRAME_ROWS:
            raise ProtocolError(f"{step.__struct_config__.tag} of {step.length} tokens")
