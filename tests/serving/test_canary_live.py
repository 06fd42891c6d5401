"""A canary in a live server: shadows, verdicts, traffic, rollback; by HTTP and by the command line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from canary_file import canary_data
from live_server import Live

from kvgate.cli.main import main
from kvgate.engine.models import LoadedModel
from kvgate.evals.leaderboard.rollout import Rollout, Stage
from kvgate.serving.canary.journal import Journal
from kvgate.serving.canary.router import CanaryRouter
from kvgate.serving.canary.settings import Canary, load_canary, parse_canary

QUICK = Rollout(
    measure="agreement", stages=(Stage(0.3, 3), Stage(0.6, 3)), shadow_pairs=6, idle_s=0.05, watch_fraction=1.0,
    slice_margin=0.5,
)  # fmt: skip


def config(model: LoadedModel, **changes: Any) -> dict[str, Any]:
    return canary_data(model.info.weights_hash, model.info.dtype, **changes)


def canary(model: LoadedModel, rollout: Rollout = QUICK, margin: float = 0.5, ratio: float = 0.5) -> Canary:
    # A ratio of 1 is of the prompt; for a policy that never evicts, more tokens than the scope has.
    budget = {"ratio": ratio} if ratio < 1.0 else {"tokens": 601}
    raw = config(model, policy={"name": "h2o", "params": {}, "budget": budget})
    made = parse_canary(raw)
    return replace(made, judge=replace(made.judge, rollout=rollout, margin=margin))


def ask(live: Live, conversation: str, text: str = "tell me more about it", **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    headers = {"x-conversation-id": conversation}
    status, found, raw = live.send("POST", "/v1/chat/completions", {**body, **more}, headers)
    assert status == 200, raw
    answer = json.loads(raw)
    assert answer["usage"]["kvgate"]["arm"] == found["x-kvgate-arm"]
    assert answer["usage"]["kvgate"]["policy"] == found["x-kvgate-policy"]
    return found["x-kvgate-arm"], answer


def router(live: Live) -> CanaryRouter:
    found = live.service.router
    assert isinstance(found, CanaryRouter)
    return found


def in_canary(live: Live) -> str:
    """A conversation that is answered under the policy."""
    return next(f"c{i}" for i in range(99) if ask(live, f"c{i}", "hi")[0] == "canary")


def until(live: Live, reached: Callable[[], bool], most: int = 200) -> list[str]:
    """Ask one conversation after another until it is so; the arms that answered."""
    arms = []
    for i in range(most):
        if reached():
            return arms
        arms.append(ask(live, f"c{i}", "tell me more " * (1 + i % 3))[0])
        if i % 10 == 9:
            time.sleep(0.06)  # conversations fall idle
    progress = router(live).controller.progress
    raise AssertionError(f"not reached after {most}: {progress.place}, {progress.waiting()}, {progress.why}")


def test_shadows_leave_answers_exact_and_are_compared(tiny: LoadedModel, tmp_path: Path) -> None:
    with Live(tiny) as plain:
        exact = ask(plain, "c", "the same words")[1]["choices"]
    with Live(tiny, canary=canary(tiny), state=tmp_path) as live:
        arm, answer = ask(live, "c", "the same words")
        assert (arm, answer["usage"]["kvgate"]["policy"]) == ("shadow", "exact")
        assert answer["choices"] == exact
        live.audit()
        metrics = live.send("GET", "/metrics")[2].decode()
    assert 'kvgate_canary_state{policy="h2o@0.5",state="shadow"} 1.0' in metrics
    assert 'kvgate_answers_total{arm="shadow",state="finished"} 1.0' in metrics
    compared = [line for line in metrics.splitlines() if line.startswith("kvgate_compared_tokens_total")]
    assert sum(float(line.split()[-1]) for line in compared) == 12


def test_a_policy_within_its_margins_gets_traffic_and_says_so(tiny: LoadedModel, tmp_path: Path) -> None:
    # Everything is kept, so nothing can differ.
    lenient = replace(QUICK, limits=replace(QUICK.limits, slow_first_token=0.9, slow_between_tokens=0.9))
    with Live(tiny, canary=canary(tiny, lenient, ratio=1.0), state=tmp_path) as live:
        progress = router(live).controller.progress
        arms = until(live, lambda: progress.state == "canary")
        assert set(arms) == {"shadow"}
        arms = until(live, lambda: progress.stage == 1 or progress.state == "full")
        assert "canary" in arms
        live.audit()
        mine = in_canary(live)
        arm, answer = ask(live, mine)
        assert (arm, answer["usage"]["kvgate"]["policy"]) == ("canary", "h2o@601")
        assert progress.streams["quality"].mean == 0.0


def test_a_policy_that_loses_is_rolled_back_and_stays_away(
    tiny: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = canary(tiny, margin=0.01, ratio=0.1)
    with Live(tiny, canary=bad, state=tmp_path) as live:
        progress = router(live).controller.progress
        until(live, lambda: progress.state == "rolled_back")
        assert ask(live, "c1")[0] == "exact"
        live.audit()
    assert main(["canary", "status", str(tmp_path)]) == 0
    assert "h2o@0.1: rolled back, 0 % of traffic" in capsys.readouterr().out
    assert main(["canary", "promote", str(tmp_path), "--why", "I want it"]) == 1
    assert "needs a new verdict" in capsys.readouterr().err
    with Live(tiny, canary=bad, state=tmp_path) as live:
        assert ask(live, "c2")[0] == "exact", "a restart changes nothing"


def test_orders_reach_a_running_server(tiny: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(QUICK, shadow_pairs=10_000)
    with Live(tiny, canary=canary(tiny, slow, ratio=1.0), state=tmp_path) as live:
        progress = router(live).controller.progress
        ask(live, "c0")
        assert main(["canary", "promote", str(tmp_path), "--why", "the owner asked"]) == 0
        wait(lambda: progress.state == "canary")
        assert {ask(live, f"c{i}")[0] for i in range(30)} >= {"canary"}
        assert main(["canary", "rollback", str(tmp_path), "--why", "enough seen"]) == 0
        wait(lambda: progress.state == "rolled_back")
        assert {ask(live, f"c{i}")[0] for i in range(10)} == {"exact"}
        live.audit()
    capsys.readouterr()
    assert main(["canary", "history", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["begin", "move", "move"]
    assert [line.get("why", "") for line in lines][1:] == [
        "by order: the owner asked (the controller waited: 0 of 10000 pairs)", "by order: enough seen",
    ]  # fmt: skip
    assert main(["canary", "status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "rolled_back"


def wait(reached: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.02)
    assert reached()


def test_requests_on_their_way_end_when_the_policy_goes(tiny: LoadedModel, tmp_path: Path) -> None:
    with Live(tiny, canary=canary(tiny), state=tmp_path) as live:
        progress = router(live).controller.progress
        assert main(["canary", "promote", str(tmp_path), "--why", "test"]) == 0
        wait(lambda: progress.state == "canary")
        mine = in_canary(live)
        found: list[str] = []
        more = {"max_tokens": 300, "logit_bias": {"256": -100}}
        asking = [threading.Thread(target=lambda: found.append(ask(live, mine, **more)[0])) for _ in range(4)]
        for each in asking:
            each.start()
        wait(lambda: live.service.driver.live > 0)
        assert main(["canary", "rollback", str(tmp_path), "--why", "test"]) == 0
        for each in asking:
            each.join()
        assert found == ["canary"] * 4
        live.audit()


def test_outside_of_the_verdict_s_scope_everything_is_exact(tiny: LoadedModel, tmp_path: Path) -> None:
    with Live(tiny, canary=canary(tiny), state=tmp_path) as live:
        assert ask(live, "long", "word " * 130)[0] == "exact"
        assert ask(live, "kind", metadata={"kind": "code"})[0] == "exact"
        assert ask(live, "kind", metadata={"kind": "chat"})[0] == "shadow"
        live.audit()


def test_references_in_the_metadata_are_scored(tiny: LoadedModel, tmp_path: Path) -> None:
    by_score = canary(tiny, replace(QUICK, measure="score"), margin=0.1, ratio=0.1)
    with Live(tiny, canary=by_score, state=tmp_path) as live:
        progress = router(live).controller.progress
        letters = {
            "max_tokens": 8,
            "logit_bias": {str(t): 100 for t in live.service.model.tokenizer.encode("abcdefgh")},
        }
        right = ask(live, "x", "word " * 20, **letters)[1]["choices"][0]["message"]["content"]
        for i in range(5):
            ask(live, f"c{i}", "word " * 20, **letters, metadata={"reference": right, "check": "edit"})
        time.sleep(0.1)
        wait(lambda: progress.pairs == 5)
        assert progress.streams["quality"].mean < 0, "the exact answer is right by construction"
        body = {"model": "tiny", "prompt": "x", "metadata": {"reference": "a", "check": "z"}}
        status, _, raw = live.send("POST", "/v1/completions", body)
        assert (status, json.loads(raw)["error"]["param"]) == (400, "metadata")


def test_a_canary_of_another_model_or_protocol_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    scope = config(tiny)["scope"]
    other = parse_canary(config(tiny, scope={**scope, "model": {**scope["model"], "weights_hash": "0" * 32}}))
    with pytest.raises(ValueError, match="this model has"):
        Live(tiny, canary=other, state=tmp_path)
    unseen = parse_canary(config(tiny, scope={**scope, "protocols": ["question_unseen"]}))
    with pytest.raises(ValueError, match="the server evicts as whole_prompt"):
        Live(tiny, canary=unseen, state=tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "other"}, "kind"),
        ({"policy": {"name": "h2o", "params": {"x": 1}, "budget": {"ratio": 0.5}}}, "unknown parameter 'x'"),
        ({"policy": {"name": "nobody", "params": {}, "budget": {"ratio": 0.5}}}, "'nobody' is unknown"),
        ({"rollout": {"stages": []}}, "rollout"),
        ({"rollout": {"speed": 1}}, "rollout"),
        (
            {"rollout": {"stages": [{"traffic": 0.5, "minimum_pairs": 1}, {"traffic": 0.1, "minimum_pairs": 1}]}},
            "rising",
        ),
    ],
)
def test_bad_canary_configs_are_named(tiny: LoadedModel, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        parse_canary(config(tiny, **change))
    assert "\n" not in str(error.value)


def test_files_that_are_no_canary_and_folders_that_are_no_rollout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"x\.yaml"):
        load_canary(tmp_path / "x.yaml")
    with pytest.raises(ValueError, match="No such file"):
        load_canary(tmp_path / "y.yaml")
    for words in (["status", str(tmp_path)], ["status"], ["dance", str(tmp_path)], [str(tmp_path)]):
        assert main(["canary", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    Journal(tmp_path).append("note", {}, 0.0)
    assert main(["canary", "status", str(tmp_path)]) == 2
    assert "never began" in capsys.readouterr().err
