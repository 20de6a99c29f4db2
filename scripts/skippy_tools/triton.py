"""Finding a tritonserver, and what it needs to run our backends.

Two kinds are known: the one of an NGC image (or any on PATH), and the one inside the nvidia-pytriton
wheel. Both get a backend directory of our own making: Triton's Python backend with the stub of the
running Python, and the ``model.py`` of our packages. Only ``model.py`` is put there, so the other
modules of a package never land at the top of a stub's ``sys.path``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skippy_orchestrator.deployment import ServerSection
from skippy_orchestrator.pipeline.repository import KEY_HEADER
from skippy_stage.errors import SkippyError

from skippy_tools.endpoints import Endpoints
from skippy_tools.paths import BACKENDS

OLDEST: Final = "2.51.0"
OLDEST_RELEASE: Final = "24.10"
NGC_ROOT: Final = Path("/opt/tritonserver")
CHOICE: Final = "SKIPPY_TRITONSERVER"
"""Environment variable: ``wheel``, or a path; unset takes the system's tritonserver, else the wheel's."""

PYTHON_BACKEND: Final = ("libtriton_python.so", "triton_python_backend_utils.py")
STUB: Final = "triton_python_backend_stub"
WHEEL_VERSIONS: Final = {"0.7.0": "2.51.0"}
"""nvidia-pytriton -> tritonserver: the wheel's binary has no --version and brings no version file."""


class TritonError(SkippyError):
    """No tritonserver that fits, or one that is too old."""


@dataclass(frozen=True)
class Tritonserver:
    """One tritonserver installation. ``version`` is None when only the running server can tell."""

    binary: Path
    origin: str
    version: str | None
    python_backend: Path
    stub: Path
    libraries: tuple[Path, ...] = ()


def find_tritonserver(choice: str | None = None, search_path: str | None = None) -> Tritonserver:
    """The tritonserver to use; raises TritonError saying what is missing and how to get it.

    ``choice`` is as the environment variable SKIPPY_TRITONSERVER, which it overrides.
    """
    choice = choice or os.environ.get(CHOICE) or ""
    if choice == "wheel":
        return _checked(_wheel_server(required=True))
    if choice:
        if not Path(choice).is_file():
            raise TritonError(f"{CHOICE}={choice}: no such file")
        return _checked(_system_server(Path(choice)))
    on_path = shutil.which("tritonserver", path=search_path)
    for candidate in (Path(on_path) if on_path else None, NGC_ROOT / "bin" / "tritonserver"):
        if candidate is not None and candidate.is_file():
            return _checked(_system_server(candidate))
    return _checked(_wheel_server(required=False))


def _checked(server: Tritonserver | None) -> Tritonserver:
    if server is None:
        raise TritonError(
            f"no tritonserver: none on PATH or in {NGC_ROOT}/bin, and nvidia-pytriton is not installed "
            "(./scripts/demo sets it up; an NGC image nvcr.io/nvidia/tritonserver brings its own)"
        )
    if server.version is not None:
        check_version(server.version, str(server.binary))
    return server


def check_version(version: str, where: str) -> None:
    """Refuse a tritonserver older than the oldest supported one, naming both."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < tuple(int(part) for part in OLDEST.split(".")):
        raise TritonError(
            f"{where} is tritonserver {version}; the oldest supported one is {OLDEST} "
            f"(release {OLDEST_RELEASE}). {CHOICE}=wheel takes the one of the nvidia-pytriton package instead"
        )


def _system_server(binary: Path) -> Tritonserver:
    root = binary.resolve().parent.parent
    backend = root / "backends" / "python"
    stub = backend / STUB
    for needed in (*(backend / name for name in PYTHON_BACKEND), stub):
        if not needed.is_file():
            raise TritonError(f"{binary} has no Python backend: {needed} is missing")
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    built_for = stub_python(stub)
    if built_for is not None and built_for != wanted:
        raise TritonError(
            f"{stub} is built for Python {built_for}, this is Python {wanted}: run with the image's own "
            f"(SKIPPY_PYTHON=/usr/bin/python3), or with {CHOICE}=wheel"
        )
    return Tritonserver(binary, "system", _system_version(root), backend, stub, (root / "lib",))


def _system_version(root: Path) -> str | None:
    """NGC images say it in a file, and in the environment of their containers."""
    file = root / "TRITON_VERSION"
    text = file.read_text() if file.is_file() else ""
    if not text and root == NGC_ROOT.resolve():
        text = os.environ.get("TRITON_SERVER_VERSION", "")
    match = re.search(r"\d+\.\d+\.\d+", text)
    return match.group() if match else None


def stub_python(stub: Path) -> str | None:
    """The Python version that a stub is linked with, such as ``3.12``; None when it doesn't tell."""
    match = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    return match.group(1).decode() if match else None


