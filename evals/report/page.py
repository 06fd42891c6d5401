"""The report's frame: head, styles, and the few pieces of HTML that all sections use. No script, no network."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from kvgate.evals.report.names import SYMBOLS, printable, verdict_text

# What figures are drawn in, by the CSS variable that replaces it, so that figures follow light, dark and print.
_THEMED = {
    "#1b1f24": "var(--ink)", "#8c959f": "var(--faint)", "#0072b2": "var(--blue)", "#d55e00": "var(--red)",
    "#b8860b": "var(--amber)", "#737b84": "var(--grey)", "#b5488a": "var(--pink)", "#009e73": "var(--green)",
}  # fmt: skip

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--card:#f6f8fa;--ink:#1b1f24;--soft:#57606a;--faint:#8c959f;--line:#d0d7de;
--blue:#0072b2;--red:#c04f00;--amber:#8a6100;--grey:#636c76;--pink:#a0347a;--green:#007a59}
@media (prefers-color-scheme:dark){:root{--paper:#0f1318;--card:#181d24;--ink:#e6edf3;--soft:#a3adb8;--faint:#7d8790;
--line:#333c47;--blue:#56b4e9;--red:#ff8a4c;--amber:#e6b422;--grey:#a3adb8;--pink:#e78ac3;--green:#3fc79a}}
@media print{:root{--paper:#fff;--card:#fff;--ink:#000;--soft:#333;--faint:#777;--line:#bbb;--blue:#0072b2;
--red:#b84c00;--amber:#7a5600;--grey:#555;--pink:#8f2d6c;--green:#006b4e}
details::details-content{content-visibility:visible;height:auto;block-size:auto}
summary{list-style:none}.block,figure,.example,tr{break-inside:avoid}h2,h3,summary{break-after:avoid}nav{display:none}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:66rem;padding:1rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .5rem}h2{font-size:1.2rem;margin:2.2rem 0 .5rem;
border-top:1px solid var(--line);padding-top:1rem}h3{font-size:1rem;margin:1.1rem 0 .4rem}
p{margin:.4rem 0}.soft{color:var(--soft);font-size:.9rem}
.big{font-size:1.08rem;border-left:4px solid var(--faint);padding:.3rem 0 .3rem .8rem;margin:.8rem 0}
a{color:var(--blue)}nav a{display:inline-block;margin:.1rem .9rem .1rem 0}
table{border-collapse:collapse;font-size:.85rem;line-height:1.35;margin:.4rem 0 .8rem;font-variant-numeric:tabular-nums}
th,td{padding:.22rem .4rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
th:first-child,td:first-child{white-space:normal}
th:first-child,td:first-child{text-align:left;padding-left:0}th{font-weight:600;color:var(--soft)}
tbody th{color:var(--ink)}td small,th small{color:var(--soft)}caption{text-align:left;color:var(--soft);padding:.2rem 0}
.chip{display:inline-block;border:1.5px solid currentColor;border-radius:1rem;padding:0 .55rem;font-size:.85rem;
font-weight:600;white-space:nowrap}
.enable{color:var(--blue)}.block-v{color:var(--red)}.inconclusive{color:var(--amber)}.not_evaluable{color:var(--grey)}
.invalid{color:var(--pink)}
.flow>*{break-inside:avoid}.flow>details{break-inside:auto}.block:first-child{margin-top:0}
.block,.example{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem;
margin:.6rem 0}
.block h3{margin:0 0 .25rem}.block ul{margin:.3rem 0;padding-left:1.1rem;font-size:.88rem}
summary{cursor:pointer;color:var(--blue);font-size:.9rem;padding:.2rem 0}
figure{margin:.6rem 0;max-width:34rem}figure svg{width:100%;height:auto;display:block}
figcaption{font-size:.9rem;color:var(--soft)}
.answers{display:grid;gap:.5rem;grid-template-columns:1fr}
.answers div{border-left:3px solid var(--line);padding-left:.6rem}
pre,q,.out{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.82rem;white-space:pre-wrap;margin:.15rem 0;
overflow-wrap:anywhere}
.prompt{color:var(--soft)}
.fact{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.85rem;line-height:1.9;margin:.2rem 0}
.fact span{white-space:pre-wrap;border-bottom:3px solid var(--blue);padding-bottom:1px}
.fact .some{border-bottom:3px dotted var(--amber)}
.fact .few{border-bottom:1px dotted var(--red);color:var(--soft)}
.fact .gone{border-bottom:0;text-decoration:line-through;text-decoration-color:var(--red);color:var(--soft)}
.cell{min-width:2.6rem}
@media print,(min-width:50rem){.two{display:grid;grid-template-columns:1fr 1fr;gap:0 1.5rem;align-items:start}
.flow{columns:2;column-gap:1.2rem}.answers{grid-template-columns:1fr 1fr}}
@media print{html{font-size:11px}
body{font-size:1rem;line-height:1.35;max-width:none;padding:0}.block,.example{padding:.3rem .5rem}
.flow .answers{grid-template-columns:1fr}h2{margin-top:1.2rem}figure{max-width:100%}@page{margin:12mm}}
"""


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n'
        f"<title>{esc(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def esc(text: object) -> str:
    """Text for HTML: nothing in it is markup, and no character in it hides or turns others."""
    return html.escape(printable(str(text)))


def chip(status: str) -> str:
    """A verdict, by symbol and word and then by colour."""
    kind = "block-v" if status == "block" else status
    return f'<span class="chip {kind}">{SYMBOLS[status]} {verdict_text(status)}</span>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """A table of cells that are HTML already. A row of one cell is a heading over the rows after it."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(_table_row(row, len(heads)) for row in rows)
    said = f"<caption>{caption}</caption>" if caption else ""
    return f"<table>{said}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _table_row(cells: Sequence[str], width: int) -> str:
    if len(cells) == 1:
        return f'<tr><th scope="colgroup" colspan="{width}">{cells[0]}</th></tr>'
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def folded(summary: str, inside: str) -> str:
    """Closed on a screen, open on paper."""
    return f"<details><summary>{summary}</summary>{inside}</details>"


def inline_svg(svg: str, label: str) -> str:
    """A matplotlib figure for the page: as wide as there is room, in the page's colours, without ids nobody uses."""
    start = svg.index("<svg")
    used = set(re.findall(r"#([A-Za-z0-9_]+)", svg))
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", svg[start:], flags=re.DOTALL)
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    head, rest = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    for colour, variable in _THEMED.items():
        rest = rest.replace(colour, variable)
    return f'{head} role="img" aria-label="{esc(label)}">{rest}'
