"""Prefix hits in the engine: cached blocks become the start of a sequence's tables, and prompts enter the cache."""

from __future__ import annotations

import numpy as np

from kvgate.compressors.evidence import Need
from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence
from kvgate.lifecycle.ledger import Ledger
from kvgate.lifecycle.prefix.cache import Hold, PrefixCache, Tokens
from kvgate.lifecycle.words import full_word


def start(engine: Engine, ledger: Ledger, hold: Hold, needs: frozenset[Need] = frozenset()) -> Sequence:
    """A sequence that begins with the blocks of ``hold``: the tables get references of their own.

    ``needs``: evidence to collect from here on; what the cached tokens showed is not known.
    """
    if hold.blocks == 0:
        return engine.begin(needs=needs)
    geometry = engine.tables.geometry
    pages = hold.pages()
    ledger.share(pages)
    shaped = pages.reshape(hold.blocks, geometry.layers, geometry.kv_heads).transpose(1, 2, 0)
    live = np.full(shaped.shape, full_word(geometry.page_size), np.uint32)
    return Sequence(engine.tables.adopt(np.ascontiguousarray(shaped), live), length=hold.tokens, collect=needs)


def remember(engine: Engine, cache: PrefixCache, hold: Hold, row: Sequence, prompt: Tokens) -> int:
    """Enter the whole blocks of a computed prompt; returns how many were new.

    Nothing enters of a sequence that was evicted approximately, nor of one whose native windows have already dropped
    pages of this prompt: a later hit could not attend them.
    """
    size = engine.tables.geometry.page_size
    blocks = len(prompt) // size
    tables = engine.tables
    if blocks <= hold.blocks:
        return 0
    words = tables.live[row.id, :, :, :blocks]
    whole = int(tables.counts[row.id].min()) >= blocks and bool((words == full_word(size)).all())
    pages = np.ascontiguousarray(tables.pages[row.id, :, :, :blocks].transpose(2, 0, 1)).reshape(-1)
    return cache.insert(hold, prompt[: blocks * size], pages, exact=whole and not row.tainted)