def _wheel_server(*, required: bool) -> Tritonserver | None:
    # Found without importing: pytriton's own imports are not needed, nor installed.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        if required:
            raise TritonError(f"{CHOICE}=wheel, but nvidia-pytriton is not installed")
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / STUB
    if not stub.is_file():
        raise TritonError(f"nvidia-pytriton has no stub for Python {python}")
    wheel = importlib.metadata.version("nvidia-pytriton")
    return Tritonserver(
        root / "bin" / "tritonserver",
        f"nvidia-pytriton {wheel}",
        WHEEL_VERSIONS.get(wheel),
        root / "backends" / "python",
        stub,
        (package.parent / "nvidia_pytriton.libs",),
    )


def our_backends() -> dict[str, Path]:
    """Our Triton backends: name -> model.py."""
    found = {}
    for name in BACKENDS:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise TritonError(f"the package {name} is not installed")
        found[name] = Path(next(iter(spec.submodule_search_locations))) / "model.py"
    return found


def assemble_backends(server: Tritonserver, backends: Mapping[str, Path], target: Path) -> None:
    """Put a backend directory together: Triton's Python backend, its stub, and the given model files.

    Copies, since Triton refuses a library that a link leads out of the backend directory.
    """
    python = target / "python"
    python.mkdir(parents=True)
    for source in (*(server.python_backend / name for name in PYTHON_BACKEND), server.stub):
        shutil.copy(source, python / source.name)
    for name, model in backends.items():
        (target / name).mkdir()
        shutil.copy(model, target / name / "model.py")


def server_environment(server: Tritonserver, run_dir: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: its libraries, the running Python first on PATH, and our packages."""
    environment = dict(os.environ)
    libraries = [*map(str, server.libraries), str(sysconfig.get_config_var("LIBDIR"))]
    packages = [str(model.parent.parent) for model in our_backends().values()]
    _prepend(environment, "LD_LIBRARY_PATH", libraries)
    _prepend(environment, "PATH", [str(Path(sys.executable).parent)])
    _prepend(environment, "PYTHONPATH", list(dict.fromkeys(packages)))
    environment["SKIPPY_RUN_DIR"] = str(run_dir)
    environment.update(extra)
    return environment


def _prepend(environment: dict[str, str], name: str, entries: Sequence[str]) -> None:
    rest = environment.get(name)
    environment[name] = os.pathsep.join([*entries, *([rest] if rest else [])])


def command_line(
    server: Tritonserver,
    settings: ServerSection,
    endpoints: Endpoints,
    *,
    repository: Path,
    backends: Path,
    shm_prefix: str,
    exit_timeout_s: int,
    repository_key: str,
) -> list[str]:
    """The command that starts the server.

    Models are loaded and unloaded on request (explicit mode), which is how a stage whose process has died
    comes back. Only who knows ``repository_key`` may ask for it.
    """
    only_with_key = f"model-repository:{KEY_HEADER}={repository_key}"
    return [
        str(server.binary),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--disable-auto-complete-config",
        "--model-control-mode=explicit",
        "--load-model=*",
        f"--http-restricted-api={only_with_key}",
        f"--grpc-restricted-protocol={only_with_key}",
        f"--http-address={endpoints.host}",
        f"--http-port={endpoints.http_port}",
        f"--grpc-address={endpoints.host}",
        f"--grpc-port={endpoints.grpc_port}",
        f"--metrics-address={endpoints.host}",
        f"--metrics-port={endpoints.metrics_port}",
        f"--exit-timeout-secs={exit_timeout_s}",
        "--log-format=ISO8601",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,shm-default-byte-size={settings.shm_mib << 20}",
        f"--backend-config=python,thread-pool-size={settings.thread_pool_size}",
    ]
