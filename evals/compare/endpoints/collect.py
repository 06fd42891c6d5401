"""Asks both endpoints everything, a few items at a time. What fails is left for the next try, never scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from kvgate.evals.compare.endpoints.answers import AnswerFile, AnswerRecord, Side, make_record
from kvgate.evals.compare.endpoints.asking import Asker
from kvgate.evals.compare.endpoints.client import EndpointFailure
from kvgate.evals.data.items import Item

GIVE_UP = 10  # failures in a row: the endpoint is down, and every further request would wait through its retries


@dataclass(frozen=True)
class Question:
    """One item for one side."""

    side: Side
    item: Item


@dataclass(frozen=True)
class Collected:
    """How the asking went; ``failures`` name what got no answer, in order."""

    asked: int
    failures: tuple[str, ...]


def questions(items: Sequence[Item], twice: int) -> list[Question]:
    """Both sides of an item next to each other, so that slow drifts of a machine meet both; the first ones twice."""
    result = []
    for rank, item in enumerate(items):
        result += [Question("exact", item), Question("candidate", item)]
        if rank < twice:
            result.append(Question("exact_again", item))
    return result


def collect(
    wanted: Iterable[Question],
    askers: Mapping[Side, Asker],
    answers: AnswerFile,
    concurrency: int,
    progress: Callable[[int, int], None],
) -> Collected:
    """Ask what is not answered yet. Records are appended by this thread alone.

    Raises:
        ValueError: a prompt was cut.
    """
    every = list(wanted)
    todo = [each for each in every if (each.side, each.item.item_hash) not in answers.records]
    done, asked, in_a_row = len(every) - len(todo), 0, 0
    failures: list[str] = []
    queue = iter(todo)
    running: dict[Future[AnswerRecord], Question] = {}
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while len(running) < concurrency and in_a_row < GIVE_UP and (each := next(queue, None)) is not None:
                    running[pool.submit(_ask, askers[each.side], each)] = each
                if not running:
                    return Collected(asked, tuple(failures))
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    question = running.pop(future)
                    try:
                        answers.append(future.result())
                        done, asked, in_a_row = done + 1, asked + 1, 0
                    except EndpointFailure as failure:
                        failures.append(f"{question.side}: {failure}")
                        in_a_row += 1
                progress(done, len(every))
        finally:
            for future in running:
                future.cancel()


def _ask(asker: Asker, question: Question) -> AnswerRecord:
    return make_record(question.side, question.item.item_hash, asker.ask(question.item))
