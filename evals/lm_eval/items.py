"""lm-eval requests as items: token ids, what is evicted, what is asked. Nothing is ever cut.

What is evicted. Both kinds of request follow the ``whole_prompt`` protocol: the context (few-shot examples, document
and question) is prefilled exactly, but for its last token; the policy evicts; the last token is fed; and from there

- ``loglikelihood``: every continuation is fed whole on a fork of its own and scored teacher-forced. Holding the last
  token back matters: otherwise the first token of a continuation, often the only one, would come from the exact
  prefill, and eviction could not be seen at all;
- ``generate_until``: greedy decoding, with eviction after every token, until a stop text, an end-of-sequence token or
  ``max_gen_toks`` tokens.

Requests with the same context belong to one item, so that they share its prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvgate.evals.data.items import External, Ids, Item, Turn

MADE_BY = "lm_eval"  # option that marks a plan's suites as lm-eval's tasks; its value is lm-eval's version
DEFAULT_MAX_GEN_TOKS = 256  # lm-eval's own
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = frozenset({"do_sample", "temperature", "top_p", "top_k", "min_p"})  # on greedy decoding


@dataclass(frozen=True)
class Origin:
    """Where a request comes from, for names and errors."""

    task: str
    document: int

    @staticmethod
    def of(request: Any) -> Origin:
        """Of an lm-eval ``Instance``; requests made by hand have no task."""
        return Origin(request.task_name or "lm_eval", request.doc_id or 0)


@dataclass(frozen=True)
class Generation:
    """Generation arguments that greedy decoding can honour."""

    until: tuple[str, ...]
    limit: int

    @staticmethod
    def parse(given: Mapping[str, Any], origin: Origin) -> Generation:
        """ValueError naming the task and an argument that cannot be honoured."""
        where = f"task {origin.task}: generation argument"
        if given.get("do_sample") or float(given.get("temperature") or 0.0) > 0.0:
            raise ValueError(f"{where} do_sample/temperature asks for sampling; kvgate decodes greedily, set both to 0")
        known = {*_LIMITS, *_WITHOUT_EFFECT, "until"}
        for name in given:
            if name not in known:
                raise ValueError(f"{where} {name} is not supported; known: {', '.join(sorted(known))}")
        until = given.get("until") or []
        limits = [given[name] for name in _LIMITS if given.get(name) is not None]
        limit = int(limits[0]) if limits else DEFAULT_MAX_GEN_TOKS
        if limit < 1:
            raise ValueError(f"{where} max_gen_toks is {limit}; use at least 1")
        return Generation(tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop), limit)


class DoesNotFit(ValueError):
    """A request that the model cannot be asked; the message names its document."""


def likelihood_items(
    requests: Sequence[tuple[Origin, Ids, Ids]], longest: int
) -> tuple[list[Item | DoesNotFit], list[int]]:
    """One item a context, or why there is none, and for each request the place of its item.

    ``requests``: origin, context, continuation.
    """
    groups: dict[tuple[Origin, Ids], list[Ids]] = {}
    for origin, context, continuation in requests:
        candidates = groups.setdefault((origin, context), [])
        if continuation not in candidates:
            candidates.append(continuation)
    items: list[Item | DoesNotFit] = []
    for (origin, context), found in groups.items():
        try:
            items.append(_item(origin, context, External(tuple(found)), 1, (), longest))
        except DoesNotFit as error:
            items.append(error)
    place = {key: index for index, key in enumerate(groups)}
    return items, [place[origin, context] for origin, context, _ in requests]


def generation_item(origin: Origin, context: Ids, wanted: Generation, longest: int) -> Item:
    """The item of one ``generate_until`` request. DoesNotFit if the model cannot be asked."""
    return _item(origin, context, External(), wanted.limit, wanted.until, longest)


def _item(origin: Origin, context: Ids, scoring: External, limit: int, until: tuple[str, ...], longest: int) -> Item:
    if not context:
        raise DoesNotFit(f"task {origin.task}, document {origin.document}: its prompt is empty, and has no BOS or EOS")
    item = Item(
        suite=origin.task,
        task=origin.task,
        index=origin.document,
        length=len(context),
        context=context[:-1],
        turns=(Turn(context[-1:], scoring, max_new_tokens=limit, until=until),),
        cluster=f"{origin.task}-{origin.document}",
        protocol="whole_prompt",
    )
    if item.longest > longest:
        raise DoesNotFit(
            f"task {origin.task}, document {origin.document}: needs {item.longest} positions ({len(context)} of "
            f"prompt), the model has {longest}; kvgate never cuts a prompt: lower max_gen_toks or the examples, "
            "or leave such documents out"
        )
    return item
