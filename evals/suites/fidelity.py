"""The fidelity suite: how far a policy's predictions are from the exact run's, along the exact run's own answers."""

from __future__ import annotations

from itertools import accumulate
from typing import ClassVar

from kvgate.evals.data.corpus import fingerprint, lay, library_files, library_root, prose
from kvgate.evals.data.items import Fidelity, Ids, Item, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import Generated, GroupSpec

OPENING = 8  # ids of the text that are fed after the eviction, so that the first prediction already feels it
CHARACTERS = 12  # of source code that surely hold a token


class FidelitySuite(Generated):
    """Continuing text and code, and summing up, with every policy fed what the exact run writes."""

    name = "fidelity"
    measures = (
        "Top-1 agreement with the exact run at every position of the exact run's own answer (teacher forcing), "
        "KL(exact || policy) in nats at each, and where the first difference stands. No task, no right answer."
    )
    why_eviction_hurts = (
        "Any token that mattered and is gone moves the distribution over the next one. This shows losses that a task "
        "score hides, and changes that no task would mind: a policy can disagree without being worse, so read it "
        "beside the other suites. The exact run agrees with itself, so its floor is met by construction."
    )
    tasks: ClassVar = {
        "continue": "prose goes on where the context ends",
        "code": "a file of the standard library goes on where the context ends",
        "summary": "a summary of the context, asked for after it was evicted",
    }
    options: ClassVar = {"new_tokens": 64}

    @classmethod
    def has_depth(cls, task: str) -> bool:
        """Nothing is asked for, so nothing stands anywhere."""
        return False

    @classmethod
    def has_source(cls, task: str) -> bool:
        """Code comes from files; the clusters of the other tasks are made contexts."""
        return task == "code"

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item with one turn of at most ``new_tokens`` tokens."""
        wanted = group.options["new_tokens"]
        if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
            raise ValueError(f"suite fidelity: new_tokens {wanted!r}; use a whole number from 1")
        if group.task == "summary":
            context, prompt, source = self._summary(tokens, group)
        else:
            text, source = _code(tokens, group) if group.task == "code" else _prose(tokens, group)
            context, prompt = text[:-OPENING], text[-OPENING:]
        return [
            Item(
                suite=self.name,
                task=group.task,
                index=group.index,
                length=group.length,
                context=context,
                turns=(Turn(prompt, Fidelity(), max_new_tokens=wanted, label=group.task),),
                cluster=f"{group.task}-{group.length}-{group.index}" if group.task != "code" else source,
                meta={"source": f"{source}, {fingerprint()}"},
            )
        ]

    def _summary(self, tokens: Tokens, group: GroupSpec) -> tuple[Ids, Ids, str]:
        head = tokens.join(tokens.chat.start(), "Read this text.\n")
        question = tokens.join("\n\n", "Say in a few sentences what the text above is about.", tokens.chat.speak)
        return head + _text(tokens, group, group.length - len(head)), question, "prose"


def _prose(tokens: Tokens, group: GroupSpec) -> tuple[Ids, str]:
    room = group.length + OPENING - len(tokens.bos)
    return tokens.bos + _text(tokens, group, room), "prose"


def _text(tokens: Tokens, group: GroupSpec, room: int) -> Ids:
    """``room`` ids of prose that ends behind any sentence: two items from one passage are still two texts."""
    pieces = prose(tokens, group.rng, 2 * room)
    ends = [end for end, size in enumerate(accumulate(map(len, pieces)), 1) if size >= room]
    return lay(pieces[: group.rng.choice(ends)], [], room).ids


def _code(tokens: Tokens, group: GroupSpec) -> tuple[Ids, str]:
    """A stretch of a file that is long enough, from the start of a line on."""
    room = group.length + OPENING - len(tokens.bos)
    size = CHARACTERS * room
    long_enough = [file for file in library_files() if file.stat().st_size > 2 * size]
    if not long_enough:
        raise ValueError(f"suite fidelity: no file of the standard library has {room} tokens; ask for a shorter length")
    file = group.rng.choice(long_enough)
    text = file.read_text("utf-8", errors="replace")
    start = text.rfind("\n", 0, group.rng.randrange(max(1, len(text) - size)) + 1) + 1
    ids = tokens.fresh(text[start : start + size])[:room]
    if len(ids) < room:
        raise ValueError(f"suite fidelity: {file.name} has fewer than {room} tokens in {size} characters")
    return tokens.bos + ids, file.relative_to(library_root()).as_posix()
