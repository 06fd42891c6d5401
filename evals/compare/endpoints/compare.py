"""``kvgate compare --exact URL --candidate URL``: the suites of a plan, asked of two endpoints, judged by its gate.

Every item is asked of both sides one after the other; a share of them is asked of the exact side twice, for the noise
of that engine. Where it disagrees with itself by more than the margin, the verdict is inconclusive by name.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgate.evals.compare.endpoints.answers import ANSWERS, AnswerFile, AnswerRecord, Side
from kvgate.evals.compare.endpoints.asking import Asker, takes_ids
from kvgate.evals.compare.endpoints.client import Endpoint, EndpointClient
from kvgate.evals.compare.endpoints.collect import collect, questions
from kvgate.evals.compare.endpoints.conversation import askable
from kvgate.evals.compare.endpoints.noise import Noise, noise_of, sample_size
from kvgate.evals.compare.endpoints.tokenizing import EndpointTokenizer, MessageTokens
from kvgate.evals.compare.endpoints.verdict import EndpointVerdict, judge_endpoints
from kvgate.evals.data.items import Item, digest
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.judge.columns import Pair
from kvgate.evals.judge.gates import Gate, load_gate
from kvgate.evals.log.run_folder import write_json
from kvgate.evals.plan.config import RunConfig

SCHEMA_VERSION = 1
MANIFEST, RESULT = "compare.json", "comparison.json"
LEAST_TWICE = 20  # items asked of the exact side twice, if there are as many


@dataclass(frozen=True)
class Settings:
    """How to ask.

    Attributes:
        tokenizer: folder, hub id or "embedded"; None: the endpoints' own, by ``/tokenize``.
        concurrency: requests at once, over both sides.
        noise_share: share of the items that the exact side is asked twice.
        flags: what the user says of the candidate's engine (its command line, for example); recorded as given.
    """

    tokenizer: str | None = None
    concurrency: int = 4
    noise_share: float = 0.1
    flags: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 256:
            raise ValueError(f"--concurrency {self.concurrency}: use 1 to 256")
        sample_size(1, self.noise_share, 1)


@dataclass(frozen=True)
class Engine:
    """What an endpoint says of itself; "" where it says nothing."""

    url: str
    model: str
    api: str
    version: str
    flags: str = ""


@dataclass(frozen=True)
class EndpointComparison:
    """The verdict, what it rests on, and which engines it is of.

    ``unchecked``: answers whose endpoint did not count the prompt, so that a cut prompt would not be seen.
    ``left_out``: tasks that need likelihoods, which no endpoint is asked for.
    """

    verdict: EndpointVerdict
    noise: Noise
    exact: Engine
    candidate: Engine
    left_out: tuple[str, ...]
    unchecked: int
    plan: str
    identity: str
    schema_version: int = SCHEMA_VERSION


def compare_endpoints(
    config: RunConfig,
    exact: Endpoint,
    candidate: Endpoint,
    settings: Settings,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    gate: Gate | None = None,
) -> EndpointComparison:
    """Ask what is not answered yet, judge, and write ``comparison.json``.

    Raises:
        ValueError: an endpoint that is not there or cuts prompts, a folder of another comparison, or answers that are
            missing after all retries; those that came are kept, and the same command goes on with the rest.
    """
    chosen = gate or load_gate(config.gate)
    clients = {"exact": EndpointClient(exact), "candidate": EndpointClient(candidate)}
    tokens = _tokens(clients, settings, exact.api)
    items, left_out = _items(config, tokens)
    twice = sample_size(len(items), settings.noise_share, LEAST_TWICE)
    identity = _identity(config, items, clients, settings)
    _open(out, identity, config, settings)
    answers = AnswerFile(out / ANSWERS)
    askers = {side: Asker(client, tokens, takes_ids(client, items[0].context)) for side, client in clients.items()}
    sides: dict[Side, Asker] = {
        "exact": askers["exact"], "candidate": askers["candidate"], "exact_again": askers["exact"]
    }  # fmt: skip
    asked = collect(questions(items, twice), sides, answers, settings.concurrency, progress)
    if asked.failures:
        missing = 2 * len(items) + twice - len(answers.records)
        raise ValueError(
            f"{missing} answers are missing, none of them was scored; {asked.failures[0][:300]}; run the same command "
            "again to ask for the rest"
        )
    noise = _noise(items[:twice], answers)
    result = EndpointComparison(
        verdict=_verdict(items, answers, chosen, noise),
        noise=noise,
        exact=_engine(clients["exact"], ""),
        candidate=_engine(clients["candidate"], settings.flags),
        left_out=left_out,
        unchecked=sum(turn.prompt_tokens is None for record in answers.records.values() for turn in record.turns),
        plan=config.name,
        identity=identity,
    )
    write_json(out / RESULT, _plain(asdict(result)))
    return result


def _tokens(clients: dict[str, EndpointClient], settings: Settings, api: str) -> Tokens:
    from kvgate.engine.tokenizer import load_tokenizer

    if settings.tokenizer is not None:
        tokenizer: Any = load_tokenizer(settings.tokenizer)
    else:
        tokenizer = EndpointTokenizer(clients["exact"])
    _same_ids(tokenizer, clients)
    return MessageTokens(tokenizer) if api == "chat" else Tokens(tokenizer)


def _same_ids(tokenizer: Any, clients: dict[str, EndpointClient]) -> None:
    """ValueError if an endpoint that can be asked encodes a text otherwise: lengths would not be what they are said."""
    text = "The magic number of the gentle river is 48213."
    wanted = list(tokenizer.encode(text, add_special_tokens=False))
    for client in clients.values():
        try:
            served = EndpointTokenizer(client).encode(text, add_special_tokens=False)
        except ValueError:
            continue
        if served != wanted:
            raise ValueError(
                f"endpoint {client.endpoint.url}: its tokenizer is another ({len(served)} tokens for {len(wanted)}); "
                "give --tokenizer of the served model, and compare endpoints of one model"
            )


def _items(config: RunConfig, tokens: Tokens) -> tuple[list[Item], tuple[str, ...]]:
    """The plan's items that can be asked, in an order drawn by its seed; and the tasks that cannot."""
    from kvgate.evals.run.prepare import build_items

    made = [item for choice in config.suites for item in build_items(choice, tokens, config)]
    items = [item for item in made if askable(item)]
    left_out = sorted({f"{item.suite}/{item.task}" for item in made} - {f"{i.suite}/{i.task}" for i in items})
    if not items:
        raise ValueError(f"plan {config.name}: all its tasks need likelihoods; choose suites that generate answers")
    random.Random(f"{config.seed}/order").shuffle(items)
    return items, tuple(left_out)


