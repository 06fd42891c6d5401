"""LongMemEval (Wu et al. 2024, arXiv:2410.10813): questions about a long history of chat sessions.

The files are the authors' cleaned release of September 2025, which replaces the first one. The paper's judge is a
model; here the answer is scored by F1 of words, so only questions with short factual answers are used, and abstention
questions are left out.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvgate.evals.data.items import Ids, Item, Overlap, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field, texts

JUDGED = "single-session-preference"


class HubLongMemEval(HubSuite):
    """Chat histories of one to five hundred sessions."""

    name = "longmemeval"
    measures = "Facts told, updated and spread over many earlier chat sessions, asked for at the end."
    why_eviction_hurts = "The sessions that matter are old, and nothing in the later ones refers to them."
    floor = 0.3
    tasks: ClassVar = {
        "oracle": "only the sessions that hold the evidence",
        "s": "about 40 sessions, 115k tokens",
        "m": "about 500 sessions",
    }
    optional = frozenset({"s", "m"})
    source = Source(
        repo="xiaowu0162/longmemeval-cleaned",
        revision="98d7416c24c778c2fee6e6f3006e7a073259d48f",
        licence="mit",
        files={
            "oracle": "longmemeval_oracle.json",
            "s": "longmemeval_s_cleaned.json",
            "m": "longmemeval_m_cleaned.json",
        },
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """The sessions as one conversation, then the question."""
        kind, answers = field(row, "question_type"), texts(row, "answer")
        history = _history(tokens, field(row, "haystack_sessions", list), field(row, "haystack_dates", list))
        question = f"Today is {field(row, 'question_date')}. {field(row, 'question')} Answer in a few words."
        identity = field(row, "question_id")
        return Item(
            suite=self.name,
            task=kind,
            index=0,
            length=0,
            context=history,
            turns=(Turn(tokens.join(question, tokens.chat.speak), Overlap(answers), 48, label="question"),),
            cluster=cluster(task, identity.removesuffix("_abs")),
            meta={"gold": answers[0], "id": identity},
        )

    def usable(self, row: Row) -> bool:
        """Neither an abstention question nor one whose answer is a description for a judge."""
        return not field(row, "question_id").endswith("_abs") and field(row, "question_type") != JUDGED


def _history(tokens: Tokens, sessions: list[Any], dates: list[Any]) -> Ids:
    """Ids up to the point where the user asks. Consecutive messages of one side are joined.

    Sessions come by date, each under its own, as in the authors' run_generation.py: many questions ask what came when.
    """
    if len(dates) != len(sessions):
        raise ValueError(f"field 'haystack_dates' has {len(dates)} entries for {len(sessions)} sessions")
    said: list[tuple[str, str]] = []
    for date, session in sorted(zip(dates, sessions, strict=True), key=lambda pair: str(pair[0])):
        for number, message in enumerate(session):
            role, text = field(message, "role"), field(message, "content")
            text = text if number else f"[{date}]\n{text}"
            if said and said[-1][0] == role:
                said[-1] = (role, said[-1][1] + "\n\n" + text)
            else:
                said.append((role, text))
    ids: list[int] = list(tokens.chat.start())
    if said and said[0][0] == "assistant":
        said.insert(0, ("user", "Hello."))
    for role, text in said:
        ids.extend(tokens.fresh(text))
        ids.extend(tokens.chat.scripted if role == "user" else tokens.chat.next_user)
    if said and said[-1][0] == "user":  # the question comes from the user, so an answer must come between
        ids.extend(tokens.join("Noted.", tokens.chat.next_user))
    return tuple(ids)
