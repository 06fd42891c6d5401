"""Slices in the leaderboard, and the report made from them."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import report_sample as sample
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.leaderboard.finished import FinishedRun
from kvgate.evals.log.names import LEADERBOARD
from kvgate.evals.log.records import SCHEMA_VERSION
from kvgate.evals.report.build import write_report

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run() -> FinishedRun:
    return sample.run_of(sample.records())


@pytest.fixture(scope="module")
def board(run: FinishedRun) -> dict[str, Any]:
    return run.leaderboard()


@pytest.fixture(scope="module")
def report_page(run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run, tmp_path_factory.mktemp("report"))


def row(board: dict[str, Any], label: str, protocol: str) -> dict[str, Any]:
    return next(row for row in board["rows"] if (row["label"], row["protocol"]) == (label, protocol))


def test_it_matches_the_schema_and_order_of_records_does_not_matter(run: FinishedRun, board: dict[str, Any]) -> None:
    path = files("kvgate") / "configs" / "schemas" / "leaderboard.schema.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(json.loads(json.dumps(board)), schema)
    turned = replace(run, records=tuple(reversed(run.records))).leaderboard()
    for ours, theirs in zip(board["rows"], turned["rows"], strict=True):
        assert [ours[key] for key in ("grid", "survival", "examples", "pareto")] == [
            theirs[key] for key in ("grid", "survival", "examples", "pareto")
        ]


def test_grid(board: dict[str, Any]) -> None:
    cells = row(board, "streaming_llm(positions=rebased)@0.5", "question_unseen")["grid"]
    found = {(cell["length"], cell["depth"]): (cell["items"], cell["score"], cell["evidence_kept"]) for cell in cells}
    for length in (512, 1024):
        assert found[length, "0-0.2"] == (4, 0.0, 0.25)
        assert found[length, "0.4-0.6"] == found[length, "0.8-1"] == (4, 1.0, 1.0)
    assert all(cell["score"] == 1.0 for cell in board["grids"]["question_unseen"])


def test_survival_shows_the_turn_that_is_lost(board: dict[str, Any]) -> None:
    first, second = row(board, "streaming_llm(positions=rebased)@0.25", "multi_turn")["survival"]
    assert (first["turn"], first["right"], first["survived"], first["policy"]) == ("q1", 24, 8, pytest.approx(1 / 3))
    assert (second["turn"], second["right"], second["survived"]) == ("q2", 24, 24)


def test_pareto(board: dict[str, Any]) -> None:
    marks = {row["label"]: row["pareto"] for row in board["rows"] if row["protocol"] == "question_unseen"}
    assert marks == {
        "streaming_llm(positions=rebased)@0.5": False,  # as much memory as the next, and worse
        f"{sample.EVIL}@0.5": True,
        "streaming_llm(positions=rebased)@0.25": True,
    }


def test_examples_are_losses(board: dict[str, Any]) -> None:
    for entry in board["rows"]:
        assert len(entry["examples"]) == (0 if sample.EVIL in entry["label"] else 3)
        for example in entry["examples"]:
            assert example["exact"]["score"] > example["policy"]["score"]
            assert example["policy"]["text"] == sample.HOSTILE
            assert example["turn"] in ("q", "q1")
            assert example["facts_kept"] in (((0, 50),), [[0, 50]])


class Tags(HTMLParser):
    """Tags, what they refer to, and the text of table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.handlers: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "action", "data")]
        self.handlers += [key for key, _ in attrs if key.startswith("on")]
        self._in_cell |= tag == "td"
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag != "td"


