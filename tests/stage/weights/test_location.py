"""From the ``model`` setting to a path."""

from __future__ import annotations

from pathlib import Path

import pytest
from skippy_stage.errors import SkippyError
from skippy_stage.weights import locate


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPPY_MODELS", str(tmp_path))
    (tmp_path / "tiny").mkdir()
    assert locate("tiny") == tmp_path / "tiny"
    assert locate(str(tmp_path / "tiny")) == tmp_path / "tiny"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/tiny") == tmp_path / "tiny"
    with pytest.raises(SkippyError, match=f"model 'gone': {tmp_path}/gone does not exist"):
        locate("gone")


def test_without_a_setting_models_are_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPPY_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "skippy" / "models" / "m"
    folder.mkdir(parents=True)
    assert locate("m") == folder


def test_a_file_in_a_package_without_running_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "weights_in_here"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").touch()
    (tmp_path / "lone_module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:weights_in_here/m.gguf") == package / "m.gguf"
    assert locate("package:lone_module/weights_in_here/m.gguf") == package / "m.gguf"
    with pytest.raises(SkippyError, match=r"no 'x\.gguf' in the installed package 'weights_in_here'"):
        locate("package:weights_in_here/x.gguf")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("package:not_installed_here/m.gguf", "'not_installed_here' is not installed"),
        ("package:", "expected package:NAME/FILE"),
        ("package:name", "expected package:NAME/FILE"),
        ("package:name/", "expected package:NAME/FILE"),
        ("package:a.b/m.gguf", "expected package:NAME/FILE"),
        ("package:json/../os.py", "expected package:NAME/FILE"),
        ("package:json//etc/passwd", "expected package:NAME/FILE"),
    ],
)
def test_names_that_lead_nowhere(model: str, message: str) -> None:
    with pytest.raises(SkippyError, match=message):
        locate(model)
