"""The frame protocol between the orchestrator and a stage: messages, limits and tensor names.

A frame is an ordered list of steps of many sessions that a stage executes as one batch. It crosses as a
msgpack header plus plain tensors:

========= ======== ====================== =====================================================
direction tensor   dtype, shape           content
========= ======== ====================== =====================================================
to stage  header   UINT8 ``[bytes]``      msgpack ``FrameHeader`` or ``StatusRequest``
to stage  tokens   INT32 ``[rows]``       token ids of the steps that have rows, in step order
to stage  hidden   link dtype ``[rows, hidden_size]``, on every link but the first
from      result   UINT8 ``[bytes]``      msgpack ``FrameResult`` or ``StageStatus``
from      hidden   link dtype ``[rows, hidden_size]``: rows of the steps that are ok, from every stage
                                          but the last
========= ======== ====================== =====================================================

A stage answers a frame with an empty response at once (the acknowledgement) and with one result when the
frame was executed. Frames of one incarnation carry the numbers 1, 2, 3, ... on every link: a gap is an
error, never a wait. ``pos_start`` of a step is authoritative: a stage that is ahead cuts back, a stage
that is behind fails the step (spec 2.5, 8.3).

Ended sessions and lowest live epochs of a header apply the moment it is received, before queued older
frames run; steps they make stale answer ``skipped`` and give no rows.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from skippy_stage.errors import ErrorCode, ProtocolError

PROTOCOL_VERSION: Final = 1

TENSOR_HEADER: Final = "header"
TENSOR_TOKENS: Final = "tokens"
TENSOR_HIDDEN: Final = "hidden"
TENSOR_RESULT: Final = "result"

MAX_FRAME_ROWS: Final = 1 << 20
"""Rows in one frame (spec 2.2: sideband values)."""
MAX_STEPS: Final = 1 << 16
MAX_HIDDEN_BYTES: Final = 512 << 20
"""Bytes of one hidden tensor (spec 2.2: activation payload)."""
MAX_HEADER_BYTES: Final = 8 << 20

LINK_DTYPES: Final = {"f32": ("FP32", "float32"), "f16": ("FP16", "float16"), "bf16": ("UINT16", "uint16")}
"""Link dtype -> (Triton type, numpy type). bfloat16 travels as raw words."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Base of all messages: immutable, encoded as arrays, unknown content refused."""


class SamplingParams(Message, frozen=True, kw_only=True):
    """How tokens are drawn (spec 5.2; defaults are greedy).

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` is always set:
    the orchestrator draws one when the request has none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0

    @property
    def greedy(self) -> bool:
        """True when the highest logit is the token."""
        return self.temperature == 0.0


class OpenStep(Message, tag="open", frozen=True, kw_only=True):
    """Make a session. Comes before its first row on every stage; no rows of its own.

    ``max_tokens`` is the most positions the session will ever hold, uncommitted ones included.
    """

    session: int
    max_tokens: int
    sampling: SamplingParams = SamplingParams()


class PrefillStep(Message, tag="prefill", frozen=True, kw_only=True):
    """``rows`` prompt tokens from position ``pos_start``; with ``sample`` the last row predicts.

    ``lookahead`` further tokens follow in the token tensor without being executed, for a last stage
    that drafts (its head needs token i + 1 at row i).
    """

    session: int
    epoch: int
    pos_start: int
    rows: int
    sample: bool = False
    lookahead: int = 0


class DecodeStep(Message, tag="decode", frozen=True, kw_only=True):
    """One committed token at ``pos_start``; predicts the next."""

    session: int
    epoch: int
    pos_start: int


class VerifyStep(Message, tag="verify", frozen=True, kw_only=True):
    """A verify window: ``rows`` inputs from ``pos_start``, each row predicts (spec 7.5)."""

    session: int
    epoch: int
    pos_start: int
    rows: int
    window: int


class TrimStep(Message, tag="trim", frozen=True, kw_only=True):
    """Cut the session back to ``length`` positions without running a row."""

    session: int
    epoch: int
    length: int


Step: TypeAlias = OpenStep | PrefillStep | DecodeStep | VerifyStep | TrimStep
RowStep: TypeAlias = PrefillStep | DecodeStep | VerifyStep


def rows_of(step: Step) -> int:
    """Rows that a step executes; 0 for controls."""
    match step:
        case PrefillStep() | VerifyStep():
            return step.rows
        case DecodeStep():
            return 1
        case _:
            return 0


def predictions_of(step: Step) -> int:
    """How many of the step's last rows predict a token on the last stage."""
    match step:
        case PrefillStep():
            return int(step.sample)
        case DecodeStep():
            return 1
        case VerifyStep():
            return step.rows
        case _:
            return 0


