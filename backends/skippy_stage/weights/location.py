"""From the ``model`` setting to a path on this machine."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from typing import Final

from skippy_stage.errors import SkippyError

PACKAGE_PREFIX: Final = "package:"


def locate(model: str) -> Path:
    """Find a safetensors folder, a ``.gguf`` file, or ``package:NAME/FILE`` inside an installed package.

    Relative paths start at ``$SKIPPY_MODELS``, or ``~/.cache/skippy/models`` when it is unset. Packages
    are found without running any of their code. Raises SkippyError saying where it looked.
    """
    if model.startswith(PACKAGE_PREFIX):
        return _in_package(model)
    path = Path(model).expanduser()
    if not path.is_absolute():
        path = models_folder() / path
    if not path.exists():
        raise SkippyError(f"model {model!r}: {path} does not exist")
    return path


def models_folder() -> Path:
    """The folder where relative model paths start."""
    given = os.environ.get("SKIPPY_MODELS")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "skippy" / "models"


def _in_package(model: str) -> Path:
    name, slash, file = model.removeprefix(PACKAGE_PREFIX).partition("/")
    if not (name.isidentifier() and slash and file) or ".." in Path(file).parts or Path(file).is_absolute():
        raise SkippyError(f"model {model!r}: expected package:NAME/FILE")
    # find_spec of importlib.util would import parent packages of a dotted name; a plain name has none.
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if spec and spec.origin and not folders:
        folders = [str(Path(spec.origin).parent)]
    if not folders:
        raise SkippyError(f"model {model!r}: Python package {name!r} is not installed")
    for folder in folders:
        path = Path(folder) / file
        if path.exists():
            return path
    raise SkippyError(f"model {model!r}: no {file!r} in the installed package {name!r} ({folders[0]})")