def _identity(config: RunConfig, items: Sequence[Item], clients: dict[str, EndpointClient], settings: Settings) -> str:
    """Of everything that decides the answers but the endpoints' own doing."""
    asked = {side: [client.endpoint.root, client.model, client.endpoint.api] for side, client in clients.items()}
    hashes = [item.item_hash for item in items]
    return digest([SCHEMA_VERSION, config.name, hashes, asked, settings.noise_share, settings.flags])


def _open(out: Path, identity: str, config: RunConfig, settings: Settings) -> None:
    path = out / MANIFEST
    if path.exists():
        try:
            known = json.loads(path.read_text(encoding="utf-8")).get("identity")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: not a comparison's manifest; choose another folder with --out") from error
        if known != identity:
            raise ValueError(f"{out}: holds another comparison (plan, endpoints or models); choose another --out")
        return
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty and holds no comparison; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {"schema_version": SCHEMA_VERSION, "identity": identity, "plan": config.name, "settings": asdict(settings)},
    )


def _noise(items: Sequence[Item], answers: AnswerFile) -> Noise:
    first = [answers.records["exact", item.item_hash] for item in items]
    again = [answers.records["exact_again", item.item_hash] for item in items]
    return noise_of(first, again)


def _verdict(items: Sequence[Item], answers: AnswerFile, gate: Gate, noise: Noise) -> EndpointVerdict:
    pairs = [
        _pair(item, answers.records["exact", item.item_hash], answers.records["candidate", item.item_hash], gate)
        for item in items
    ]
    return judge_endpoints(pairs, gate, noise)


def _pair(item: Item, exact: AnswerRecord, candidate: AnswerRecord, gate: Gate) -> Pair:
    return Pair(
        suite=item.suite,
        task=item.task,
        item=item.item_hash,
        cluster=item.cluster,
        exact=exact.score,
        policy=candidate.score,
        length=item.length,
        depth=gate.depth_bin(item.depth),
        exact_tokens=_length(exact),
        policy_tokens=_length(candidate),
        context_tokens=len(item.context),
    )


def _length(record: AnswerRecord) -> int:
    """Words of the answers: endpoints count tokens of text that is cut off later."""
    return sum(len(turn.text.split()) for turn in record.turns)


def _engine(client: EndpointClient, flags: str) -> Engine:
    found = client.get("/version")
    version = json.dumps(found, sort_keys=True) if isinstance(found, dict) else ""
    if not version:
        props = client.get("/props")
        version = str(props.get("build_info", "")) if isinstance(props, dict) else ""
    return Engine(client.endpoint.root, client.model, client.endpoint.api, version, flags)


def _plain(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value
