"""What travels: frames and questions to a stage, results and states from it; with their limits."""

from __future__ import annotations

from typing import Final, TypeAlias

from skippy_stage.errors import ErrorCode
from skippy_stage.protocol.steps import Message, Step

PROTOCOL_VERSION: Final = 3

TENSOR_HEADER: Final = "header"
TENSOR_TOKENS: Final = "tokens"
TENSOR_HIDDEN: Final = "hidden"
TENSOR_RESULT: Final = "result"

MAX_FRAME_ROWS: Final = 1 << 20
"""Rows in one frame (spec 2.2: sideband values)."""
MAX_STEPS: Final = 1 << 16
MAX_DRAFTS: Final = 64
"""Drafts of one proposal, of a draft model or a head."""
MAX_HIDDEN_BYTES: Final = 512 << 20
"""Bytes of one hidden tensor (spec 2.2: activation payload)."""
MAX_HEADER_BYTES: Final = 8 << 20

LINK_DTYPES: Final = {"f32": ("FP32", "float32"), "f16": ("FP16", "float16"), "bf16": ("UINT16", "uint16")}
"""Link dtype -> (Triton type, numpy type). bfloat16 travels as raw words."""


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


class Restorable(Message, frozen=True):
    """What a stage could restore of the tokens of a probe.

    ``lengths`` None: any length up to ``longest``. Otherwise exactly these, ascending, for state that
    cannot be cut; ``longest`` is the last of them, or 0.
    """

    longest: int = 0
    lengths: tuple[int, ...] | None = None

    def best(self, most: int) -> int:
        """The longest restorable length that is not above ``most``; 0 when there is none."""
        if self.lengths is None:
            return max(0, min(self.longest, most))
        return max((length for length in self.lengths if length <= most), default=0)

    def common(self, other: Restorable) -> Restorable:
        """What both could restore."""
        if self.lengths is None and other.lengths is None:
            return Restorable(min(self.longest, other.longest))
        exact = self.lengths if self.lengths is not None else other.lengths or ()
        lengths = tuple(length for length in exact if self._has(length) and other._has(length))
        return Restorable(lengths[-1] if lengths else 0, lengths)

    def _has(self, length: int) -> bool:
        return length <= self.longest if self.lengths is None else length in self.lengths


class StepOk(Message, tag="ok", frozen=True, kw_only=True):
    """The step ran. ``tokens`` are the last stage's predictions, empty on the others."""

    tokens: tuple[int, ...] = ()
    restorable: Restorable | None = None
    """The answer to a probe."""


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
    drafts_follow: bool = False
    """A ``DraftResult`` comes as a second response, so that predictions need not wait for it."""


class Draft(Message, frozen=True, kw_only=True):
    """What the MTP head expects of a session: ``tokens`` from ``position`` on, empty for nothing."""

    session: int
    epoch: int
    pos_start: int
    """That of the step whose predictions the draft continues; with the epoch it names the step."""
    position: int
    tokens: tuple[int, ...] = ()


class DraftResult(Message, tag="drafts", frozen=True, kw_only=True):
    """The drafts behind a frame's predictions: one for each session that wants them and had a step that is ok."""

    incarnation: int
    frame: int
    drafts: tuple[Draft, ...] = ()


class HeadStatus(Message, frozen=True, kw_only=True):
    """A stage's MTP head: what it has, and totals since the stage started."""

    layers: int = 0
    """0 without one."""
    drafts: int = 0
    failures: int = 0
    """Frames whose drafts failed; their predictions stand."""
    busy_us: int = 0


class PrefixStatus(Message, frozen=True, kw_only=True):
    """A stage's prefix store: what it holds, and totals since the stage started."""

    payload: str = "off"
    """``resident-kv``, ``kv-recurrent``, ``full-state`` or ``off`` (spec 4.1)."""
    entries: int = 0
    """Nodes of the radix tree, or exact states."""
    blocks: int = 0
    """KV blocks that the store alone holds: free for whoever needs them."""
    tokens: int = 0
    bytes: int = 0
    """Host memory of exact states."""
    leases: int = 0
    lookups: int = 0
    hits: int = 0
    restored_tokens: int = 0
    recorded_tokens: int = 0
    evicted: int = 0
    dropped: int = 0
    """Records that there was no room for."""
    activation_bytes: int = 0
    activation_hits: int = 0
    activation_misses: int = 0


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
    """Blocks that sessions hold; those of the prefix store alone are not in it."""
    prefix: PrefixStatus = PrefixStatus()
    head: HeadStatus = HeadStatus()
    identity: str = ""
    """Names what the stage computes: equal identities give equal KV (spec 4.2)."""
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


Reply: TypeAlias = FrameResult | DraftResult | StageStatus | Refusal
