"""Tile shapes of the Triton kernels: the only place that chooses them, so the compile gate can list them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "short", "long"]  # one tile of 16 query rows, one of 64, or many tiles and no splits


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m query rows (tokens x G), block_n slots; split: slots of one split, 0 for none.

    registers: a thread's, at most. Left to itself the assembler aims at half of them and spills a few.
    """

    block_m: int
    block_n: int
    block_d: int
    split: int
    num_warps: int
    num_stages: int
    registers: int = 255


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def kind_of(tokens: int, group: int) -> Kind:
    """How a row with `tokens` new tokens is attended: by that row alone, so a batch changes no result."""
    if tokens == 1 or tokens * group <= 16:
        return "decode"
    return "short" if tokens * group <= 64 else "long"


def attention_tile(
    kind: Kind, head_dim: int, group: int, element_size: int, sinks: bool, paged: bool, hopper: bool
) -> Tile:
    """Tile for a kind of row; element_size in bytes; hopper: wgmma is there (compute capability 9.0 and later).

    A second query for sinks and page lookups cost registers. Chosen with `compile_gate`, not yet timed on a GPU.

    fp32 dots run without tensor cores (TF32 would be another function) and take small tiles to stay in registers.
    """
    block_d = max(16, power_of_two(head_dim))
    least = power_of_two(group)
    split = {"decode": 512, "short": 2048, "long": 0}[kind]
    if element_size == 4:
        if kind == "long" and block_d > 64:
            return Tile(max(16, least), 16, block_d, split, 8, 2)
        return Tile(max(16, least), 16 if sinks and block_d <= 64 else 32, block_d, split, 8, 1)
    if kind == "decode":
        return Tile(max(16, least), 32 if sinks or block_d > 128 else 64, block_d, split, 4, 1, 168)
    if block_d > 128 or (kind == "short" and (not hopper or (sinks and block_d > 64))):
        return Tile(max(32, least), 32, block_d, split, 4, 2)
    if kind == "short":
        return Tile(max(64, least), 64, block_d, split, 4, 1)
    if not hopper and block_d > 64:
        return Tile(max(64, least), 64, block_d, split, 8, 2)
    if not hopper and paged:
        return Tile(max(32, least), 32, block_d, split, 4, 2)
    if paged:  # with more rows or warps the compiler loads K and V in the dot's own layout, a few bytes at a time
        return Tile(max(64, least), 64, block_d, split, 4, 2)
    return Tile(max(128, least), 64, block_d, split, 8, 2)


def mass_tile(head_dim: int, group: int, element_size: int) -> Tile:
    """Tile of the column mass kernel: block_n columns against block_m query rows at a time."""
    block_d = max(16, power_of_two(head_dim))
    if element_size == 4:
        return Tile(max(16, power_of_two(group)), 16 if block_d > 128 else 32, block_d, 0, 8, 1)
    if block_d > 128:
        return Tile(max(32, power_of_two(group)), 16, block_d, 0, 4, 1)
    return Tile(max(64, power_of_two(group)), 32 if block_d == 128 else 64, block_d, 0, 4, 1)
