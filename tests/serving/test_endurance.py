"""Ten thousand requests: nothing of them stays."""

from __future__ import annotations

import http.client
import json
import os
import threading
from pathlib import Path

import pytest
from live_server import Live

from kvgate.engine.models import LoadedModel

CLIENTS, EACH = 16, 625


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def ask_many(live: Live, client: int, count: int, failures: list[str]) -> None:
    """One connection, one request after another; prompts differ, so the prefix cache is always busy."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=120)
    for i in range(count):
        body = {"model": "tiny", "prompt": f"{client} {i} " + "x" * (i % 40), "max_tokens": 3, "seed": i}
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        raw = answer.read()
        if answer.status != 200:
            failures.append(f"{answer.status} {raw[:200]!r}")
    connection.close()


def crowd(live: Live, each: int) -> list[str]:
    failures: list[str] = []
    threads = [threading.Thread(target=ask_many, args=(live, c, each, failures)) for c in range(CLIENTS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return failures


@pytest.mark.slow
def test_ten_thousand_requests_leave_memory_flat(tiny: LoadedModel) -> None:
    with Live(tiny, blocks=128) as live:
        assert crowd(live, EACH // 5) == []
        live.audit()
        before = resident_mb()
        assert crowd(live, EACH - EACH // 5) == []
        live.audit()
        grown = resident_mb() - before
        assert grown < 8, f"{grown:.1f} MB more after {CLIENTS * EACH} requests"
        server = live.service.driver.server
        assert not server.requests
        assert live.service.driver.live == 0
