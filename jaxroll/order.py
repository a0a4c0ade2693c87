"""Trace order is not sacred: puts equal subgraphs next to each other, where the search finds them.

XLA ignores the order of equations, so that another one costs nothing. The groups of
`jaxroll.scatter` are contracted, member by member, and the program is sorted by its
dependencies anew: an equation comes as early as it can, in trace order, but a group waits
until all of its members can run, one after the other. What has effects keeps its order.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import numpy as np

from jaxroll.options import RollOptions
from jaxroll.plan import Roll, find_rolls, saved
from jaxroll.program import Program, reordered
from jaxroll.repeats import Run
from jaxroll.report import Refusal
from jaxroll.scatter import Growth

_EFFORT = 4  # edges looked at, per operand of the program, before the search for groups stops
_LEAST_EFFORT = 30_000  # operands that the smallest program is taken to have
_FIRM = 60  # Rolls that save fewer equations may be coincidences, and are reconsidered.
_AS_MUCH = 0.75  # Fewer rolls may save this part of what more of them do.
_LOOSE_BODY = 4  # So may rolls with fewer equations in their bodies, which others might join.
_PER_ROLL = 8  # A loop costs as much to compile as so many equations.
_RESTARTS = 8  # of the sorting, each with fewer groups


def regroup(program: Program, rolls: list[Roll], refused: list[Refusal], options: RollOptions, min_saved: int):
  """The program with equal subgraphs together, its rolls, and refusals; the same ones if that saves nothing.

  And whether there are equal subgraphs that can't be together.

  Args:
    program: an analyzed jaxpr.
    rolls, refused: what the search has found in trace order.
    options: of the pass.
    min_saved: the fewest equations, nested ones counted, that are worth a roll.
  """
  best = (_score(program, rolls, min_saved), program, rolls, refused)
  tried: list[list[Roll]] = []
  is_apart = False
  for firm, least in ((min_saved, _LOOSE_BODY), (max(min_saved, _FIRM), 0)):
    kept = [r for r in rolls if saved(program, r) >= firm and _body(program, r, options) >= least]
    if kept in tried:
      continue
    tried.append(kept)
    *found, apart = _regrouped(program, kept, options, min_saved)
    is_apart |= apart
    if found[0] is None:
      best = (*best[:3], [*best[3], *found[2]])
    else:
      score = _score(*found[:2], min_saved)
      saves_as_much = _score(*found[:2], min_saved, 0) >= _AS_MUCH * _score(*best[1:3], min_saved, 0)
      best = (score, *found) if saves_as_much and score > best[0] else best
  return *best[1:], is_apart


def _body(program: Program, roll: Roll, options: RollOptions) -> int:
  """Equations of the body; draws, which `jaxroll.draws` has put together, count for more than what they are."""
  size = int(program.sizes[roll.start : roll.start + roll.period].sum())
  return size if options.strategy == "auto" else roll.period


def _score(program: Program, rolls: list[Roll], min_saved: int, each: int = _PER_ROLL) -> int:
  """What rolls are worth, in equations, if each of them costs some."""
  return sum(s - each for s in (saved(program, r) for r in rolls) if s >= min_saved)


def _regrouped(program: Program, kept: list[Roll], options: RollOptions, min_saved: int):
  """The program with groups together, its rolls, refusals, and whether groups stay apart; None, [], ... without any."""
  growth = Growth(program, kept, options, min_saved, effort(program))
  groups = growth.run()
  cut = [] if growth.is_done else [
      Refusal(0, 1, 1, "the search for scattered repeats stopped here: its bound on work is reached")]
  is_apart = growth.is_apart or not growth.is_done
  if len(groups) == len(kept) and all(g.size == r.end - r.start for g, r in zip(groups, kept)):
    return None, [], cut, is_apart
  order = arranged(program, groups, growth.is_whole)
  if order is None:
    return None, [], cut, is_apart
  other = reordered(program, order)
  rolls, refused = find_rolls(other, options, _runs(order, groups, options.min_trip_count))
  return other, rolls, [*refused, *cut], is_apart


def effort(program: Program) -> int:
  """How many edges of a program's dataflow the search for groups may look at."""
  return _EFFORT * (len(program.slots) + _LEAST_EFFORT)


def placed(order: np.ndarray, groups: list[np.ndarray]) -> list[np.ndarray]:
  """Per group, where its equations stand in another order: of those members that stand there in one piece."""
  place = np.empty(len(order), np.int64)
  place[order] = np.arange(len(order))
  return [at[(np.diff(at, axis=1) == 1).all(axis=1)] for at in (place[group] for group in groups)]


