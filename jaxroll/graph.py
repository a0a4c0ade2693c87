"""Strongly connected components: what depends on itself, from iteration to iteration."""

from __future__ import annotations


def components(edges: dict[int, list[int]]) -> dict[int, int]:
  """Per node of a graph, given by where each node's edges lead, a number for its strongly connected component.

  Tarjan's algorithm (1972), without recursion: in time linear in the number of edges.

  >>> components({0: [1], 1: [0], 2: [1]})
  {1: 0, 0: 0, 2: 1}
  """
  lowest: dict[int, int] = {}  # per node the earliest visit that it is known to lead back to
  component: dict[int, int] = {}
  waiting: list[int] = []
  count = 0
  for root in edges:
    path = [] if root in lowest else [(root, iter(edges[root]), len(lowest))]
    while path:
      node, rest, visit = path[-1]
      if node not in lowest:
        lowest[node] = visit
        waiting.append(node)
      for other in rest:
        if other not in lowest:
          path.append((other, iter(edges[other]), len(lowest)))
          break
        if other not in component:
          lowest[node] = min(lowest[node], lowest[other])
      else:
        path.pop()
        if path:
          lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
        if lowest[node] == visit:
          while node not in component:
            component[waiting.pop()] = count
          count += 1
  return component
