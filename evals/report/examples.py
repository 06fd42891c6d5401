"""The report's third part: answers that went wrong, beside the exact run's, with what was left of the evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvgate.evals.report.items import ItemText
from kvgate.evals.report.names import ShortName
from kvgate.evals.report.page import esc, folded
from kvgate.evals.report.slice_tables import evidence_text

LONGEST_FACT = 60  # tokens of one span that are shown


def examples(
    rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName], texts: Mapping[str, ItemText], note: str
) -> str:
    """A few losses of every row."""
    out = [
        '<h2 id="examples">Disagreements</h2>',
        "<p class='soft'>The largest losses of each row, suites and tasks taking turns. The evidence is shown token by "
        "token: <span class='fact'><span>kept</span> in every layer and head, <span class='some'>in half or more"
        "</span>, "
        "<span class='few'>in fewer than half</span>, <span class='gone'>evicted</span> everywhere when the answer "
        "starts.</span></p>",
    ]
    if note:
        out.append(f"<p class='soft'>{esc(note)}.</p>")
    for row in rows:
        if row["examples"]:
            shown = [_example(example, texts.get(example["item_hash"])) for example in row["examples"]]
            count = f"{len(shown)} examples" if len(shown) > 1 else "1 example"
            head = f"{esc(names[row['label']])}, {esc(row['protocol'])}: {count}"
            out.append(folded(head, f"<div class='flow'>{''.join(shown)}</div>"))
    return "\n".join(out)


def _example(example: Mapping[str, Any], text: ItemText | None) -> str:
    depth = "" if example["depth"] is None else f", depth {example['depth']:g}"
    head = f"{example['suite']}/{example['task']} {example['index']}, {example['length']} tokens{depth}"
    sides = "".join(_side(example[side], word) for side, word in (("exact", "full KV"), ("policy", "policy")))
    prompt = ""
    if text is not None:
        prompt = f"<pre class='prompt'>…{esc(text.prompts[example['turn_index']])}</pre>"
    return (
        f"<div class='example'><p><strong>{esc(head)}</strong> <span class='soft'>{esc(example['turn'])}, item "
        f"{esc(example['item_hash'][:12])}</span></p>{prompt}<div class='answers'>{sides}</div>"
        f"{_evidence(example['facts_kept'], text)}</div>"
    )


def _side(answer: Mapping[str, Any], word: str) -> str:
    more = " …" if answer["cut"] else ""
    head = f"<small class='soft'>{word}, score {answer['score']:.2f}</small>"
    return f"<div>{head}<pre>{esc(answer['text'])}{more}</pre></div>"


def _evidence(facts: Sequence[Sequence[int]] | None, text: ItemText | None) -> str:
    if not facts:
        return ""
    out = [f"<p class='soft'>{evidence_text(facts)}</p>"]
    if text is not None:
        for words, kept in zip(text.facts, facts, strict=True):
            marked = "".join(_token(*pair) for pair in list(zip(words, kept, strict=True))[:LONGEST_FACT])
            out.append(f"<p class='fact'>{marked}{' …' if len(words) > LONGEST_FACT else ''}</p>")
    return "".join(out)


def _token(word: str, kept: int) -> str:
    kind = "all" if kept == 100 else "some" if kept >= 50 else "few" if kept > 0 else "gone"
    return f"<span class='{kind}' title='{kept} %'>{esc(word)}</span>"
