"""What makes two stages compute the same: the identity of their KV (spec 4.2)."""

from __future__ import annotations

import hashlib

from skippy_stage.engines.base import EngineInfo
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate


def stage_identity(settings: StageSettings, info: EngineInfo) -> str:
    """A short name for model file, layer range, engine and number formats; another file has another name.

    The file counts by path, size and time of change: reading all of it would take as long as loading it.
    """
    path = locate(settings.model)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files += [locate(settings.mtp_head)] if settings.mtp_head and info.is_last else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    parts = (
        *(str(path), stats, info.architecture, info.first_layer, info.last_layer, info.n_layers),
        *(info.engine, settings.weights, info.link_dtype, info.context_length, info.kv_block_tokens),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
