"""Finding and running perf_analyzer, Triton's load generator."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skippy_stage.errors import SkippyError

NAME: Final = "perf_analyzer"
LIBRARIES: Final = {"libb64.so.0d": r"libb64-\w+\.so\.0d", "libcudart.so.12": r"libcudart-\w+\.so\.12[\d.]*"}
"""What the wheel's binary links with -> the name that nvidia-pytriton's copy goes by."""

THREAD_ERROR: Final = re.compile(r"^Thread \[\d+\] had error: (.*)$", re.MULTILINE)
COMPLAINT: Final = re.compile(r"^\s*(?:Error: |error: )(.*)$", re.MULTILINE)


class AnalyzerError(SkippyError):
    """perf_analyzer is missing, can't run, or failed."""


@dataclass(frozen=True)
class Analyzer:
    """A perf_analyzer that runs, and the environment that it needs for it."""

    binary: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Load:
    """One level of load."""

    url: str
    model: str
    concurrency: int
    requests: int
    inputs: Sequence[Mapping[str, Any]]
    timeout_s: float


@dataclass(frozen=True)
class Run:
    """What one run left: the export, or the errors that kept it from one. Times in nanoseconds."""

    requests: list[dict[str, Any]]
    errors: list[str]


def find_analyzer(libraries: Path) -> Analyzer:
    """The perf_analyzer of this environment, or the system's.

    ``libraries`` is an empty private folder: the wheel's binary links with two libraries that Debian
    has no package installed for, and nvidia-pytriton brings them under other names.
    """
    beside = Path(sys.executable).parent / NAME
    binary = str(beside) if beside.is_file() else shutil.which(NAME)
    if binary is None:
        raise AnalyzerError(
            f"{NAME} is neither beside {Path(sys.executable).name} nor on PATH: pip install "
            "'tritonclient[all]==2.51.0', or run in an NGC image nvcr.io/nvidia/tritonserver:*-py3-sdk"
        )
    plain = Analyzer(binary, dict(os.environ))
    if _complaint(plain) is None:
        return plain
    _link_libraries(libraries)
    path = os.environ.get("LD_LIBRARY_PATH")
    linked = Analyzer(
        binary,
        {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), *([path] if path else [])])},
    )
    complaint = _complaint(linked)
    if complaint is not None:
        raise AnalyzerError(
            f"{binary} doesn't run: {complaint}. The build of tritonclient 2.51.0 needs libb64 and CUDA's "
            "libcudart.so.12 (nvidia-pytriton 0.7.0 brings both); later builds need glibc 2.38"
        )
    return linked


def _complaint(analyzer: Analyzer) -> str | None:
    """Why the binary doesn't run; None when it does."""
    try:
        tried = subprocess.run(
            [analyzer.binary, "--version"],
            env=dict(analyzer.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip() or f"exit status {tried.returncode}").splitlines()[0]


def _link_libraries(target: Path) -> None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return
    source = Path(next(iter(spec.submodule_search_locations))).parent / "nvidia_pytriton.libs"
    for name, pattern in LIBRARIES.items():
        found = [path for path in source.glob("*") if re.fullmatch(pattern, path.name)]
        if found:
            (target / name).symlink_to(found[0])


def arguments(load: Load, input_file: Path, export_file: Path) -> list[str]:
    """perf_analyzer's arguments for one level."""
    return [
        *("-m", load.model),
        *("-u", load.url),
        *("-i", "grpc"),
        "--async",
        "--streaming",
        *("--input-data", str(input_file)),
        *("--concurrency-range", str(load.concurrency)),
        *("--request-count", str(load.requests)),
        *("--profile-export-file", str(export_file)),
    ]


def run_load(analyzer: Analyzer, load: Load, folder: Path) -> Run:
    """Run one level to its end.

    One failed request ends perf_analyzer's whole run, without an export: the messages of its threads
    are then all there is.
    """
    input_file = folder / "inputs.json"
    export_file = folder / f"export-{load.concurrency}.json"
    export_file.unlink(missing_ok=True)  # perf_analyzer refuses to write over one
    input_file.write_text(json.dumps({"data": [as_input(entry) for entry in load.inputs]}), encoding="utf-8")
    process = subprocess.Popen(
        [analyzer.binary, *arguments(load, input_file, export_file)],
        env=dict(analyzer.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=load.timeout_s)
    except subprocess.TimeoutExpired:
        return Run([], [f"{NAME} had not finished after {load.timeout_s:g} s"])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    errors = [error.strip() for error in THREAD_ERROR.findall(output)]
    if process.returncode != 0 or not export_file.is_file():
        if not errors:
            raise AnalyzerError(f"{NAME} ended with status {process.returncode}: {complaint_in(output)}")
        return Run([], errors)
    return Run(read_export(export_file.read_text(encoding="utf-8", errors="replace")), errors)


def complaint_in(output: str) -> str:
    """What perf_analyzer complains of: the line that says so, or the last ones it printed."""
    found = COMPLAINT.search(output)
    return found.group(1).strip() if found else " / ".join(output.strip().splitlines()[-3:])


def as_input(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """One request of an --input-data file: every tensor is a list of its elements."""
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def read_export(text: str) -> list[dict[str, Any]]:
    """The requests of a --profile-export-file."""
    export = json.loads(text)
    return [request for experiment in export["experiments"] for request in experiment["requests"]]
