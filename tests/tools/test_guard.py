from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from skippy_tools.guard import end_session, region_lock, session_pids, sweep_dead


def test_regions_are_removed_by_their_owner(tmp_path: Path) -> None:
    with region_lock("skippy_1_1_", tmp_path):
        (tmp_path / "skippy_1_1_region").touch()
        (tmp_path / "skippy_1_11_region").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["skippy_1_11_region"]


def test_sweep_takes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    for name in ("skippy_7_1_lock", "skippy_7_1_region", "skippy_8_1_lock", "skippy_8_1_region", "foreign"):
        (tmp_path / name).touch()
    living = os.open(tmp_path / "skippy_8_1_lock", os.O_RDWR)
    fcntl.flock(living, fcntl.LOCK_EX)
    assert sweep_dead(tmp_path) == ["skippy_7_1_"]
    assert {path.name for path in tmp_path.iterdir()} == {"skippy_8_1_lock", "skippy_8_1_region", "foreign"}
    os.close(living)
    assert sweep_dead(tmp_path) == ["skippy_8_1_"]
    assert [path.name for path in tmp_path.iterdir()] == ["foreign"]


def test_a_session_is_ended_with_orphans() -> None:
    # The middle process ends at once, so the last one is an orphan that only the session finds.
    spawn = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    leader = subprocess.Popen([sys.executable, "-c", spawn], start_new_session=True)
    leader.wait()
    assert len(session_pids(leader.pid)) == 1
    assert end_session(leader.pid) == []
    assert session_pids(leader.pid) == []
