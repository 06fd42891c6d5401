"""Live words: the bitmask of the slots a sequence still attends in one page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
PAGE_SIZES = (8, 16, 32)


def unpack(words: Words, page_size: int) -> NDArray[np.bool_]:
    """Bool ``[..., P * page_size]`` from uint32 ``[..., P]``."""
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)[..., : page_size // 8]
    bits = np.unpackbits(octets, axis=-1, bitorder="little")
    return bits.reshape(*words.shape[:-1], words.shape[-1] * page_size).view(np.bool_)


def pack(slots: NDArray[np.bool_], page_size: int) -> Words:
    """uint32 ``[..., P]`` from bool ``[..., P * page_size]``."""
    shape = (*slots.shape[:-1], slots.shape[-1] // page_size)
    octets = np.packbits(slots.reshape(*shape, page_size), axis=-1, bitorder="little")
    padded = np.zeros((*shape, 4), np.uint8)
    padded[..., : page_size // 8] = octets
    return padded.view(np.uint32)[..., 0]


def full_word(page_size: int) -> np.uint32:
    """The word of a page whose slots are all live."""
    return np.uint32((1 << page_size) - 1)


def lowest_dead(words: Words, page_size: int) -> NDArray[np.int64]:
    """Index of the lowest dead slot of each word; the words must have one."""
    dead = ~words & full_word(page_size)
    lowest = dead & (~dead + np.uint32(1))
    return np.bitwise_count(lowest - np.uint32(1)).astype(np.int64)
