"""RULER (Hsieh et al. 2024, arXiv:2404.06654) as prepared for compression benchmarks: question apart from context."""

from __future__ import annotations

from typing import ClassVar

from kvgate.evals.data.items import Exact, Item, Recall, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field, texts

MAX_NEW = 128


class HubRuler(HubSuite):
    """One configuration per length; all of RULER's tasks are in each."""

    name = "hub_ruler"
    measures = "RULER's thirteen tasks at 4k to 16k tokens, the question after the context."
    why_eviction_hurts = "The question is not known at eviction; needles and chains are dropped unread."
    tasks: ClassVar = {size: f"contexts of up to {size} tokens" for size in ("4096", "8192", "16384")}
    optional = frozenset({"8192", "16384"})
    source = Source(
        repo="simonjegou/ruler",
        revision="24adceac8a0e6532936e8d721cd9e9084d2e4686",
        licence="not stated; RULER's own code is Apache-2.0",
        files={size: f"{size}/test-*.parquet" for size in ("4096", "8192", "16384")},
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """Question answering wants one of the answers, all other tasks all of them (RULER's string_match)."""
        context, kind, answers = field(row, "context"), field(row, "task"), texts(row, "answer")
        prefix = field(row, "answer_prefix").rstrip()
        turn = Turn(
            prompt=tokens.join("\n\n", field(row, "question"), tokens.chat.speak, prefix),
            scoring=Exact(answers) if kind.startswith("qa") else Recall(answers),
            max_new_tokens=min(MAX_NEW, field(row, "max_new_tokens", int)),
            label="question",
        )
        return Item(
            suite=self.name,
            task=kind,
            index=0,
            length=0,
            context=tokens.chat.start() + tokens.fresh(context),
            turns=(turn,),
            cluster=cluster(kind, context),
            meta={"gold": "; ".join(answers)},
        )
