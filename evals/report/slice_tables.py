"""Slices of a leaderboard for a terminal: length x depth, survival, disagreements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvgate.evals.leaderboard.limits import cell_limits, percent
from kvgate.evals.report.names import ShortName, printable

Grid = Sequence[Mapping[str, Any]]
Line = tuple[str, str, Sequence[Text]]
# From bad to good; the numbers say it too, so that colours are never needed.
_SHADES = ((0.25, "white on red"), (0.5, "red"), (0.75, "yellow"), (0.9, "cyan"), (1.01, "green"))


def grid_tables(
    exact: Grid, rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName], width: int
) -> Iterable[Group]:
    """One table a suite: percent by policy, length and depth, with limits, as many columns side by side as fit."""
    for suite in sorted({cell["suite"] for cell in exact}):
        keys = [(cell["length"], cell["depth"]) for cell in exact if cell["suite"] == suite]
        heads = [
            (str(key[0]) if index == 0 or keys[index - 1][0] != key[0] else "", middle(key[1]))
            for index, key in enumerate(keys)
        ]
        lines = [("full KV", "", _scores(exact, suite, keys)), ("  items", "", _counts(exact, suite, keys))]
        lines += [(*_spoken(names[row["label"]]), _scores(row["grid"], suite, keys)) for row in rows]
        title = f"{suite}: score in percent by context length and depth (0 start, 1 end), 95 % interval below it"
        yield from _matrix(title, heads, lines, width)


def middle(depth: str | None) -> str:
    """Middle of a depth bin: ".3" for "0.2-0.4"."""
    if depth is None:
        return "any"
    low, _, high = depth.partition("-")
    return f"{(float(low) + float(high)) / 2:.2g}".removeprefix("0")


def survival_tables(rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName], width: int) -> Iterable[Group]:
    """One table a suite: of the answers the exact run got right, the percent each policy kept, by task and turn."""
    found = {(row["label"], e["suite"], e["task"], e["turn"]): e for row in rows for e in row["survival"]}
    right = {key[1:]: entry["right"] for key, entry in found.items()}
    for suite in sorted({key[0] for key in right}):
        keys = sorted(key for key in right if key[0] == suite)
        heads = [
            (key[1] if index == 0 or keys[index - 1][1] != key[1] else "", key[2]) for index, key in enumerate(keys)
        ]
        lines = [("right under full KV", "", [Text(str(right[key]), style="dim") for key in keys])]
        for row in rows:
            cells = [_survived(found.get((row["label"], *key))) for key in keys]
            lines.append((*_spoken(names[row["label"]]), cells))
        title = f"{suite}: percent of the exact run's right answers that survive, by task and turn"
        yield from _matrix(title, heads, lines, width)


def drift_table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName]) -> Group | None:
    """Long answers: length, repetition and loops, full KV -> policy; None where no answer is long."""
    found = [(names[row["label"]], entry) for row in rows for entry in row.get("drift", ())]
    if not found:
        return None
    table = plain_table()
    for head in ("policy", "kept", "suite", "task", "context", "n", "tokens", "repeated", "loops"):
        left = head in ("policy", "suite", "task")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    before = ""
    for name, entry in found:
        family, budget = _spoken(name)
        shown = (
            entry["suite"], entry["task"], str(entry["length"]), str(entry["answers"]),
            f"{entry['exact_tokens']:.0f} -> {entry['tokens']:.0f}",
            f"{entry['exact_repetition']:.2f} -> {entry['repetition']:.2f}",
            f"{entry['exact_loops']} -> {entry['loops']}",
        )  # fmt: skip
        table.add_row(family if family != before else "", budget, *shown)
        before = family
    title = "long answers, full KV -> policy: mean tokens, share of repeated 4-grams, answers that end in a loop"
    return Group(Text(title, style="bold"), table)


def _spoken(name: ShortName) -> tuple[str, str]:
    return name.family, name.budget


def _matrix(title: str, heads: Sequence[tuple[str, str]], lines: Sequence[Line], width: int) -> Iterable[Group]:
    """Tables of at most ``width`` columns of text, each with the names at its left."""
    widths = [
        1 + max(3, *map(len, head), *(len(part) for _, _, cells in lines for part in cells[place].plain.split("\n")))
        for place, head in enumerate(heads)
    ]
    left = 10 + max(len(family) for family, _, _ in lines)
    start = 0
    while start < len(heads):
        stop = start + 1
        while stop < len(heads) and left + sum(widths[start : stop + 1]) <= width:
            stop += 1
        yield Group(Text(title, style="bold"), _part(heads[start:stop], lines, start, stop))
        start = stop


def _part(heads: Sequence[tuple[str, str]], lines: Sequence[Line], start: int, stop: int) -> Table:
    table = plain_table()
    table.add_column("\npolicy", no_wrap=True)
    table.add_column("\nkept", justify="right", no_wrap=True)
    for head in heads:
        table.add_column("\n".join(head), justify="right", no_wrap=True)
    before = ""
    for family, budget, cells in lines:
        table.add_row(family if family != before else "", budget, *cells[start:stop])
        before = family
    return table


def _scores(cells: Grid, suite: str, keys: Sequence[tuple[int, str | None]]) -> list[Text]:
    found = {(cell["length"], cell["depth"]): cell for cell in cells if cell["suite"] == suite}
    return [
        Text.assemble(_shade(found[key]["score"]), "\n", (percent(cell_limits(found[key])), "dim"))
        if key in found
        else _shade(None)
        for key in keys
    ]


def _counts(cells: Grid, suite: str, keys: Sequence[tuple[int, str | None]]) -> list[Text]:
    found = {(cell["length"], cell["depth"]): cell["items"] for cell in cells if cell["suite"] == suite}
    return [Text(str(found[key]), style="dim") for key in keys]


def _survived(entry: Mapping[str, Any] | None) -> Text:
    return _shade(entry["survived"] / entry["right"] if entry and entry["right"] else None)


def _shade(score: float | None) -> Text:
    if score is None:
        return Text("-", style="dim")
    return Text(f"{100 * score:.0f}", style=next(style for limit, style in _SHADES if score < limit))


def example_lines(row: Mapping[str, Any], name: ShortName) -> Iterable[Padding | Text]:
    """The row's disagreements: where, both answers, what was left of the evidence."""
    if row["examples"]:
        yield Text(f"{name}, {row['protocol']}", style="bold")
    for example in row["examples"]:
        depth = "" if example["depth"] is None else f", depth {example['depth']:g}"
        where = f"{example['suite']}/{example['task']} {example['length']} tokens{depth}, {example['turn']}"
        kept = evidence_text(example["facts_kept"])
        yield Padding(Text(f"{where}{'; ' + kept if kept else ''}", style="dim"), (0, 0, 0, 2))
        for side, word in (("exact", "full KV"), ("policy", "policy ")):
            answer = example[side]
            text = printable(answer["text"]) + (" ..." if answer["cut"] else "")
            yield Padding(Text(f"{word} {answer['score']:.2f}  {text}"), (0, 0, 0, 4))


def evidence_text(facts: Sequence[Sequence[int]] | None) -> str:
    """ "evidence still attended: 40 % of 15 tokens"; empty where nobody said where the evidence stands."""
    if not facts:
        return ""
    tokens = [percent for span in facts for percent in span]
    return f"evidence still attended: {sum(tokens) / len(tokens):.0f} % of {len(tokens)} tokens"


def plain_table() -> Table:
    """The house's table: a rule under the head, one space between columns."""
    return Table(box=box.SIMPLE_HEAD, padding=0)