def test_the_page_is_safe_and_needs_no_network(report_page: Path) -> None:
    text = report_page.read_text(encoding="utf-8")
    seen = Tags()
    seen.feed(text)
    assert not {"script", "img", "iframe", "object", "link", "i", "b"} & set(seen.tags)
    assert not seen.handlers
    assert all(target.startswith(("#", "data:image/png")) for target in seen.targets)
    assert "url(http" not in text
    assert "@import" not in text
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    assert "&lt;script&gt;alert(1)" in text
    assert 'name="viewport"' in text
    ids = re.findall(r'<section[^>]* id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) == 6
    assert all(target[1:] in text for target in seen.targets if target.startswith("#"))


def test_verdicts_come_first_and_every_number_is_in_a_table(report_page: Path, board: dict[str, Any]) -> None:
    text = report_page.read_text(encoding="utf-8")
    assert text.index('id="verdicts"') < text.index("Reasons") < text.index("<svg")
    seen = Tags()
    seen.feed(text)
    cells = set(seen.cells)
    for entry in board["rows"]:
        assert f"{entry['memory']['resident_mib']:.1f}" in cells
        assert f"{entry['quality']:.2f}" in cells
        for stratum in (*entry["suites"], *entry["slices"]):
            assert f"{stratum['difference']:+.2f}{stratum['lower']:+.2f} to {stratum['upper']:+.2f}" in cells
        for cell in entry["grid"]:
            sure = {1.0: "40–100", 0.5: "7–93", 0.0: "0–60"}[cell["score"]]  # of four items
            assert f"{100 * cell['score']:.0f}{sure}e {100 * cell['evidence_kept']:.0f}" in cells
        for answers in entry["survival"]:
            assert f"{answers['survived']}/{answers['right']}" in cells
    assert "10040–100n 4" in cells


def test_same_run_same_bytes(run: FinishedRun, report_page: Path, tmp_path: Path) -> None:
    write_report(run, tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert {"index.html", "examples.json"} <= {path.name for path in made}
    assert {path.suffix for path in made} == {".html", ".json", ".png", ".svg"}
    for path, data in made.items():
        assert (report_page.parent / path).read_bytes() == data, path


def test_invalid_rows_and_items_without_depth(tmp_path: Path) -> None:
    cells = [replace(cell, depth=None, facts_kept=None) for cell in sample.records(2)]
    cells.remove(next(cell for cell in cells if cell.exact))
    run = sample.run_of(tuple(cells))
    text = write_report(run, tmp_path).read_text(encoding="utf-8")
    assert "invalid" in text
    assert "have no exact record" in text
    assert "prompts are not shown" in text


def test_prompts_and_evidence_are_rebuilt_from_the_plan(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from kvgate.evals.plan.config import SuiteChoice, recorded_plan
    from kvgate.evals.report.items import item_texts
    from kvgate.evals.run.prepare import build_items

    model = str(save_tiny_model(tmp_path / "model"))
    manifest = sample.run_of((), model).manifest
    made = build_items(
        SuiteChoice("retrieval", {512: 1}), AutoTokenizer.from_pretrained(model), recorded_plan(manifest)
    )
    item = next(item for item in made if item.task == "single")
    texts, note = item_texts(manifest, {item.item_hash})
    assert note == ""
    assert "magic number" in texts[item.item_hash].prompts[0]
    assert item.meta["gold"] in "".join(texts[item.item_hash].facts[0])
    assert [len(span) for span in texts[item.item_hash].facts] == [end - start for start, end in item.facts]
    texts, note = item_texts(manifest, {item.item_hash, "0" * 32})
    assert set(texts) == {item.item_hash}
    assert note.startswith("1 prompts are not shown")


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(run: FinishedRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="choose a writable one"):
        write_report(run, tmp_path / "file")


# -- in a real browser ------------------------------------------------------------------------------------------------

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for path in map(shutil.which, _NAMES) if path), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
# The page itself allows no script, so a page around it measures it, with everything unfolded.
PROBE = """<!doctype html><title>probe</title><iframe id="phone" style="width:{width}px;height:900px;border:0"
srcdoc="{page}"></iframe><script>
const phone = document.getElementById("phone");
phone.addEventListener("load", () => {{
  const inside = phone.contentDocument;
  inside.querySelectorAll("details").forEach((entry) => (entry.open = true));
  const root = inside.documentElement;
  const wide = [...inside.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > {width} + 0.5);
  document.title = `${{root.scrollWidth}} ${{root.clientWidth}} ${{wide.length}} ${{inside.scripts.length}}`;
}});
</script>"""
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def chromium(tmp_path: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("width", [360, 390, 1200])
def test_nothing_scrolls_sideways(report_page: Path, tmp_path: Path, width: int) -> None:
    text = report_page.read_text(encoding="utf-8")
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width, page=html.escape(text)), encoding="utf-8")
    size = f"--window-size={max(width, 500)},1000"
    dom = chromium(tmp_path, size, "--virtual-time-budget=5000", "--dump-dom", probe.as_uri())
    found = re.search(r"<title>(\d+) (\d+) (\d+) (\d+)</title>", dom)
    assert found, "the page did not load in the frame"
    scroll, client, wide, scripts = map(int, found.groups())
    assert scroll <= client <= width
    assert (wide, scripts) == (0, 0)


@pytest.mark.slow
@in_browser
def test_it_prints(report_page: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.pdf"
    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={target}", report_page.as_uri())
    assert target.read_bytes().startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", target.read_bytes())) >= 3


@pytest.mark.parametrize("folder", sorted((ROOT / "results").glob("reference*")), ids=lambda path: path.name)
def test_committed_runs_can_be_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = json.loads((folder / LEADERBOARD).read_text())["schema_version"]
    if version != SCHEMA_VERSION:
        assert main(["show", str(folder)]) == 2
        assert f"schema_version {version}, this kvgate reads {SCHEMA_VERSION}" in capsys.readouterr().err
        pytest.skip(f"{folder.name} is of schema {version}: it has to be made again")
    assert main(["show", str(folder)]) == 0
    assert "Exact run (full KV)" in capsys.readouterr().out
