"""Which prefix store a stage gets."""

from __future__ import annotations

import logging
from typing import Final

from skippy_stage.engines.base import StageEngine
from skippy_stage.prefix.exact import ExactPrefixes
from skippy_stage.prefix.resident import ResidentPrefixes
from skippy_stage.prefix.states import StateShelf
from skippy_stage.prefix.store import NoPrefixes, PrefixStore
from skippy_stage.settings import StagePrefixPayload

log = logging.getLogger(__name__)

MAX_RECURRENT_ENTRIES: Final = 16
"""Most exact states of an engine that has no KV blocks to share (spec 4.8)."""


def make_prefix_store(
    engine: StageEngine,
    payload: StagePrefixPayload,
    *,
    max_tokens: int = 0,
    max_entries: int = 64,
    max_bytes: int = 0,
) -> PrefixStore:
    """Make the store of the payload that is asked for, or none, with a warning, where the engine can't do it.

    ``auto`` is ``resident-kv`` for an engine with blocks to share and ``kv-recurrent`` for one that only
    exports exact states (spec 4.1). ``max_tokens`` bounds the tokens of resident prefixes, ``max_entries`` and
    ``max_bytes`` exact states and their bytes; 0 is no limit.
    """
    blocks, state = engine.prefix_blocks, engine.exact_state
    if payload == "off":
        return NoPrefixes()
    if blocks is not None and payload in ("auto", "resident-kv"):
        return ResidentPrefixes(blocks, max_tokens=max_tokens)
    if state is not None and payload != "resident-kv":
        entries = max_entries if blocks is not None else min(max_entries, MAX_RECURRENT_ENTRIES)
        name = "kv-recurrent" if payload == "auto" else payload
        return ExactPrefixes(state, StateShelf(max_entries=entries, max_bytes=max_bytes), payload=name)
    log.warning("no prefix cache: engine %s cannot keep prefixes as %r", engine.info.engine, payload)
    return NoPrefixes()
