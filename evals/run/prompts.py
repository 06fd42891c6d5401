"""Which tokens a shard prefills exactly, and how many pages it may hold at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.evals.data.items import Item, candidates_of
from kvgate.evals.plan.cells import Cell, Shard


def pages_needed(engine_heads: int, page_size: int, shard: Shard) -> int:
    """Most pages the shard can hold at once, snapshots and copies included."""

    def pages(tokens: int) -> int:
        return engine_heads * (-(-tokens // page_size) + 2)

    prompts = by_prompt(shard.cells)
    total = sum(pages(len(prompt)) for prompt, _ in prompts)
    total += max((pages(most) for prompt, cells in prompts if (most := probed(prompt, cells))), default=0)
    for cell in shard.cells:
        spoken = cell.item.longest - len(cell.item.context)
        kept = min(cell.budget or cell.item.longest, cell.item.longest)
        forks = [candidate for turn in cell.item.turns for candidate in candidates_of(turn)]
        total += pages(kept + spoken) + sum(pages(len(fork)) for fork in forks)
    return total


def probed(prompt: Sequence[int], cells: Sequence[Cell]) -> int:
    """Most tokens that any cell's policy runs over the prompt as a probe, one at a time."""
    return max((cell.policy.probe_tokens(len(prompt)) for cell in cells if cell.policy), default=0)


def prompt_of(item: Item) -> tuple[int, ...]:
    """What is prefilled exactly before the eviction."""
    return item.context + item.turns[0].prompt[:-1] if item.protocol == "whole_prompt" else item.context


def by_prompt(cells: Sequence[Cell]) -> list[tuple[tuple[int, ...], list[Cell]]]:
    """Cells grouped by what is prefilled and what is protected, with that prompt."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((prompt_of(cell.item), cell.item.protected), []).append(cell)
    return [(prompt_of(found[0].item), found) for found in groups.values()]
