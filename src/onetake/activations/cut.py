"""The fewest bytes from which everything else can be computed: a minimum vertex cut.

Nodes are blocks of memory in the order they were made; each is an edge of the flow network, from where it is made to where it
is used. A transformer block has about a hundred, and one graph serves every block of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx


def smallest_kept(sizes: Sequence[int], sources: Sequence[Sequence[int] | None], wanted: Iterable[int]) -> set[int]:
    """The nodes to keep, of least total size, so that every wanted node is kept or follows from kept ones.

    ``sources[i]`` lists the nodes that node i can be recomputed from (none: from nothing), or is None if it cannot be
    recomputed. Among equal cuts the one nearest to the wanted nodes, which leaves least to recompute.
    """
    flow, needed = networkx.DiGraph(), set(wanted)
    flow.add_nodes_from(("start", "end"))
    flow.add_edges_from((("used", node), "end") for node in needed)  # without a capacity, an edge is never cut
    waiting = list(needed)
    while waiting:
        node = waiting.pop()
        flow.add_edge(("made", node), ("used", node), capacity=sizes[node])
        parents = sources[node]
        if parents is None:
            flow.add_edge("start", ("made", node))
        for parent in parents or ():
            flow.add_edge(("used", parent), ("made", node))
        waiting += set(parents or ()) - needed
        needed |= set(parents or ())
    # networkx takes for the end's side what still reaches the end: of all smallest cuts the one nearest to it
    _, (_, behind) = networkx.minimum_cut(flow, "start", "end")
    return {node for node in needed if ("used", node) in behind and ("made", node) not in behind}
