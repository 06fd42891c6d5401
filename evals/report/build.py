"""A finished run as one self-contained page, with its figures as PNG and SVG beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgate.evals.leaderboard.finished import FinishedRun
from kvgate.evals.log.run_folder import write_json, write_text
from kvgate.evals.report.names import short_names

PAGE, EXAMPLES, FIGURES = "index.html", "examples.json", "figures"


def write_report(run: FinishedRun, out: Path, gate: str | None = None) -> Path:
    """Write everything into ``out``; returns the page. The same run gives the same bytes."""
    from kvgate.evals.report.figures import figures, png, svg  # here, so that other commands do not wait for matplotlib
    from kvgate.evals.report.heat_maps import heat_maps
    from kvgate.evals.report.items import item_texts

    board = run.leaderboard(gate)
    wanted = {example["item_hash"] for row in board["rows"] for example in row["examples"]}
    texts, note = item_texts(run.manifest, wanted)
    drawn = {**figures(board), **heat_maps(board)}
    svgs = {name: svg(figure, name) for name, figure in drawn.items()}
    try:
        (out / FIGURES).mkdir(parents=True, exist_ok=True)
        for name, figure in drawn.items():
            write_text(out / FIGURES / f"{name}.svg", svgs[name])
            (out / FIGURES / f"{name}.png").write_bytes(png(figure))
        write_json(out / EXAMPLES, _examples(board, texts))
        write_text(out / PAGE, build_page(board, svgs, texts, note))
    except OSError as error:
        raise ValueError(f"report folder {out}: {error.strerror}; choose a writable one with --out") from error
    return out / PAGE


def build_page(board: Mapping[str, Any], svgs: Mapping[str, str], texts: Mapping[str, Any], note: str) -> str:
    """The page: verdicts and their reasons first, then where and how much is lost, then what all of it rests on."""
    from kvgate.evals.report import slices
    from kvgate.evals.report.examples import examples
    from kvgate.evals.report.page import esc, page
    from kvgate.evals.report.verdicts import opening, verdicts

    names = short_names(board["rows"])
    sections = ("verdicts", "differences", "memory", "depth", "survival", "examples", "exact", "about")
    links = "".join(f'<a href="#{section}">{section}</a>' for section in sections)
    parts = [
        opening(board, names),
        f"<nav>{links}</nav>",
        verdicts(board, names),
        slices.differences(board, svgs),
        slices.memory(board, names, svgs),
        slices.heat(board, names, svgs),
        slices.survival(board, names),
        examples(board["rows"], names, texts, note),
        slices.exact_run(board),
        slices.about(board),
    ]
    return page(f"kvgate: {esc(board['name'])}", "\n".join(parts))


def _examples(board: Mapping[str, Any], texts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The leaderboard's examples with the words of their items, where they could be had."""
    found = []
    for row in board["rows"]:
        for example in row["examples"]:
            text = texts.get(example["item_hash"])
            words = {"prompt": text.prompts[example["turn_index"]], "facts": text.facts} if text else {}
            found.append({"label": row["label"], "protocol": row["protocol"], **example, **words})
    return found
