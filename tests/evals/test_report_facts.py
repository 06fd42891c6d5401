"""Which tokens of the evidence a row still attends."""

from __future__ import annotations

import numpy as np

from kvgate.evals.run.runner import kept_percent
from kvgate.lifecycle.pool import PagePool
from kvgate.lifecycle.tables import Geometry, Tables


def test_share_of_lists_that_hold_each_token() -> None:
    tables = Tables(PagePool(64), Geometry(layers=2, kv_heads=2, page_size=8))
    row = tables.create()
    tables.append([row], [30], [0])
    assert kept_percent(tables, row, ()) is None
    assert kept_percent(tables, row, ((3, 5), (28, 30))) == ((100, 100), (100, 100))
    keep = tables.live_slots(row).copy()
    slots = tables.positions[tables.pages[row, :, :, : tables.width([row])]].reshape(keep.shape)
    keep[0, 0] &= slots[0, 0] != 4  # one list of four forgets token 4
    keep &= slots < 29  # all forget token 29
    keep &= slots >= 2  # a whole stretch, so that pages move
    tables.retain(row, keep)
    tables.compact(row)
    assert kept_percent(tables, row, ((1, 5), (28, 30))) == ((0, 100, 100, 75), (100, 0))
    child = tables.fork(row)
    tables.append([child], [3], [30])
    assert kept_percent(tables, child, ((28, 32),)) == ((100, 0, 100, 100),)


def test_a_span_nobody_holds_is_zero_and_low_shares_round_down() -> None:
    tables = Tables(PagePool(2000), Geometry(layers=60, kv_heads=2, page_size=8))
    row = tables.create()
    tables.append([row], [16], [0])
    keep = np.zeros_like(tables.live_slots(row))
    keep[0, 0, 0] = True
    keep[:, :, 9] = True
    keep[5, 1, 9] = False
    tables.retain(row, keep)
    assert kept_percent(tables, row, ((0, 1), (9, 10), (15, 16))) == ((0,), (99,), (0,))
