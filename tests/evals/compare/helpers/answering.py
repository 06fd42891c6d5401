"""A small HTTP server with OpenAI's protocol whose model looks up what a prompt says. One token is one byte."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SAID = re.compile(r"The magic number of the ([a-z ]+) is (\d+)")


class Model:
    """Answers the last question of a prompt by what stands in it.

    Args:
        window: the model sees only this many last characters of a prompt; 0: all of them.
        limit: longer prompts are cut on the left without a word, as some servers do; 0: none.
        fails: told the number of the request, whether it is answered with 503.
        wander: answers differ from call to call.
    """

    def __init__(
        self,
        window: int = 0,
        limit: int = 0,
        fails: Callable[[int], bool] = lambda number: False,
        wander: bool = False,
    ) -> None:
        self.window, self.limit, self.fails, self.wander = window, limit, fails, wander
        self.requests = 0

    def answer(self, prompt: str) -> str:
        seen = prompt[-self.window :] if self.window else prompt
        asked = SAID.pattern.split(" is ")[0].replace("([a-z ]+)", "")
        name = prompt[prompt.rindex(asked) + len(asked) :].split(" is")[0].split("?")[0].rstrip('"')
        known = dict(SAID.findall(seen))
        if self.wander and self.requests % 2:
            return " 11111."
        return f" {known.get(name, '99999')}."


@contextmanager
def served(model: Model) -> Iterator[str]:
    """The server's address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            body = {"data": [{"id": "m", "object": "model", "created": 0, "owned_by": "t"}], "object": "list"}
            self.say(200, body if self.path == "/v1/models" else {"version": "0"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                return self.say(200, {"tokens": list(body["prompt"].encode())})
            if self.path == "/detokenize":
                return self.say(200, {"prompt": bytes(body["tokens"]).decode()})
            model.requests += 1
            if model.fails(model.requests):
                return self.say(503, {"error": {"message": "busy"}})
            chat = self.path.endswith("chat/completions")
            prompt = body["messages"][-1]["content"] if chat else body["prompt"]
            if chat:
                prompt = "\n".join(message["content"] for message in body["messages"])
            text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
            text = text[-model.limit :] if model.limit else text
            usage = {"prompt_tokens": len(text.encode()), "completion_tokens": 1, "total_tokens": 1}
            said = model.answer(text)
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
            choice |= {"message": {"role": "assistant", "content": said}} if chat else {"text": said}
            kind = "chat.completion" if chat else "text_completion"
            return self.say(
                200, {"id": "1", "object": kind, "created": 0, "model": "m", "choices": [choice], "usage": usage}
            )

        def say(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