def tokens_of(step: Step) -> int:
    """Token ids that a step has in the token tensor."""
    return rows_of(step) + (step.lookahead if isinstance(step, PrefillStep) else 0)


class FrameHeader(Message, tag="frame", frozen=True, kw_only=True):
    """One frame for one stage."""

    version: int = PROTOCOL_VERSION
    incarnation: int
    """Random 63-bit name of the pipeline's life; a new one drops all sessions of a stage."""
    frame: int
    """1, 2, 3, ... within an incarnation."""
    steps: tuple[Step, ...] = ()
    ended: tuple[int, ...] = ()
    """Sessions that are over: their state is freed and their queued steps are skipped."""
    live_epochs: tuple[tuple[int, int], ...] = ()
    """(session, lowest epoch whose work still counts), for sessions that have stale work."""
    busy_stages: int = 1
    """Stages expected to compute while this frame does: stages that share cores divide them by it."""


class StatusRequest(Message, tag="status", frozen=True, kw_only=True):
    """Ask a stage who it is and how it is; answered at once, outside the order of frames."""

    version: int = PROTOCOL_VERSION
    check_integrity: bool = False


Request: TypeAlias = FrameHeader | StatusRequest


class StepOk(Message, tag="ok", frozen=True, kw_only=True):
    """The step ran. ``tokens`` are the last stage's predictions, empty on the others."""

    tokens: tuple[int, ...] = ()


class StepSkipped(Message, tag="skipped", frozen=True, kw_only=True):
    """The step was stale (ended session, dead epoch, or after a failure of the same epoch)."""


class StepFailed(Message, tag="failed", frozen=True, kw_only=True):
    """The step failed alone; the rest of the frame went on."""

    code: ErrorCode
    message: str


StepStatus: TypeAlias = StepOk | StepSkipped | StepFailed


class FrameResult(Message, tag="result", frozen=True, kw_only=True):
    """What became of a frame: one status per step of its header, in order, and what it cost."""

    incarnation: int
    frame: int
    statuses: tuple[StepStatus, ...]
    queue_us: int = 0
    compute_us: int = 0
    rows: int = 0
    """Rows that were executed."""


class StageStatus(Message, tag="stage", frozen=True, kw_only=True):
    """Who a stage is (handshake) and how it is (heartbeat)."""

    version: int = PROTOCOL_VERSION
    name: str
    index: int
    engine: str
    architecture: str
    first_layer: int
    last_layer: int
    n_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    link_dtype: str
    kv_block_tokens: int
    kv_blocks: int
    kv_blocks_used: int = 0
    sessions: int = 0
    pending: int = 0
    """Frames accepted and not answered yet."""
    incarnation: int = 0
    last_frame: int = 0
    frames: int = 0
    """Frames executed since the stage started."""
    rows: int = 0
    busy_us: int = 0
    weight_bytes: int = 0
    rss_bytes: int = 0
    pid: int = 0
    last_error: str = ""
    integrity: str = ""
    """Empty when no check was asked for or all is well, otherwise what is wrong."""


class Refusal(Message, tag="refusal", frozen=True, kw_only=True):
    """A request that was not carried out at all.

    It travels as data. Triton's own error responses must not be used between models: those of release 24.10
    carry the id of an arbitrary call, which then ends in its place, and the server crashes.
    """

    message: str


Reply: TypeAlias = FrameResult | StageStatus | Refusal

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
        rows = rows_of(step)
        if isinstance(step, PrefillStep | VerifyStep) and rows < 1:
            raise ProtocolError(f"step with {rows} rows, at least 1")
        if isinstance(step, PrefillStep | DecodeStep | VerifyStep):
            if step.pos_start < 0 or step.epoch < 0:
                raise ProtocolError(f"step with position {step.pos_start} and epoch {step.epoch}")
            if step.session in seen:
                raise ProtocolError(f"session {step.session} has two row steps in one frame")
            seen.add(step.session)
        if isinstance(step, PrefillStep) and step.lookahead < 0:
            raise ProtocolError(f"step with {step.lookahead} look-ahead tokens")
        if isinstance(step, OpenStep) and step.max_tokens < 1:
            raise ProtocolError(f"open with room for {step.max_tokens} tokens")
        if isinstance(step, TrimStep) and step.length < 0:
            raise ProtocolError(f"trim to {step.length} tokens")
        total += rows
    if total > MAX_FRAME_ROWS:
        raise ProtocolError(f"{total} rows in a frame, limit {MAX_FRAME_ROWS}")