def _runs(order: np.ndarray, groups: list[np.ndarray], min_trip_count: int) -> list[Run]:
  """Where members of one group now follow one another."""
  runs = []
  for at in placed(order, groups):
    width = at.shape[1]
    starts = np.sort(at[:, 0])
    breaks = np.flatnonzero(np.diff(starts) != width) + 1
    for some in np.split(starts, breaks):
      if len(some) >= min_trip_count:
        runs.append(Run(int(some[0]), width, (len(some) - 1) * width))
  return runs


def arranged(program: Program, groups: list[np.ndarray], is_whole: list[bool]) -> np.ndarray | None:
  """An order that respects dependencies and effects, with members of groups together where that can be."""
  n = len(program.eqns)
  inner = program.slots >= 0
  fixed = np.flatnonzero(program.fingerprints < 0)
  before = np.concatenate([program.makers[program.slots[inner]], fixed[:-1]])
  after = np.concatenate([program.readers[inner], fixed[1:]])
  # Nodes: each iteration of a group, and a roll as a whole; then equations by themselves.
  flags = itertools.chain(is_whole, itertools.repeat(False))
  units = [(k, unit.ravel()) for k, (group, whole) in enumerate(zip(groups, flags))
           for unit in ([group] if whole else group)]
  for _ in range(_RESTARTS):
    node = np.full(n, -1)
    for i, (_, unit) in enumerate(units):
      node[unit] = i
    single = np.flatnonzero(node < 0)
    node[single] = len(units) + np.arange(len(single))
    order, stuck = _schedule(n, node, units, single, before, after)
    if not stuck:
      return np.asarray(order, np.int64)
    # Groups whose contraction makes a cycle are dissolved.
    most, _ = Counter(units[i][0] for i in stuck).most_common(1)[0]
    stuck = {i for i in stuck if units[i][0] == most}
    units = [unit for i, unit in enumerate(units) if i not in stuck]
  return None


def _schedule(n: int, node: np.ndarray, units, single: np.ndarray, before: np.ndarray, after: np.ndarray):
  """The order of equations, and units that make cycles, in which case there is no order."""
  count = len(units) + len(single)
  edges = np.unique((node[before] * count + node[after])[node[before] != node[after]])
  source, target = edges // max(count, 1), edges % max(count, 1)
  start = np.searchsorted(source, np.arange(count + 1)).tolist()
  waits = np.bincount(target, minlength=count).tolist()
  readers = target.tolist()
  first = [int(unit[0]) for _, unit in units] + single.tolist()
  group_of = [k for k, _ in units]
  left = Counter(group_of)
  ready: list[tuple[int, int]] = []  # equations by themselves, and units whose group is at hand
  pools: dict[int, list] = {k: [] for k in left}
  full: list[tuple[int, int]] = []  # groups all of whose members can run
  partly: list[tuple[int, int, int]] = []  # the others, those with most members at hand first; may be out of date

  def arrive(i: int) -> None:
    if i >= len(units):
      heapq.heappush(ready, (first[i], i))
      return
    k = group_of[i]
    heapq.heappush(pools[k], (first[i], i))
    if len(pools[k]) == left[k]:
      heapq.heappush(full, (pools[k][0][0], k))
    else:
      heapq.heappush(partly, (-len(pools[k]), pools[k][0][0], k))

  for i in range(count):
    if not waits[i]:
      arrive(i)
  order: list[int] = []
  done = 0

  def run(i: int) -> None:
    nonlocal done
    done += 1
    if i < len(units):
      order.extend(units[i][1].tolist())
    else:
      order.append(first[i])
    for j in readers[start[i] : start[i + 1]]:
      waits[j] -= 1
      if not waits[j]:
        arrive(j)

  while ready or full or partly:
    if ready:
      run(heapq.heappop(ready)[1])
      continue
    # Nothing else can run: a whole group, or else the one with most members at hand, and what can run after them.
    if full:
      _, k = heapq.heappop(full)
    else:
      size, _, k = heapq.heappop(partly)
      if len(pools[k]) != -size:
        continue
    pool = pools[k]
    while pool:
      left[k] -= 1
      run(heapq.heappop(pool)[1])
  if done == count:
    return order, set()
  return order, _cyclic(units, waits, start, readers, count)


def _cyclic(units, waits: list[int], start: list[int], readers: list[int], count: int) -> set[int]:
  """The units that wait and that others wait for in turn."""
  core = {i for i in range(count) if waits[i] > 0}
  feeds = {i: sum(j in core for j in readers[start[i] : start[i + 1]]) for i in core}
  makers: dict[int, list[int]] = {i: [] for i in core}
  for i in core:
    for j in readers[start[i] : start[i + 1]]:
      if j in core:
        makers[j].append(i)
  todo = [i for i in core if not feeds[i]]
  while todo:
    i = todo.pop()
    core.discard(i)
    for j in makers[i]:
      feeds[j] -= 1
      if not feeds[j] and j in core:
        todo.append(j)
  return {i for i in core if i < len(units)}
