"""The fewest bytes from which everything else can be computed: a minimum vertex cut. Pure Python.

Nodes are blocks of memory in the order they were made. Maximum flow by breadth-first augmentation (Edmonds and Karp 1972);
a transformer block has about a hundred nodes, and one graph serves every block of its kind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

Residual = list[dict[int, float]]


def smallest_kept(sizes: Sequence[int], sources: Sequence[Sequence[int] | None], wanted: Iterable[int]) -> set[int]:
    """The nodes to keep, of least total size, so that every wanted node is kept or follows from kept ones.

    ``sources[i]`` lists the nodes that node i can be recomputed from (none: from nothing), or is None if it cannot be
    recomputed. Among equal cuts the one nearest to the wanted nodes, which leaves least to recompute.
    """
    count = len(sizes)
    start, end = 2 * count, 2 * count + 1
    residual: Residual = [{} for _ in range(2 * count + 2)]

    def edge(one: int, other: int, capacity: float) -> None:
        residual[one][other] = residual[one].get(other, 0.0) + capacity
        residual[other].setdefault(one, 0.0)

    for node in _ancestors(sources, wanted):
        edge(2 * node, 2 * node + 1, sizes[node])
        parents = sources[node]
        if parents is None:
            edge(start, 2 * node, math.inf)
        else:
            for parent in parents:
                edge(2 * parent + 1, 2 * node, math.inf)
    for node in set(wanted):
        edge(2 * node + 1, end, math.inf)
    while _augment(residual, start, end):
        pass
    reaching = _reaching(residual, end)
    return {
        node for node in range(count) if 2 * node + 1 in reaching and 2 * node not in reaching and residual[2 * node]
    }


def _ancestors(sources: Sequence[Sequence[int] | None], wanted: Iterable[int]) -> set[int]:
    found, open_ = set(wanted), list(set(wanted))
    while open_:
        for parent in sources[open_.pop()] or ():
            if parent not in found:
                found.add(parent)
                open_.append(parent)
    return found


def _augment(residual: Residual, start: int, end: int) -> bool:
    """Push flow along one shortest path; False if there is none."""
    came_from = {start: start}
    queue = deque([start])
    while queue and end not in came_from:
        node = queue.popleft()
        for other, capacity in residual[node].items():
            if capacity > 0 and other not in came_from:
                came_from[other] = node
                queue.append(other)
    if end not in came_from:
        return False
    path = [end]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    steps = list(zip(path[1:], path[:-1], strict=True))
    flow = min(residual[one][other] for one, other in steps)
    for one, other in steps:
        residual[one][other] -= flow
        residual[other][one] += flow
    return True


def _reaching(residual: Residual, end: int) -> set[int]:
    """Nodes from which more could flow to `end`."""
    found, open_ = {end}, [end]
    while open_:
        node = open_.pop()
        for other in residual[node]:
            if other not in found and residual[other].get(node, 0.0) > 0:
                found.add(other)
                open_.append(other)
    return found
