"""The setup of the environment, with a python3 that only takes notes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from skippy_tools.paths import ROOT

FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case "$*" in
*"sys.version_info"*) exit "${UNFIT:-0}" ;;
--version) echo "Python ${VERSION:-3.11.2}" ;;
"-m venv "*) [ -z "${NO_VENV:-}" ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python3" ;;
"-m pip install "*) sleep "${SLOW:-0}"; [[ "$*" != *"${MISSING:-nothing is}"* ]] ;;
esac
"""


class Checkout:
    """A copy of what the setup reads, and a PATH with the fake python3 and the usual tools only."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.notes = folder / "notes"
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        shutil.copytree(ROOT / "scripts" / "lib", self.root / "scripts" / "lib")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        tools = folder / "bin"
        tools.mkdir()
        for name in ("python3", "python3.11", "python3.12"):
            (tools / name).write_text(FAKE_PYTHON)
            (tools / name).chmod(0o755)
        self.environment = {"PATH": f"{tools}:/usr/bin:/bin", "NOTES": str(self.notes), "HOME": str(folder)}

    def start(self, kind: str = "runtime", **environment: str) -> subprocess.Popen[str]:
        script = (
            'set -euo pipefail; source "$1/scripts/lib/bootstrap.sh"; skippy_bootstrap "$2"; echo "$PYTHON"'
        )
        return subprocess.Popen(
            ["bash", "-c", script, "bash", str(self.root), kind],
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, kind: str = "runtime", **environment: str) -> tuple[int, str, str]:
        process = self.start(kind, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err

    def installs(self) -> list[str]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [line for line in lines if "pip install" in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_nothing_is_resolved_and_torch_is_the_cpu_build(checkout: Checkout) -> None:
    code, python, said = checkout.set_up("dev")
    assert code == 0, said
    assert python == str(checkout.root / ".venv/bin/python3")
    torch, runtime, dev, ours = checkout.installs()
    assert torch.endswith("torch==2.13.0+cpu")
    assert runtime.endswith("runtime.txt")
    assert dev.endswith("dev.txt")
    assert ours.endswith(f"-e {checkout.root}")
    assert all("--no-deps" in line for line in checkout.installs())
    assert len(re.findall("^.*setup: ", said, flags=re.MULTILINE)) == 6, "one line per phase"


def test_a_second_run_starts_at_once(checkout: Checkout) -> None:
    checkout.set_up("dev")
    before = checkout.notes.read_text()
    started = time.monotonic()
    for kind in ("dev", "runtime"):
        code, _, said = checkout.set_up(kind)
        assert (code, said) == (0, "")
    assert time.monotonic() - started < 1
    assert checkout.notes.read_text() == before


def test_changed_requirements_are_installed(checkout: Checkout) -> None:
    checkout.set_up()
    count = len(checkout.installs())
    with (checkout.root / "requirements" / "runtime.txt").open("a") as file:
        file.write("further==1.0\n")
    checkout.set_up()
    assert len(checkout.installs()) == 2 * count


def test_runs_at_the_same_time_install_once(checkout: Checkout) -> None:
    both = [checkout.start(SLOW="0.2") for _ in range(2)]
    said = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(checkout.installs()) == 3
    assert sum("waiting for another setup" in text for text in said) == 1


def test_a_failed_setup_is_tried_again(checkout: Checkout) -> None:
    code, _, said = checkout.set_up(MISSING="runtime.txt")
    assert code == 1
    assert "a package of requirements/runtime.txt is missing" in said
    code, _, said = checkout.set_up()
    assert code == 0


def test_without_the_cpu_build_the_plain_pin_is_tried_and_nothing_it_depends_on(checkout: Checkout) -> None:
    code, _, said = checkout.set_up(MISSING="torch==")
    assert code == 1
    assert "no torch==2.13.0 for this Python" in said
    assert [line.split()[-1] for line in checkout.installs()] == ["torch==2.13.0+cpu", "torch==2.13.0"]
    assert all("--no-deps" in line for line in checkout.installs())
    assert checkout.set_up(MISSING="+cpu")[0] == 0


def test_an_unfit_python_is_named(checkout: Checkout) -> None:
    code, _, said = checkout.set_up(UNFIT="1", VERSION="3.9.2")
    assert code == 1
    assert "Python 3.11 or 3.12 is needed, python3 is Python 3.9.2" in said
    assert "apt-get install python3" in said


def test_a_missing_venv_module_is_named(checkout: Checkout) -> None:
    code, _, said = checkout.set_up(NO_VENV="1")
    assert code == 1
    assert "apt-get install python3-venv" in said


def test_an_environment_of_one_s_own_is_left_alone(checkout: Checkout) -> None:
    code, python, _ = checkout.set_up(SKIPPY_PYTHON="/opt/python3")
    assert (code, python) == (0, "/opt/python3")
    assert not checkout.notes.exists()
    assert not (checkout.root / ".venv").exists()


def test_the_requirements_are_frozen() -> None:
    pins: dict[str, str] = {}
    for file in ("runtime.txt", "dev.txt"):
        for line in (ROOT / "requirements" / file).read_text().splitlines():
            if line and not line.startswith("#"):
                match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[all\])?==([0-9a-z.]+)", line)
                assert match, line
                assert match[1].lower() not in pins, f"{line} twice"
                pins[match[1].lower()] = match[2]
    assert pins["torch"] == "2.13.0"
    assert pins["numpy"].startswith("1."), "the server's stub aborts on numpy 2"
    assert not [name for name in pins if "cu12" in name or "cuda" in name or "tensorrt" in name]


def test_the_scripts_pass_shellcheck() -> None:
    scripts = [
        path for path in (ROOT / "scripts").iterdir() if path.is_file() and b"bash" in path.read_bytes()[:30]
    ]
    files = [*scripts, ROOT / "scripts/lib/bootstrap.sh", ROOT / ".ci/run"]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    result = subprocess.run([shellcheck, "-x", *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_every_script_is_executable_and_sets_up_first() -> None:
    scripts = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    assert {"demo", "doctor", "generate_docs", "generate_repository", "serve", "test"} <= {
        s.name for s in scripts
    }
    for script in scripts:
        text = script.read_text()
        assert os.access(script, os.X_OK), script
        assert "set -euo pipefail" in text, script
        assert "skippy_bootstrap" in text, script
