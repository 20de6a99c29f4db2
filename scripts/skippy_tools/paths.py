"""Where things lie in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
"""The checkout."""

DEFAULT_DEPLOYMENT: Final = ROOT / "deployments" / "smollm2-two-stages.toml"
MODEL_REPOSITORY: Final = ROOT / "model_repository"
HEAD_FILE: Final = ROOT / "heads" / "smollm2-135m-instruct.safetensors"
"""The trained MTP head of the default model."""
BACKENDS: Final = ("skippy_stage", "skippy_orchestrator")
"""Packages whose ``model.py`` is a Triton backend."""


def display(path: Path) -> str:
    """The path as a person in the checkout would type it; elsewhere only the file's name.

    Goes into generated files, which must not tell one machine from another.
    """
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else path.name
