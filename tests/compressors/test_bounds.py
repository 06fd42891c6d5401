"""Bounds, the form that policies take while several tokens are fed at once, against a token-by-token count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.compressors.evidence import Span
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import Bounds, Policy, covered
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda at: Span(at[0], at[0] + at[1])), max_size=4
).map(tuple)


def visible(query: int, lower: int, exempt: tuple[Span, ...]) -> set[int]:
    """What the kernels let a query see (the rule in kvgate.kernels.types), without a native window."""
    return {k for k in range(query + 1) if k >= lower or any(span.start <= k < span.end for span in exempt)}


@given(window=st.integers(1, 15), exempt=SPANS, first=st.integers(0, 50), count=st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_each_query_sees_the_exempt_and_the_newest_others(
    window: int, exempt: tuple[Span, ...], first: int, count: int
) -> None:
    inside = {token for span in exempt for token in range(span.start, span.end)}
    positions = np.arange(first, first + count)
    bounds = Bounds(window, exempt)
    lower = bounds.lower(positions)
    for native in (None, 1, window, window + 3):
        shown = {
            query: set(range(0 if native is None else max(0, query - native + 1), query + 1)) for query in positions
        }
        hidden = any(shown[query] - visible(query, low, exempt) for query, low in zip(positions, lower, strict=True))
        assert bounds.hide(positions, native) == hidden
    assert lower.shape == positions.shape
    for query, low in zip(positions.tolist(), lower.tolist(), strict=True):
        others = [token for token in range(query + 1) if token not in inside][-window:]
        assert visible(query, low, exempt) == set(others) | {token for token in inside if token <= query}


@given(
    policy=st.one_of(
        st.builds(SlidingWindow, window=st.integers(1, 30)),
        st.builds(StreamingLLM, window=st.integers(1, 30), sinks=st.integers(0, 6)),
    ),
    protected=SPANS,
    first=st.integers(0, 50),
)
@settings(max_examples=200, deadline=None)
def test_bounds_show_exactly_what_decisions_after_every_token_would_have_kept(
    policy: SlidingWindow | StreamingLLM, protected: tuple[Span, ...], first: int
) -> None:
    """Feeding a chunk under Bounds and feeding it token by token are the same policy."""
    if policy.budget <= covered(policy.forced_spans(protected)):
        return
    bounds = policy.bounds(protected)
    inside = {token for span in policy.forced_spans(protected) for token in range(span.start, span.end)}
    positions = np.arange(first, first + 25)
    held = set(range(first))
    for query, low in zip(positions.tolist(), bounds.lower(positions).tolist(), strict=True):
        held.add(query)
        forced = held & inside
        held = forced | set(sorted(held - inside)[-bounds.window :])
        assert visible(query, low, bounds.exempt) == held
        assert len(held) <= policy.budget


@pytest.mark.parametrize("policy", [H2O(heavy=2, recent=2)])
def test_policies_without_bounds_attend_all_that_is_live(policy: Policy) -> None:
    assert policy.bounds(()) is None
