"""A live server: OpenAI's protocol by OpenAI's client and by hand. Pages are audited after each module of tests."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from live_server import Live

NO_END = {"256": -100}
SAY = [{"role": "user", "content": "Say hi."}]


def greedy(live: Live, prompt: Any, tokens: int = 12, **options: Any) -> Any:
    return live.client().completions.create(model="tiny", prompt=prompt, max_tokens=tokens, temperature=0, **options)


def test_models_version_health_and_metrics(live: Live) -> None:
    (model,) = live.client().models.list()
    assert (model.id, model.to_dict()["max_model_len"]) == ("tiny", 4096)
    assert live.client().models.retrieve("tiny").id == "tiny"
    for path in ("/health", "/ready", "/version", "/metrics"):
        assert live.send("GET", path)[0] == 200
        status, _, body = live.send("HEAD", path)
        assert (status, body) == (200, b"")
    assert b"kvgate_requests_total" in live.send("GET", "/metrics")[2]


def test_chat_stream_and_whole_answer_are_the_same_text(live: Live) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": SAY, "max_tokens": 20, "temperature": 0}
    whole = live.client().chat.completions.create(**ask)
    chunks = list(live.client().chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens == len("[user]Say hi.\n[assistant]")


def test_streams_end_with_done(live: Live) -> None:
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 3, "stream": True}
    status, headers, raw = live.send("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = [line for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-1])


def test_content_parts_developer_and_null_fields(live: Live) -> None:
    plain = [{"role": "system", "content": "Be brief."}, *SAY]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]},
    ]
    answers = []
    for messages in (plain, parts):
        body = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "temperature": 0, "stop": None}
        body |= {"tools": None, "logit_bias": None, "user": None, "seed": None, "response_format": {"type": "text"}}
        status, _, raw = live.send("POST", "/v1/chat/completions", body)
        assert status == 200, raw
        answers.append(json.loads(raw)["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]


def test_the_same_seed_gives_the_same_tokens_whatever_else_runs(live: Live) -> None:
    def ask(seed: int, prompt: str = "once upon") -> str:
        found = live.client().completions.create(
            model="tiny", prompt=prompt, max_tokens=40, temperature=1.0, seed=seed, top_p=0.95
        )
        return found.choices[0].text

    alone = ask(5)
    with ThreadPoolExecutor(12) as pool:
        noise = [pool.submit(ask, i, "x" * (7 * i + 1)) for i in range(9)]
        crowded = [pool.submit(ask, 5) for _ in range(3)]
        assert [each.result() for each in crowded] == [alone] * 3
        assert len({each.result() for each in noise}) == 9
    assert ask(6) != alone


def test_n_answers_count_the_prompt_once_and_differ(live: Live) -> None:
    found = live.client().completions.create(model="tiny", prompt="abc", max_tokens=16, n=3, seed=1, logit_bias=NO_END)
    assert [c.index for c in found.choices] == [0, 1, 2]
    assert len({c.text for c in found.choices}) == 3
    assert found.usage.prompt_tokens == 3
    assert found.usage.completion_tokens == 48
    one = live.client().completions.create(model="tiny", prompt="abc", max_tokens=16, seed=2, logit_bias=NO_END)
    assert one.choices[0].text == found.choices[1].text, "the seed counts up"


def test_stop_texts_end_answers_and_are_not_part_of_them(live: Live) -> None:
    text = greedy(live, "stop here", 40).choices[0].text
    stop = text[7:10]
    cut = greedy(live, "stop here", 40, stop=[stop, "never ever"])
    assert cut.choices[0].text == text[: text.find(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 40


def test_cached_tokens_are_true_and_belong_to_the_tenant(live: Live) -> None:
    prompt = "shared prefix " * 20
    first, second = greedy(live, prompt), greedy(live, prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt) // 16 * 16
    assert first.choices[0].text == second.choices[0].text
    letter = str(live.service.model.tokenizer.encode("a")[0])
    answer = greedy(live, prompt, 40, logit_bias={letter: 100}).choices[0].text
    assert answer == "a" * 40
    longer = greedy(live, prompt + answer + " and on")
    assert longer.usage.prompt_tokens_details.cached_tokens > len(prompt) // 16 * 16, "the answer is cached as well"


def test_chat_log_probabilities(live: Live) -> None:
    found = live.client().chat.completions.create(
        model="tiny", messages=SAY, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = found.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(top.logprob for top in token.top_logprobs), "greedy takes the likeliest"
    assert (
        bytes(b for token in content for b in token.bytes).decode(errors="replace") == found.choices[0].message.content
    )


def test_echo_scores_token_ids_as_evaluation_harnesses_ask(live: Live) -> None:
    ids = [10, 20, 30, 40]
    found = greedy(live, [ids, ids[:3]], 1, logprobs=1, echo=True)
    (first, second) = found.choices
    assert first.logprobs.token_logprobs[0] is None
    assert len(first.logprobs.token_logprobs) == 5
    assert first.logprobs.token_logprobs[1:3] == pytest.approx(second.logprobs.token_logprobs[1:3], abs=1e-5)
    for own, top in zip(first.logprobs.token_logprobs[1:], first.logprobs.top_logprobs[1:], strict=True):
        assert own in top.values(), "the chosen token is among them"
        assert 1 <= len(top) <= 2
    none = greedy(live, [ids], 0, logprobs=1, echo=True).choices[0]
    assert len(none.logprobs.tokens) == 4
    assert none.text == live.service.model.tokenizer.decode(ids)


def test_every_answer_says_how_it_was_made(live: Live) -> None:
    raw = live.client().completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=2)
    assert raw.headers["x-kvgate-arm"] == raw.headers["x-kvgate-policy"] == "exact"
    assert raw.headers["x-request-id"]
    usage = raw.parse().usage.to_dict()
    assert usage["kvgate"] == {"arm": "exact", "policy": "exact", "weights": live.service.model.info.weights_hash}


BAD = [
    ({"model": "other", "prompt": "a"}, 404, "model"),
    ({"prompt": "a"}, 400, "model"),
    ({"model": "tiny"}, 400, "prompt"),
    ({"model": "tiny", "prompt": []}, 400, "prompt"),
    ({"model": "tiny", "prompt": ""}, 400, "prompt"),
    ({"model": "tiny", "prompt": [1, "a"]}, 400, "prompt"),
    ({"model": "tiny", "prompt": [99999]}, 400, "prompt"),
    ({"model": "tiny", "prompt": "a", "max_tokens": -5}, 400, "max_tokens"),
    ({"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"model": "tiny", "prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    ({"model": "tiny", "prompt": "a", "temperature": 3}, 400, "temperature"),
    ({"model": "tiny", "prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ({"model": "tiny", "prompt": "a", "top_p": -1}, 400, "top_p"),
    ({"model": "tiny", "prompt": "a", "n": 0}, 400, "n"),
    ({"model": "tiny", "prompt": "a", "n": 65}, 400, "n"),
    ({"model": "tiny", "prompt": "a", "logprobs": 99}, 400, "logprobs"),
    ({"model": "tiny", "prompt": "a", "stop": [""]}, 400, "stop"),
    ({"model": "tiny", "prompt": "a", "stop": 7}, 400, "stop"),
    ({"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    ({"model": "tiny", "prompt": "a", "logit_bias": {"5000": 1}}, 400, "logit_bias"),
    ({"model": "tiny", "prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"model": "tiny", "prompt": "a", "best_of": 3}, 400, "best_of"),
    ({"model": "tiny", "prompt": "a", "suffix": "z"}, 400, "suffix"),
    ({"model": "tiny", "prompt": "a", "metadata": {"a": 1}}, 400, "metadata"),
    ({"model": "tiny", "prompt": "a", "min_tokens": 3}, 400, "min_tokens"),
    ({"model": "tiny", "prompt": "a" * 5000}, 400, "prompt"),
    ({"model": "tiny", "prompt": "a", "max_tokens": 5000}, 400, "prompt"),
]


@pytest.mark.parametrize(("body", "status", "param"), BAD)
def test_bad_requests_are_named(live: Live, body: dict[str, Any], status: int, param: str) -> None:
    found, _, raw = live.send("POST", "/v1/completions", body)
    error = json.loads(raw)["error"]
    assert (found, error["param"]) == (status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]


BAD_CHATS: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ([7], "messages[0]"),
]


@pytest.mark.parametrize(("messages", "param"), BAD_CHATS)
def test_bad_messages_are_named(live: Live, messages: Any, param: str) -> None:
    status, _, raw = live.send("POST", "/v1/chat/completions", {"model": "tiny", "messages": messages})
    assert (status, json.loads(raw)["error"]["param"]) == (400, param)


def test_unsupported_features_are_refused_not_ignored(live: Live) -> None:
    for extra in ({"tools": [{"type": "function"}]}, {"response_format": {"type": "json_object"}}, {"guided": 1}):
        status, _, raw = live.send("POST", "/v1/chat/completions", {"model": "tiny", "messages": SAY, **extra})
        assert status == 400
        assert json.loads(raw)["error"]["param"] == next(iter(extra))


def test_no_such_path_and_method_have_openai_bodies(live: Live) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        found, _, raw = live.send(method, path)
        assert found == status
        assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}


def test_a_body_of_10_mb_is_refused_announced_or_not(live: Live) -> None:
    big = b'{"model": "tiny", "prompt": "' + b"a" * 10_000_000 + b'"}'
    assert live.send("POST", "/v1/completions", big)[0] == 413
    chunks = (big[i : i + 100_000] for i in range(0, len(big), 100_000))
    assert _chunked(live, chunks) in (413, None), "refused, or closed while it was being sent"


def _chunked(live: Live, chunks: Any) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=30)
    try:
        connection.request("POST", "/v1/completions", chunks, encode_chunked=True)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_tokenize(live: Live) -> None:
    found = json.loads(live.send("POST", "/tokenize", {"model": "tiny", "prompt": "abc"})[2])
    assert found == {"tokens": live.service.model.tokenizer.encode("abc"), "count": 3, "max_model_len": 4096}
    chat = json.loads(live.send("POST", "/tokenize", {"messages": SAY})[2])
    assert chat["count"] == len("[user]Say hi.\n[assistant]")
    assert live.send("POST", "/tokenize", {"prompt": "a", "messages": SAY})[0] == 400


def test_a_deadline_ends_a_request(live: Live) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 4000, "temperature": 0, "logit_bias": NO_END}
    status, _, raw = live.send("POST", "/v1/completions", body, {"x-request-deadline-ms": "300"})
    assert (status, json.loads(raw)["error"]["code"]) == (408, "timeout")
    assert live.send("POST", "/v1/completions", body, {"x-request-deadline-ms": "soon"})[0] == 400
    live.audit()


def test_many_at_once_get_what_they_get_alone(live: Live) -> None:
    prompts = [f"number {i} " * (1 + i % 5) for i in range(24)]
    alone = [greedy(live, prompt, 10).choices[0].text for prompt in prompts]
    found: list[str] = [""] * len(prompts)

    def ask(i: int) -> None:
        found[i] = greedy(live, prompts[i], 10).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == alone
    live.audit()
