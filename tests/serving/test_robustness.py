"""Clients that leave, dawdle or send rubbish; tenants with keys and limits; rows that fail. No page is ever lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import Live

from kvgate.engine.models import LoadedModel

LONG: dict[str, Any] = {"model": "tiny", "prompt": "once upon a time ", "max_tokens": 400, "logit_bias": {"256": -100}}


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "fails_on_purpose" in request.keywords:
        return
    assert [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR] == []


def leave_early(live: Live, seed: int) -> None:
    """Ask, read a little or nothing, and close the connection, at a random moment."""
    pick = random.Random(seed)
    stream = pick.random() < 0.7
    body = json.dumps({**LONG, "prompt": "x" * pick.randint(1, 900), "stream": stream, "n": pick.choice([1, 1, 2])})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    raw = f"{head}\r\n\r\n{body}".encode()
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
        connection.sendall(raw[: pick.choice([len(raw), len(raw), len(raw), len(raw) // 2])])
        time.sleep(pick.random() * 0.05)
        if pick.random() < 0.5:
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                connection.recv(pick.randint(1, 2000))
        if pick.random() < 0.3:  # a reset instead of a polite end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def crowd_leaves(live: Live, clients: int, at_once: int) -> None:
    for first in range(0, clients, at_once):
        threads = [threading.Thread(target=leave_early, args=(live, seed)) for seed in range(first, first + at_once)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    live.audit()


def test_clients_that_leave_give_everything_back(live: Live) -> None:
    crowd_leaves(live, 40, 20)
    assert live.send("POST", "/v1/completions", {**LONG, "max_tokens": 3})[0] == 200


@pytest.mark.slow
def test_five_hundred_clients_that_leave_give_everything_back(live: Live) -> None:
    crowd_leaves(live, 500, 25)
    assert live.send("POST", "/v1/completions", {**LONG, "max_tokens": 3})[0] == 200


def test_a_client_that_leaves_frees_its_pages_before_others_go_on(live: Live) -> None:
    with live.client().completions.create(**LONG, stream=True) as stream:
        next(iter(stream))
        assert live.service.driver.live == 1
    live.idle(2.0)
    live.audit()


def test_a_slow_reader_holds_nobody_up(live: Live) -> None:
    body = json.dumps({**LONG, "max_tokens": 500, "stream": True, "logprobs": 20})
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
        slow.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        time.sleep(0.3)
        began = time.monotonic()
        assert live.send("POST", "/v1/completions", {**LONG, "max_tokens": 5})[0] == 200
        assert time.monotonic() - began < 5
        live.idle(30)  # its answer is done although nobody reads it: the pages are free
        raw = b""
        while b"[DONE]" not in raw:
            part = slow.recv(65536)
            assert part, "the stream broke off"
            raw += part
    live.audit()


def test_a_hundred_malformed_bodies(live: Live) -> None:
    pick = random.Random(4)
    whole = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).encode()
    statuses = set()
    for i in range(100):
        raw = bytearray(whole)
        match i % 5:
            case 0:
                raw = raw[: pick.randrange(len(raw))]
            case 1:
                raw[pick.randrange(len(raw))] = pick.randrange(256)
            case 2:
                raw = bytearray(pick.randbytes(pick.randrange(200)))
            case 3:
                raw = bytearray(json.dumps(pick.choice([None, 7, "x", [], [[]], {"model": {}}, {"a": 1}])).encode())
            case _:
                raw = bytearray(b"[" * pick.choice([10, 100_000]))
        status, _, answer = live.send("POST", "/v1/chat/completions", bytes(raw))
        statuses.add(status)
        assert status in (200, 400, 404), answer
        if status != 200:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}
    assert 400 in statuses
    live.audit()


@pytest.mark.fails_on_purpose
def test_a_failing_request_fails_alone(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgate.serving.answer import Answer

    take = Answer.take

    def broken(answer: Answer, token: int, logits: Any) -> bool:
        if bytes(answer.prompt[:3]) == bytes(live.service.model.tokenizer.encode("bad")):
            raise RuntimeError("made to fail")
        return take(answer, token, logits)

    monkeypatch.setattr(Answer, "take", broken)
    found: list[int] = []
    asks = [{**LONG, "prompt": "good one", "max_tokens": 60}, {**LONG, "prompt": "bad one", "max_tokens": 60}]
    threads = [
        threading.Thread(target=lambda ask=ask: found.append(live.send("POST", "/v1/completions", ask)[0]))
        for ask in asks * 3
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(found) == [200] * 3 + [500] * 3
    live.audit()


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture(scope="module")
def guarded(tiny: LoadedModel) -> Iterator[Live]:
    settings = {
        "keys": {digest("key-a"): "a", digest("key-b"): "b"},
        "lifecycle": {"tenants": {"a": {"token_budget": 600}, "b": {"max_concurrency": 1}}},
        "limits": {"queued": 12},
    }
    with Live(tiny, settings) as running:
        yield running
        running.audit()


def test_keys_are_asked_for_and_belong_to_tenants(guarded: Live) -> None:
    with pytest.raises(openai.AuthenticationError, match="not known"):
        guarded.client("wrong").models.list()
    assert guarded.send("GET", "/v1/models")[0] == 401
    assert guarded.send("POST", "/tokenize", {"prompt": "a"})[0] == 401
    assert guarded.send("GET", "/health")[0] == 200
    assert guarded.client("key-a").completions.create(model="tiny", prompt="a", max_tokens=2).usage.completion_tokens


def test_no_tenant_hits_another_s_cache(guarded: Live) -> None:
    def cached(key: str) -> int:
        client = guarded.client(key)
        found = client.completions.create(model="tiny", prompt="a secret of mine " * 10, max_tokens=2)
        return int(found.usage.prompt_tokens_details.cached_tokens)

    assert [cached("key-a"), cached("key-b"), cached("key-a"), cached("key-b")] == [0, 0, 160, 160]


def test_limits_answer_429_with_retry_after(guarded: Live) -> None:
    for key, body, code in (
        ("key-a", {**LONG, "max_tokens": 700}, "tenant_token_budget"),
        ("key-b", {**LONG, "n": 13}, "queue_full"),
    ):
        headers = {"Authorization": f"Bearer {key}"}
        status, answered, raw = guarded.send("POST", "/v1/completions", body, headers)
        assert (status, json.loads(raw)["error"]["code"]) == (429, code)
        assert int(answered["retry-after"]) > 0


def test_one_answer_over_the_limit_takes_its_siblings_along(guarded: Live) -> None:
    """Of three answers the tenant's budget has room for one: none runs."""
    headers = {"Authorization": "Bearer key-a"}
    assert guarded.send("POST", "/v1/completions", {**LONG, "n": 3, "max_tokens": 300}, headers)[0] == 429
    guarded.audit()


