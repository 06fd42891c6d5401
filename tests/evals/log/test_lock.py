"""One process at a time in a results folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.evals.log.lock import Lock

HOLD = "import sys, time; from pathlib import Path; from kvgate.evals.log.lock import Lock; "
HOLD += "lock = Lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def test_the_second_process_hears_who_holds_it_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"another kvgate is at work in it .process {other.pid} on "):
            Lock(path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert path.exists()  # left behind by the killed process
    lock = Lock(path)
    assert path.read_text().startswith(f"{os.getpid()} on ")
    with pytest.raises(ValueError, match=f"process {os.getpid()} on "):
        Lock(path)
    lock.release()
    assert not path.exists()
    Lock(path).release()


def test_a_folder_that_takes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose a writable one"):
        Lock(tmp_path / "nowhere" / ".lock")
