"""LongBench v2 (Bai et al. 2024, arXiv:2412.15204): four choices over very long contexts, code repositories too."""

from __future__ import annotations

from typing import ClassVar

from kvgate.evals.data.items import Choice, Item, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field

LETTERS = "ABCD"


class HubLongBench2(HubSuite):
    """503 multiple-choice questions, 8k to 2M words."""

    name = "longbench2"
    measures = "Multiple-choice questions over books, papers, dialogues and code that want the whole context."
    why_eviction_hurts = "Evidence is spread over hundreds of pages; no local window holds it."
    floor = 0.35  # chance is 0.25, and human experts reach 0.54 (the paper's abstract)
    tasks: ClassVar = {"all": "every domain"}
    source = Source(
        repo="zai-org/LongBench-v2",
        revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        licence="apache-2.0",
        files={"all": "data.json"},
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """The four letters by likelihood."""
        context, answer = field(row, "context"), field(row, "answer")
        if answer not in LETTERS or len(answer) != 1:
            raise ValueError(f"field 'answer' is {answer!r}; expected one of A, B, C, D")
        choices = "\n".join(f"({letter}) {field(row, f'choice_{letter}')}" for letter in LETTERS)
        question = f"{field(row, 'question')}\n{choices}"
        turn = Turn(
            prompt=tokens.join("\n\n", question, tokens.chat.speak, "The correct answer is ("),
            scoring=Choice(tuple(tokens.encode(letter) for letter in LETTERS), LETTERS.index(answer)),
            label="question",
        )
        return Item(
            suite=self.name,
            task=str(row.get("domain", task)),
            index=0,
            length=0,
            context=tokens.chat.start() + tokens.fresh(context),
            turns=(turn,),
            cluster=cluster(task, context),
            meta={"gold": answer, "id": str(row.get("_id", "")), "difficulty": str(row.get("difficulty", ""))},
        )
