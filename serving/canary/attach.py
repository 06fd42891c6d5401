"""Puts a canary into a service."""

from __future__ import annotations

import time
from pathlib import Path

from kvgate.engine.models import LoadedModel
from kvgate.engine.serving import Server
from kvgate.serving.canary.controller import Controller
from kvgate.serving.canary.journal import Journal
from kvgate.serving.canary.outcomes import Outcomes
from kvgate.serving.canary.router import CanaryRouter
from kvgate.serving.canary.settings import Canary
from kvgate.serving.driver import Driver
from kvgate.serving.metrics import ArmMetrics


def make_router(
    canary: Canary, model: LoadedModel, folder: Path, outcomes: Outcomes, metrics: ArmMetrics
) -> CanaryRouter:
    """A router whose journal lies in ``folder``. ValueError where the verdict covers nothing that this server does."""
    canary.scope.refuse(model.info.weights_hash)
    controller = Controller(canary.judge, Journal(folder), canary.verdict, time.time(), canary.label)

    def text_of(tokens: tuple[int, ...]) -> str:
        text: str = model.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return CanaryRouter(canary, controller, outcomes, metrics, text_of)


def withdraw(driver: Driver) -> None:
    """The policy was rolled back: requests on their way finish exact where nothing of theirs was evicted yet."""

    def back() -> None:
        for job in driver.jobs():
            served = job.served
            if served is None or served.policy is None or served.state.ended:
                continue
            if not served.switched:
                served.policy = None
            else:
                _to_exact(driver.server, job.spec.id)

    driver.call(back)


def _to_exact(server: Server, id: str) -> None:
    slot = server.manager.requests.index.get(id)
    row = server.store.rows.get(slot) if slot is not None else None
    if slot is None or row is None or row.evicted or row.policy is None or row.tainted:
        return  # its exact pages are gone: it ends as it began
    server.requests[id].policy = None
    server.engine.switch(row, None)
    server.manager.hold_to(slot, 0)
