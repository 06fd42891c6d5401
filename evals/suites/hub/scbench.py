"""SCBench (Li et al. 2024, arXiv:2412.10319): several turns over one shared context."""

from __future__ import annotations

from typing import Any, ClassVar

from kvgate.evals.data.items import Answer, Exact, Item, Overlap, Recall, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field, texts

EXACT = ("kv", "prefix_suffix", "mf", "many_shot", "choice_eng")
LISTED = ("vt",)
GRADED = ("qa_eng",)
# Answers that are long random strings; as in the authors' eval_utils.py (DATA_NAME_TO_MAX_NEW_TOKENS).
LONG = {"kv": 150, "prefix_suffix": 150}


class HubSCBench(HubSuite):
    """Tasks with answers that can be compared; summaries and retrieved functions are left out."""

    name = "scbench"
    measures = "Key-value and string retrieval, tracing, choices and questions, turn after turn on one context."
    why_eviction_hurts = "The first turn may guide eviction; later turns ask for other parts of the same context."
    protocol = "multi_turn"
    floor = 0.3
    tasks: ClassVar = {
        **dict.fromkeys(EXACT, "exact match"),
        **dict.fromkeys(LISTED, "share of the names given"),
        **dict.fromkeys(GRADED, "F1 of words"),
    }
    source = Source(
        repo="microsoft/SCBench",
        revision="283310bb8c5ba6909dd9a6b1be087d2937f76f6d",
        licence="mit",
        files={task: f"data/scbench_{task}.jsonl" for task in (*EXACT, *LISTED, *GRADED)},
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """One item with a scored turn for each of the row's turns."""
        # vt calls its context input; mf's is a list of numbers, which the authors' templates print as one.
        context = str(field(row, "context" if "context" in row else "input", (str, list)))
        talk = field(row, "multi_turns", list)
        if not talk:
            raise ValueError("field 'multi_turns' is empty")
        turns = tuple(_turn(tokens, task, one, number) for number, one in enumerate(talk, 1))
        return Item(
            suite=self.name,
            task=task,
            index=0,
            length=0,
            context=tokens.chat.start() + tokens.fresh(context),
            turns=turns,
            cluster=cluster(task, context),
            protocol="multi_turn",
            meta={"gold": "; ".join(texts(one, "answer")[0] for one in talk), "id": str(row.get("id", ""))},
        )


def _turn(tokens: Tokens, task: str, row: Any, number: int) -> Turn:
    if not isinstance(row, dict):
        raise ValueError(f"field 'multi_turns': turn {number} is {type(row).__name__}")
    asked, answers = field(row, "input"), texts(row, "answer")
    options = [str(option) for option in row.get("options") or []]
    listed = "\n" + "\n".join(options) if options else ""
    scoring: Answer = Exact(answers)
    if task in GRADED:
        scoring = Overlap(answers, "f1")
    elif task in LISTED:
        scoring = Recall(answers)
    return Turn(
        prompt=tokens.join("\n\n" if number == 1 else (), asked + listed, tokens.chat.speak),
        scoring=scoring,
        max_new_tokens=LONG.get(task, 48),
        closing=tokens.chat.next_user,
        label=f"q{number}",
    )
