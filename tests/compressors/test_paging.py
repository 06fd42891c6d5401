"""Whole pages out of any counts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.compressors.paging import whole_pages
from kvgate.compressors.policy import Shape


@given(
    heads=st.lists(
        st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60)).map(sorted), min_size=6, max_size=6
    ),
    page=st.sampled_from([8, 16, 32]),
    shape=st.sampled_from(["layer", "model"]),
)
@settings(max_examples=300, deadline=None)
def test_pages_are_full_and_the_whole_budget_is_used(heads: list[list[int]], page: int, shape: Shape) -> None:
    least, kept, most = torch.tensor(heads).T.reshape(3, 2, 3)
    found = whole_pages(kept, least, most, page, shape)
    assert ((least <= found) & (found <= most)).all()
    partial = (found % page > 0) & (found != least) & (found != most)
    groups = (2, 3) if shape == "layer" else (1, 6)
    assert (partial.reshape(groups).sum(-1) <= 1).all(), "pages are full but one of a group, or must be what they are"
    assert torch.equal(found.reshape(groups).sum(-1), kept.reshape(groups).sum(-1))


def test_slots_go_where_least_is_lacking() -> None:
    kept = torch.tensor([[15, 9, 8, 20]])
    found = whole_pages(kept, torch.zeros_like(kept), torch.full_like(kept, 99), 8, "layer")
    assert found.tolist() == [[16, 8, 8, 20]], "who lacks one gets it; four are left over and begin a page"
