"""The few file operations the swap area needs, so that tests can crash between any two bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Files in one directory, by name. What a call wrote is durable when it returns."""

    def names(self) -> list[str]:
        """All files."""

    def read(self, name: str) -> bytes:
        """A whole file. Raises FileNotFoundError."""

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file."""

    def append(self, name: str, data: bytes) -> None:
        """Add to the end of a file, creating it."""

    def rename(self, old: str, new: str) -> None:
        """Replace ``new`` by ``old`` at once."""

    def remove(self, name: str) -> None:
        """Delete a file; nothing happens if it is gone."""


class OsDisk:
    """Files under a directory, synced on every write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        """All files."""
        return sorted(p.name for p in self.root.iterdir())

    def read(self, name: str) -> bytes:
        """A whole file."""
        return (self.root / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file and sync it."""
        self._put(name, data, "wb")

    def append(self, name: str, data: bytes) -> None:
        """Append and sync."""
        self._put(name, data, "ab")

    def rename(self, old: str, new: str) -> None:
        """Atomic replacement; the directory is synced."""
        (self.root / old).replace(self.root / new)
        handle = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        """Delete if it exists."""
        (self.root / name).unlink(missing_ok=True)

    def _put(self, name: str, data: bytes, mode: str) -> None:
        with (self.root / name).open(mode) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


class MemoryDisk:
    """Files in memory: for a host area that need not survive the process."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def names(self) -> list[str]:
        """All files."""
        return sorted(self.files)

    def read(self, name: str) -> bytes:
        """A whole file."""
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file."""
        self.files[name] = data

    def append(self, name: str, data: bytes) -> None:
        """Add to a file."""
        self.files[name] = self.files.get(name, b"") + data

    def rename(self, old: str, new: str) -> None:
        """Replace at once."""
        self.files[new] = self.files.pop(old)

    def remove(self, name: str) -> None:
        """Delete if it exists."""
        self.files.pop(name, None)
