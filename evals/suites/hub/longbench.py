"""LongBench v1 (Bai et al. 2023, arXiv:2308.14508): the tasks whose metric needs no model and no ROUGE."""

from __future__ import annotations

from typing import ClassVar

from kvgate.evals.data.items import Exact, Item, Overlap, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field, texts

QA = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa")
LABELS = ("trec", "passage_count", "passage_retrieval_en")
CODE = ("lcc", "repobench-p")


class HubLongBench(HubSuite):
    """English question answering, labels, and code completion. Summaries are left out: no metric here judges them."""

    name = "longbench"
    measures = "Question answering, retrieval of a passage, labels and code completion over long real documents."
    why_eviction_hurts = "Answers rest on a few sentences or definitions of a long document that nothing points to yet."
    floor = 0.3  # F1 and edit similarity are graded, and good models reach 0.4 to 0.6
    tasks: ClassVar = {
        **dict.fromkeys(QA, "question answering, F1 of words"),
        **dict.fromkeys(LABELS, "exact label"),
        **dict.fromkeys(CODE, "next line of code, edit similarity"),
    }
    source = Source(
        repo="zai-org/LongBench",
        revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        licence="MIT (repository); each source data set has its own",
        files={task: f"data.zip/data/{task}.jsonl" for task in (*QA, *LABELS, *CODE)},
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """Code goes in as plain text, everything else through the chat template."""
        context, asked, answers = field(row, "context"), field(row, "input"), texts(row, "answers")
        if task in CODE:
            start, prompt = tokens.bos, tokens.fresh(asked or "\n")
        else:
            start = tokens.chat.start()
            prompt = tokens.join("\n\n", "Answer in a few words. " + asked, tokens.chat.speak)
        turn = Turn(
            prompt=prompt,
            scoring=Exact(answers) if task in LABELS else Overlap(answers, "edit" if task in CODE else "f1"),
            max_new_tokens=64 if task in CODE else 32,
            stop=tokens.line_ends,
            label="question",
        )
        return Item(
            suite=self.name,
            task=task,
            index=0,
            length=0,
            context=start + tokens.fresh(context),
            turns=(turn,),
            cluster=cluster(task, context),
            meta={"gold": answers[0], "id": str(row.get("_id", ""))},
        )
