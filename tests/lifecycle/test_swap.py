"""The host swap area: crashes between any two bytes, flipped bits, deleted files; never wrong bytes, nothing lost."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk, OsDisk
from kvgate.lifecycle.swap.journal import Put, Tombstone, decode, encode


class Crash(Exception):
    """The machine stopped."""


@dataclass
class CrashingDisk(MemoryDisk):
    """Stops after a number of bytes or name changes; what was written before is there."""

    left: int = 0
    files: dict[str, bytes] = field(default_factory=dict)

    def _spend(self, data: bytes) -> bytes:
        done = data[: self.left]
        self.left -= len(done)
        return done

    def write(self, name: str, data: bytes) -> None:
        done = self._spend(data)
        super().write(name, done)
        if len(done) < len(data):
            raise Crash

    def append(self, name: str, data: bytes) -> None:
        done = self._spend(data)
        super().append(name, done)
        if len(done) < len(data):
            raise Crash

    def rename(self, old: str, new: str) -> None:
        self._name()
        super().rename(old, new)

    def remove(self, name: str) -> None:
        self._name()
        super().remove(name)

    def _name(self) -> None:
        if self.left < 1:
            raise Crash
        self.left -= 1


def history(area: HostArea, committed: dict[str, bytes | None]) -> None:
    """Puts, a removal, a key put again; ``committed`` says what is certain after each step (None: removed)."""
    for key, payload in (("a", b"first" * 3), ("b", b"second"), ("c", b"")):
        assert area.reserve(key, len(payload))
        committed["?"] = payload if key not in committed else None
        area.put(key, payload)
        committed[key] = payload
    committed["?a"] = None
    area.drop("a")
    committed["a"] = None
    assert area.reserve("a", 9)
    area.put("a", b"again")
    committed["a"] = b"again"


def test_24_recovery_after_a_crash_at_every_byte() -> None:
    whole = CrashingDisk(left=1 << 30)
    history(HostArea.open(whole, 100), {})
    used = (1 << 30) - whole.left
    for budget in range(used + 1):
        disk = CrashingDisk(left=budget)
        certain: dict[str, bytes | None] = {}
        with contextlib.suppress(Crash):
            history(HostArea.open(disk, 100), certain)
        disk.left = 1 << 30
        area = HostArea.open(disk, 100)
        versions = {"a": {b"first" * 3, b"again"}, "b": {b"second"}, "c": {b""}}
        for key, known in certain.items():
            if key.startswith("?"):
                continue
            found = area.get(key)
            if known is None:
                assert found in (None, b"again"), f"{budget}: a removed entry came back"
            elif key == "a" and known != b"again" and "?a" in certain:
                assert found in (None, known), f"{budget}: wrong bytes"
            else:
                assert found == known, f"{budget}: a committed entry was lost"
        for key in area.names():
            assert area.get(key) in versions[key], f"{budget}: bytes nobody wrote"
        assert area.counts.corrupt == 0
        files = [n for n in disk.names() if n != "journal"]
        assert len(files) == len(area.names()), f"{budget}: orphan or duplicate files {files}"
        # And it goes on working.
        assert area.reserve("z", 3)
        area.put("z", b"new")
        assert HostArea.open(disk, 100).get("z") == b"new"


def test_24_a_crash_during_recovery_loses_nothing_either() -> None:
    base = CrashingDisk(left=140)
    with pytest.raises(Crash):
        history(HostArea.open(base, 100), {})
    plain = MemoryDisk()
    plain.files = dict(base.files)
    expected = {k: HostArea.open(plain, 100).get(k) for k in HostArea.open(plain, 100).names()}
    for budget in range(200):
        disk = CrashingDisk(left=budget)
        disk.files = dict(base.files)
        with contextlib.suppress(Crash):
            HostArea.open(disk, 100)
        disk.left = 1 << 30
        area = HostArea.open(disk, 100)
        assert {k: area.get(k) for k in area.names()} == expected


def _filled() -> MemoryDisk:
    disk = MemoryDisk()
    area = HostArea.open(disk, 100)
    for key in ("a", "b", "c"):
        area.reserve(key, 8)
        area.put(key, key.encode() * 8)
    return disk


def test_24_every_flipped_bit_of_a_payload_is_noticed() -> None:
    disk = _filled()
    name = next(n for n in disk.names() if disk.files[n] == b"b" * 8)
    for bit in range(64):
        broken = bytearray(b"b" * 8)
        broken[bit // 8] ^= 1 << bit % 8
        disk.files[name] = bytes(broken)
        copy = MemoryDisk()
        copy.files = dict(disk.files)
        area = HostArea.open(copy, 100)
        assert area.get("b") is None
        assert area.counts.corrupt == 1
        assert (area.get("a"), area.get("c")) == (b"a" * 8, b"c" * 8)
        assert area.free == 84, "the dropped entry gave its space back"


def test_24_every_flipped_bit_of_the_journal_costs_one_entry_at_most() -> None:
    whole = _filled()
    journal = whole.files["journal"]
    for bit in range(8 * len(journal)):
        disk = MemoryDisk()
        disk.files = dict(whole.files)
        broken = bytearray(journal)
        broken[bit // 8] ^= 1 << bit % 8
        disk.files["journal"] = bytes(broken)
        area = HostArea.open(disk, 100)
        found = [k for k in ("a", "b", "c") if area.get(k) is not None]
        assert len(found) == 2
        assert all(area.get(k) == k.encode() * 8 for k in found)
        assert area.counts.damaged >= 1
        assert len(disk.names()) == 3, "the file without a record was removed"


def test_24_a_file_deleted_under_a_live_index() -> None:
    disk = _filled()
    area = HostArea.open(disk, 100)
    for name in [n for n in disk.names() if n.endswith(".kv")]:
        disk.remove(name)
    assert area.get("a") is None
    assert HostArea.open(disk, 100).names() == []


def test_the_journal_stays_short_and_numbers_rise() -> None:
    disk = MemoryDisk()
    area = HostArea.open(disk, 100)
    names = set()
    for i in range(300):
        area.reserve("k", 8)
        area.put("k", str(i).encode())
        name = next(n for n in disk.names() if n.endswith(".kv"))
        assert name not in names
        names.add(name)
        if i % 7 == 0:
            area = HostArea.open(disk, 100)
        assert area.get("k") == str(i).encode()
        area.drop("k")
    assert len(decode(disk.files["journal"])[0]) < 100


def test_records_survive_a_round_trip_and_torn_tails() -> None:
    records = [Put("ä", 1, 5, "00"), Tombstone("ä", 1), Put("b", 2, 0, "ff")]
    data = b"".join(map(encode, records))
    assert decode(data) == (records, 0)
    assert decode(data[:-1]) == (records[:2], 1)
    assert decode(b"") == ([], 0)


def test_bad_sizes_are_named_and_nothing_is_half_reserved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host area of -1 bytes"):
        HostArea.open(MemoryDisk(), -1)
    disk = OsDisk(tmp_path / "area")
    area = HostArea.open(disk, 10)
    assert not area.reserve("big", 11)
    assert area.free == 10
    assert area.reserve("a", 10)
    area.put("a", b"0123456789")
    assert HostArea.open(OsDisk(tmp_path / "area"), 10).get("a") == b"0123456789"
    with pytest.raises(ValueError, match="already names 10"):
        HostArea.open(disk, 9)
    area.reserve("b", 0)
    area.cancel("b")
    area.cancel("b")
    assert area.drop("a")
    assert not area.drop("a")
