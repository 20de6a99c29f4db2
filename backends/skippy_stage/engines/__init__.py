"""Engines: what computes a stage's layer range."""

from __future__ import annotations

import importlib

from skippy_stage.engines.base import StageEngine
from skippy_stage.engines.environment import prepare_environment
from skippy_stage.errors import SkippyError
from skippy_stage.settings import StageSettings

__all__ = ["create_engine", "prepare_environment"]


def create_engine(settings: StageSettings) -> StageEngine:
    """Load the engine that ``settings.engine`` names: ``torch``, or ``package.module:factory``.

    Takes as long as reading the stage's weights. Raises SkippyError for an engine that is not there,
    and what the factory raises.
    """
    name = "skippy_stage.engines.torch_engine:TorchEngine" if settings.engine == "torch" else settings.engine
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise SkippyError(f"engine {settings.engine!r}: expected 'torch' or 'package.module:factory'")
    prepare_environment()
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise SkippyError(f"engine {settings.engine!r}: {error}") from None
    engine: StageEngine = factory(settings)
    return engine
