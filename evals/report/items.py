"""The words behind item hashes: prompts and evidence, rebuilt from a run's plan.

Samples hold hashes and answers, not prompts. The same plan, tokenizer and sources give the same items, and an item is
shown only if its hash is the recorded one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgate.evals.data.items import Item

if TYPE_CHECKING:
    from kvgate.evals.plan.config import RunConfig

TAIL = 320  # characters of a prompt that are shown, its end


@dataclass(frozen=True)
class ItemText:
    """``prompts``: the end of each turn's prompt. ``facts``: the evidence, token by token, as in ``Item.facts``."""

    prompts: tuple[str, ...]
    facts: tuple[tuple[str, ...], ...]


def item_texts(manifest: Mapping[str, Any], wanted: Collection[str]) -> tuple[dict[str, ItemText], str]:
    """Texts of the items whose hashes are ``wanted``, and why some could not be had ("" if none is missing)."""
    if not wanted:
        return {}, ""
    try:  # neither torch nor the policies need be installed where a report is made
        from kvgate.evals.plan.config import recorded_plan
        from kvgate.evals.run.prepare import build_items

        config = recorded_plan(manifest)
        tokenizer = _tokenizer(config)
        items = [item for choice in config.suites for item in build_items(choice, tokenizer, config)]
    except (ValueError, OSError, ImportError) as error:
        return {}, f"prompts are not shown: {' '.join(str(error).split())[:200]}"
    found = {item.item_hash: _text(item, tokenizer) for item in items if item.item_hash in wanted}
    missing = len(set(wanted) - found.keys())
    return found, f"{missing} prompts are not shown: the plan makes other items here" if missing else ""


def _tokenizer(config: RunConfig) -> Any:
    """Never asks the network: a report is made where the run was made, or without prompts."""
    import transformers

    from kvgate.engine.embedded import EMBEDDED, embedded_folder

    source = str(embedded_folder()) if config.model == EMBEDDED else config.model
    return transformers.AutoTokenizer.from_pretrained(source, revision=config.revision, local_files_only=True)


def _text(item: Item, tokenizer: Any) -> ItemText:
    prompts = tuple(str(tokenizer.decode(list(turn.prompt)))[-TAIL:] for turn in item.turns)
    facts = tuple(_words(item.context[start:end], tokenizer) for start, end in item.facts)
    return ItemText(prompts, facts)


def _words(ids: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """Tokens as text. Bytes of a character that several tokens share show as replacement characters."""
    return tuple(str(tokenizer.decode([token])) for token in ids)
