"""The minimum cut against trying every subset, and its preference among equals."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from onetake.activations.cut import smallest_kept

Sources = list[list[int] | None]


def node(index: int) -> st.SearchStrategy[list[int] | None]:
    """What node `index` can be recomputed from: nothing, earlier nodes, or None if it cannot be."""
    return st.none() | (st.lists(st.integers(0, index - 1), max_size=3) if index else st.just([]))


GRAPHS = st.integers(1, 9).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 5), min_size=count, max_size=count),
        st.tuples(*map(node, range(count))).map(list),
        st.sets(st.integers(0, count - 1)),
    )
)


def follows(sources: Sources, kept: set[int]) -> set[int]:
    """Everything that is kept or can be recomputed; nodes come in order."""
    known = set(kept)
    for index, parents in enumerate(sources):
        if parents is not None and known.issuperset(parents):
            known.add(index)
    return known


@given(graph=GRAPHS)
@settings(max_examples=400, deadline=None)
def test_smallest_against_every_subset(graph):
    sizes, sources, wanted = graph
    kept = smallest_kept(sizes, sources, wanted)
    assert wanted <= follows(sources, kept)
    subsets = (set(c) for n in range(len(sizes) + 1) for c in combinations(range(len(sizes)), n))
    best = min(sum(sizes[i] for i in subset) for subset in subsets if wanted <= follows(sources, subset))
    assert sum(sizes[i] for i in kept) == best


def test_gate_and_up_beat_their_product_and_what_follows():
    """SwiGLU: silu(gate), gate, up and the product are wanted; two tensors give all four."""
    gate, up, silu, product = 0, 1, 2, 3
    sources: Sources = [None, None, [gate], [silu, up]]
    assert smallest_kept([8, 8, 8, 8], sources, [gate, up, silu, product]) == {gate, up}


def test_a_sum_is_kept_rather_than_its_terms_and_nearest_to_its_use_among_equals():
    """LoRA: base and update are as large as their sum; of the sum and its rotation, the rotation saves work."""
    sources: Sources = [None, None, [0, 1], [2]]
    assert smallest_kept([8, 8, 8, 8], sources, [3]) == {3}
    assert smallest_kept([8, 8, 8, 16], sources, [3]) == {2}
    assert smallest_kept([8, 8, 8, 8], [None, [], [0, 1], [2]], [1]) == set()
