"""RepoBench v1.1, Python (Liu et al. 2023, arXiv:2306.03091): the next line, with the repository's code before it."""

from __future__ import annotations

from typing import Any, ClassVar

from kvgate.evals.data.items import Item, Overlap, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.hub.base import HubSuite, Row, Source, cluster, field

SPLITS = ("cross_file_first", "cross_file_random", "in_file")
TAIL = 48  # tokens of code that follow eviction


class HubRepoBench(HubSuite):
    """Next-line completion across files."""

    name = "repobench"
    measures = "The next line of code where it uses something of another file of the repository."
    why_eviction_hurts = "The snippet that defines what the line uses stands far in front, among others like it."
    floor = 0.3
    tasks: ClassVar = {
        "cross_file_first": "the first use of something imported",
        "cross_file_random": "a later use of something imported",
        "in_file": "a line without imported names",
    }
    source = Source(
        repo="tianyang/repobench_python_v1.1",
        revision="8a7cf0c8942cc1aa066bf261839650ac55a2ff79",
        licence="cc",
        files={split: f"data/{split}-*.parquet" for split in SPLITS},
    )

    def item(self, tokens: Tokens, task: str, row: Row) -> Item:
        """Snippets as comments-and-code, then the file; its last tokens are fed after eviction."""
        snippets = "\n".join(_snippet(one) for one in field(row, "context", list))
        file = f"\n# Path: {field(row, 'file_path')}\n{field(row, 'import_statement')}\n{field(row, 'cropped_code')}\n"
        ids = tokens.bos + tokens.fresh(snippets + file)
        if len(ids) <= TAIL:
            raise ValueError(f"field 'cropped_code' and 'context' have {len(ids)} tokens; too few to evict from")
        gold = field(row, "next_line")
        return Item(
            suite=self.name,
            task=task,
            index=0,
            length=0,
            context=ids[:-TAIL],
            turns=(Turn(ids[-TAIL:], Overlap((gold,), "edit"), 48, stop=tokens.line_ends, label="next line"),),
            cluster=cluster(task, field(row, "repo_name")),
            meta={"gold": gold, "repo": field(row, "repo_name")},
        )


def _snippet(row: Any) -> str:
    if not isinstance(row, dict):
        raise ValueError(f"field 'context' holds {type(row).__name__}")
    return f"# Path: {field(row, 'path')}\n{field(row, 'snippet')}\n"
