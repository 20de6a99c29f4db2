from __future__ import annotations

import sys
from pathlib import Path

import pytest
from skippy_tools import triton
from skippy_tools.triton import TritonError, assemble_backends, check_version, find_tritonserver, stub_python

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def installation(root: Path, version: str | None = "2.60.0", python: str = PYTHON) -> Path:
    """What of an NGC image matters here."""
    backend = root / "backends" / "python"
    backend.mkdir(parents=True)
    for name in triton.PYTHON_BACKEND:
        (backend / name).write_text(name)
    (backend / triton.STUB).write_bytes(b"ELF\0libpython" + python.encode() + b".so.1.0\0")
    binary = root / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    if version:
        (root / "TRITON_VERSION").write_text(f"{version}\n")
    return binary


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(triton.CHOICE, raising=False)
    monkeypatch.setattr(triton, "NGC_ROOT", Path("/nowhere"))


def test_a_server_on_path_comes_first(tmp_path: Path) -> None:
    binary = installation(tmp_path)
    server = find_tritonserver(search_path=str(binary.parent))
    assert (server.binary, server.origin, server.version) == (binary, "system", "2.60.0")


def test_an_image_s_server_is_found_off_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = installation(tmp_path)
    monkeypatch.setattr(triton, "NGC_ROOT", tmp_path)
    assert find_tritonserver(search_path="/nowhere").binary == binary


def test_the_wheel_s_server_comes_last() -> None:
    server = find_tritonserver(search_path="/nowhere")
    assert server.version == "2.51.0"
    assert server.binary.is_file()
    assert stub_python(server.stub) == PYTHON


def test_the_environment_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = installation(tmp_path / "a")
    chosen = installation(tmp_path / "b")
    monkeypatch.setenv(triton.CHOICE, str(chosen))
    assert find_tritonserver(search_path=str(on_path.parent)).binary == chosen
    monkeypatch.setenv(triton.CHOICE, "wheel")
    assert find_tritonserver(search_path=str(on_path.parent)).origin.startswith("nvidia-pytriton")


def test_d13_an_older_server_is_refused_naming_both(tmp_path: Path) -> None:
    binary = installation(tmp_path, version="2.50.0")
    with pytest.raises(TritonError, match=r"is tritonserver 2\.50\.0; the oldest supported one is 2\.51\.0"):
        find_tritonserver(search_path=str(binary.parent))


def test_versions_compare_as_numbers() -> None:
    check_version("2.100.0", "x")
    check_version("3.0", "x")
    with pytest.raises(TritonError):
        check_version("2.9.0", "x")


def test_a_version_that_no_file_tells_is_left_to_the_running_server(tmp_path: Path) -> None:
    binary = installation(tmp_path, version=None)
    assert find_tritonserver(search_path=str(binary.parent)).version is None


def test_a_stub_for_another_python_is_refused(tmp_path: Path) -> None:
    binary = installation(tmp_path, python="3.9")
    with pytest.raises(TritonError, match=r"built for Python 3\.9"):
        find_tritonserver(search_path=str(binary.parent))


def test_a_server_without_python_backend_is_refused(tmp_path: Path) -> None:
    binary = installation(tmp_path)
    (tmp_path / "backends" / "python" / triton.STUB).unlink()
    with pytest.raises(TritonError, match="has no Python backend"):
        find_tritonserver(search_path=str(binary.parent))


def test_only_model_py_gets_into_the_backend_directory(tmp_path: Path) -> None:
    model = tmp_path / "package" / "model.py"
    model.parent.mkdir()
    model.write_text("x = 1")
    (model.parent / "protocol.py").touch()
    binary = installation(tmp_path / "triton")
    server = find_tritonserver(search_path=str(binary.parent))
    assemble_backends(server, {"skippy_stage": model}, tmp_path / "backends")
    found = {str(path.relative_to(tmp_path / "backends")) for path in (tmp_path / "backends").rglob("*.*")}
    assert found == {
        "python/libtriton_python.so",
        "python/triton_python_backend_utils.py",
        "skippy_stage/model.py",
    }
    assert (tmp_path / "backends" / "python" / triton.STUB).is_file()
