"""The frame protocol between the orchestrator and a stage: messages, limits and tensor names.

A frame is an ordered list of steps of many sessions that a stage executes as one batch. It crosses as a
msgpack header plus plain tensors:

========= ======== ====================== =====================================================
direction tensor   dtype, shape           content
========= ======== ====================== =====================================================
to stage  header   UINT8 ``[bytes]``      msgpack ``FrameHeader`` or ``StatusRequest``
to stage  tokens   INT32 ``[tokens]``     token ids of rows and probes, in step order
to stage  hidden   link dtype ``[rows, hidden_size]``, on every link but the first
from      result   UINT8 ``[bytes]``      msgpack ``FrameResult``, ``DraftResult`` or ``StageStatus``
from      hidden   link dtype ``[rows, hidden_size]``: rows of the steps that are ok, from every stage
                                          but the last
========= ======== ====================== =====================================================

A stage answers a frame with an empty response at once (the acknowledgement) and with one result when the
frame was executed. Where the last stage's MTP head drafts, its drafts follow in a response of their own, so
that predictions need not wait for them. Frames of one incarnation carry the numbers 1, 2, 3, ... on every
link: a gap is an error, never a wait. ``pos_start`` of a step is authoritative: a stage that is ahead cuts
back, a stage that is behind fails the step (spec 2.5, 8.3).

Ended sessions and lowest live epochs of a header apply the moment it is received, before queued older
frames run; steps they make stale answer ``skipped`` and give no rows.
"""

from skippy_stage.protocol.codec import decode_reply, decode_request, encode
from skippy_stage.protocol.messages import (
    LINK_DTYPES,
    MAX_DRAFTS,
    MAX_FRAME_ROWS,
    MAX_HEADER_BYTES,
    MAX_HIDDEN_BYTES,
    MAX_STEPS,
    PROTOCOL_VERSION,
    TENSOR_HEADER,
    TENSOR_HIDDEN,
    TENSOR_RESULT,
    TENSOR_TOKENS,
    Draft,
    DraftResult,
    FrameHeader,
    FrameResult,
    HeadStatus,
    PrefixStatus,
    Refusal,
    Reply,
    Request,
    Restorable,
    StageStatus,
    StatusRequest,
    StepFailed,
    StepOk,
    StepSkipped,
    StepStatus,
)
from skippy_stage.protocol.steps import (
    Control,
    DecodeStep,
    Message,
    OpenStep,
    PrefillStep,
    ProbeStep,
    ProposeStep,
    RecordStep,
    RestoreStep,
    RowStep,
    SamplingParams,
    Step,
    StopStep,
    TrimStep,
    VerifyStep,
    positions_of,
    predictions_of,
    rows_of,
    tokens_of,
)

__all__ = [
    "LINK_DTYPES",
    "MAX_DRAFTS",
    "MAX_FRAME_ROWS",
    "MAX_HEADER_BYTES",
    "MAX_HIDDEN_BYTES",
    "MAX_STEPS",
    "PROTOCOL_VERSION",
    "TENSOR_HEADER",
    "TENSOR_HIDDEN",
    "TENSOR_RESULT",
    "TENSOR_TOKENS",
    "Control",
    "DecodeStep",
    "Draft",
    "DraftResult",
    "FrameHeader",
    "FrameResult",
    "HeadStatus",
    "Message",
    "OpenStep",
    "PrefillStep",
    "PrefixStatus",
    "ProbeStep",
    "ProposeStep",
    "RecordStep",
    "Refusal",
    "Reply",
    "Request",
    "Restorable",
    "RestoreStep",
    "RowStep",
    "SamplingParams",
    "StageStatus",
    "StatusRequest",
    "Step",
    "StepFailed",
    "StepOk",
    "StepSkipped",
    "StepStatus",
    "StopStep",
    "TrimStep",
    "VerifyStep",
    "decode_reply",
    "decode_request",
    "encode",
    "positions_of",
    "predictions_of",
    "rows_of",
    "tokens_of",
]
