"""Environment variables that only count when they are set before torch and numba load."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def prepare_environment() -> None:
    """Set defaults for OpenMP and numba; whatever the user has set stays.

    Call it before anything imports torch. Idle OpenMP threads must sleep soon: the threads of two stages
    on the same cores would otherwise spin against each other between their frames.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Some microseconds of waiting bridge the small operations between two products. One row of the 135M model
    # through two stages on two cores: 14 ms with 0, 11 with 1000, 9 with 10000. But when two stages compute at
    # once with two threads each, waiting starves the other: 10 ms with 1000, 35 with 10000.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    if "NUMBA_CACHE_DIR" not in os.environ:
        os.environ["NUMBA_CACHE_DIR"] = str(_kernel_folder())


def _kernel_folder() -> Path:
    """Where compiled kernels are kept: the user's cache, or the temporary folder where there is none.

    numba's own default is beside the source, which may be a read-only install.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path("~/.cache").expanduser()) / "skippy" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except (OSError, RuntimeError):
        writable = False
    if not writable:
        folder = Path(tempfile.gettempdir()) / f"skippy-kernels-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder
