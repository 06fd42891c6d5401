"""One process at a time in a results folder: a lock file that names its holder, and goes with it whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path


class Lock:
    """Held from construction to :meth:`release`. ValueError if another process holds it.

    The kernel's own lock on the open file, so that a process that was killed holds nothing; the text in the file only
    tells a reader who it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        while True:
            self._file = self._open()
            # Another process may have released it, which deletes the file, between opening and locking.
            with contextlib.suppress(OSError):
                if os.fstat(self._file).st_ino == path.stat().st_ino:
                    break
            os.close(self._file)
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()} on {socket.gethostname()}\n".encode())

    def _open(self) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(
                f"results folder {self._path.parent}: {error.strerror}; choose a writable one with --out"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(file, 200).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise ValueError(
                f"results folder {self._path.parent}: another kvgate is at work in it (process {holder}); "
                "wait for it or choose another folder with --out"
            ) from error
        except OSError:  # a file system without locks: better none than no run
            pass
        return file

    def release(self) -> None:
        """Let it go and take the file away."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._file)