def test_draining_takes_no_new_requests_and_ends_running_ones(tiny: LoadedModel) -> None:
    with Live(tiny) as live:
        with live.client().completions.create(**LONG, stream=True) as stream:
            pieces = iter(stream)
            next(pieces)
            live.service.draining = True
            assert live.send("GET", "/ready")[0] == 503
            assert live.send("GET", "/health")[0] == 200
            status, headers, _ = live.send("POST", "/v1/completions", LONG)
            assert (status, "retry-after" in headers) == (503, True)
            assert [p.choices[0].finish_reason for p in pieces][-1] == "length"
        live.audit()


def test_prompts_are_not_logged_unless_asked(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for asked in (False, True):
        caplog.clear()
        with Live(tiny, {"log_prompts": asked}) as live:
            live.send("POST", "/v1/completions", {"model": "tiny", "prompt": "xyzzy plugh", "max_tokens": 2})
            live.send("POST", "/v1/completions", {"model": "tiny", "prompt": "xyzzy plugh", "max_tokens": -2})
        logged = caplog.text + "".join(capfd.readouterr())
        assert ("xyzzy plugh" in logged) == asked


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"key": {}}, "unknown key 'key'"),
        ({"keys": {"secret": "a"}}, "64 hexadecimal digits"),
        ({"keys": {digest("x"): "nobody"}, "lifecycle": {"tenants": {"a": {}}}}, "'nobody' is not among"),
        ({"limits": {"queued": 0}}, "limits.queued: 0"),
        ({"limits": {"body_bytes": 1.5}}, "limits.body_bytes: 1.5"),
        ({"lifecycle": {"page": 3}}, "unknown key 'page'"),
        ({"log_prompts": 1}, "log_prompts: 1"),
        ([], None),
        (7, "not a mapping"),
    ],
)
def test_bad_settings_are_named(raw: Any, named: str | None) -> None:
    from kvgate.serving.config import parse_serve_config

    if named is None:
        parse_serve_config(raw)
        return
    with pytest.raises(ValueError, match=named) as error:
        parse_serve_config(raw)
    assert "secret" not in str(error.value), "keys are never shown"
