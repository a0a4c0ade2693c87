"""Equal subgraphs wherever they stand, found by growing from equal fingerprints through the dataflow.

The search for repeats sees those that follow one another in trace order. Here are found
the others: equations hoisted out of the layers, blocks of one configuration here and
there, updates of parameters laid out operation by operation. A *group* is a matrix of
equations, members by columns; the equations of a column have one fingerprint, and the
members one wiring, compared exactly. `jaxroll.order` then puts the members next to each other.
"""

from __future__ import annotations

import functools
from collections import Counter, deque

import numpy as np

from jaxroll.draws import is_random
from jaxroll.options import RollOptions
from jaxroll.plan import Roll
from jaxroll.program import Program, stretches
from jaxroll.repeats import _mix
from jaxroll.work import draws_random_bits

_DEPTHS = (3, 1, 0)  # seeds are equations with equal surroundings, first wider, then narrower ones
_BIG_BODY = 40  # equations: such a body has some that far from its border
_READERS = 3  # of one value, that growth looks at
_ALREADY_READ = frozenset({  # what takes arrays apart, which a loop does as well or better by itself
    "slice", "dynamic_slice", "gather", "squeeze", "split", "unstack", "reshape", "random_split", "random_unwrap",
    "random_wrap", "concatenate", "stack"})
_APART = frozenset({"slice", "squeeze", "reshape"})
_TOGETHER = frozenset({"broadcast_in_dim", "expand_dims", "reshape"})


class OutOfBudget(Exception):
  """The bound on work is reached."""


class Growth:
  """The search for groups in one program.

  Args:
    program: an analyzed jaxpr.
    rolls: those whose equations are not to be taken apart.
    options: of the pass.
    min_saved: the fewest equations, nested ones counted, that a group must save.
    budget: how many operand and reader edges to look at, all members together.
    together: whether the members of a group must be such that they can all be put in one place.
    least_body: how many equations a group's members have at least; big ones are found from fewer seeds.
    left_out: equations that are to be in no group.

  `groups` holds what was found, first the rolls with what joined them; `is_whole` says for each of these
  whether its members are to stay together. `is_done` says whether the bound on work was not reached;
  `is_apart`, whether there were groups most of which can't be put in one place.
  """

  def __init__(self, program: Program, rolls: list[Roll], options: RollOptions, min_saved: int, budget: int,
               together: bool = True, least_body: int = 1, left_out: frozenset[int] = frozenset()):
    self.program = program
    self.options = options
    self.together, self.is_apart = together, False
    self.depths = _DEPTHS if least_body < _BIG_BODY else _DEPTHS[:1]
    self.min_trip_count, self.min_body_eqns = options.min_trip_count, max(options.min_body_eqns, least_body)
    self.min_saved = min_saved
    self.budget = budget
    self.is_done = True
    self.draws_memo: dict = {}
    self.phases_memo: dict[bytes, np.ndarray] = {}  # by the equations of a group
    self.random_memo: dict = {}
    n = len(program.eqns)
    self.maker, self.reader = program.makers, program.readers
    inner = np.flatnonzero(program.slots >= 0)
    self.reading = inner[np.argsort(program.slots[inner], kind="stable")]  # slots, by the value they read
    self.first_reading = np.searchsorted(program.slots[self.reading], np.arange(len(self.maker) + 1))
    self.free = program.fingerprints >= 0
    for roll in rolls:
      self.free[roll.start : roll.end] = False
    self.free[list(left_out)] = False
    self._leave_plumbing()
    some = np.flatnonzero(self.free)
    self.free_by_kind = some[np.argsort(program.fingerprints[some], kind="stable")]
    self.kinds_of_free = program.fingerprints[self.free_by_kind]
    self.member = np.full(n, -1)  # of the group that is growing
    self.column = np.full(n, -1)
    self.groups = [np.arange(r.start, r.end).reshape(r.trips, r.period) for r in rolls]
    self.is_whole = [True] * len(rolls)

  def run(self) -> list[np.ndarray]:
    """The groups: matrices of equations, members by columns, each member in an order in which it can run."""
    try:
      for k, roll in enumerate(self.groups):
        more = self._continued(roll)
        self.is_whole[k] = more is None
        if more is None:
          more = roll if self._only_draws(roll) else self._joined(roll)
        self.groups[k] = more
      if self._most_saved() >= self.min_saved:
        self._grow()
    except OutOfBudget:
      self.is_done = False
    return self.groups

  def _leave_plumbing(self) -> None:
    """Leaves alone what takes inputs apart and puts results together: loops read and return whole arrays."""
    program = self.program
    for e, eqn in enumerate(program.eqns):
      name = eqn.primitive.name
      if name in _APART and len(eqn.invars):
        value = int(program.slots[program.slot_start[e]])
        if value < 0 or (name != "slice" and not self.free[self.maker[value]]):
          self.free[e] = False
      if name in _TOGETHER and len(eqn.outvars) == 1:
        value = program.out_start[e]
        readers = self.reader[self.reading[self.first_reading[value] : self.first_reading[value + 1]]]
        if len(readers) and all(self._collects(r) for r in readers.tolist()):
          self.free[e] = False

  def _collects(self, e: int) -> bool:
    slots = self.program.slot_start[e + 1] - self.program.slot_start[e]
    return slots >= self.min_trip_count and self.program.eqns[e].primitive.name in ("concatenate", "stack")

  def _most_saved(self) -> int:
    """A bound on what groups can save."""
    _, kind, count = np.unique(self.program.fingerprints[self.free], return_inverse=True, return_counts=True)
    return int(self.program.sizes[self.free][count[kind] >= self.min_trip_count].sum())

  def _spend(self, edges: int) -> None:
    self.budget -= edges + 32  # an array operation has its price
    if self.budget < 0:
      raise OutOfBudget

  @functools.cached_property
  def _lists(self) -> tuple[list[int], list[int], list[int], list[int]]:
    """Where each equation's slots start, the maker of each; where its readers start, and these: as lists, for loops."""
    program = self.program
    sources = np.where(program.slots >= 0, self.maker[np.maximum(program.slots, 0)] if len(self.maker) else -1, -1)
    return (program.slot_start.tolist(), sources.tolist(), self.first_reading[program.out_start].tolist(),
            self.reader[self.reading].tolist())

  # Growing from seeds.

  def _grow(self) -> None:
    """Grows groups from seeds with the widest equal surroundings; from more seeds where that makes more of it."""
    alike = [self._alike(self._colors(depth)) for depth in self.depths]
    for level, (kind, seeds) in enumerate(alike):
      tried = np.zeros(len(self.free), bool)
      weight = [(-len(some) * int(self.program.sizes[some[0]]), int(some[0])) for some in seeds]
      for k in sorted(range(len(seeds)), key=weight.__getitem__):  # of equal ones the first in the program
        if len(seeds[k]) < self.min_trip_count:
          continue
        some = seeds[k][self.free[seeds[k]] & ~tried[seeds[k]]]
        if len(some) < self.min_trip_count:
          continue
        best = self._groups_from(some, tried)
        for wider, lists in alike[level + 1 :]:
          more = lists[wider[some[0]]]
          more = more[self.free[more]]
          if len(more) > len(some):
            best = max(best, self._groups_from(more, tried), key=lambda found: found[0])
            some = more
        for group in best[1]:
          self.free[group.ravel()] = False
          self.groups.append(group)

  def _alike(self, colors: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Per free equation which list it is in, and the lists of those with one color."""
    candidates = np.flatnonzero(self.free)
    _, kind, count = np.unique(colors[candidates], return_inverse=True, return_counts=True)
    of = np.full(len(self.free), -1)
    of[candidates] = kind
    order = np.argsort(kind, kind="stable")
    return of, np.split(candidates[order], np.cumsum(count)[:-1])

  def _groups_from(self, seeds: np.ndarray, tried: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """The groups that grow from some seeds, and how many equations they save."""
    columns = self._grown(seeds)
    tried[columns.ravel()] = True
    groups = self._verified(columns)
    return self._saved(groups), groups

  def _colors(self, depth: int) -> np.ndarray:
    """A hash per equation of its surroundings, `depth` edges far; boundaries are all alike."""
    program = self.program
    blank = np.uint64(7)
    colors = np.where(self.free, _mix(program.fingerprints.astype(np.uint64)), blank)
    place = _mix(np.arange(len(program.slots), dtype=np.uint64) - program.slot_start[self.reader].astype(np.uint64))
    inner = program.slots >= 0
    ends = program.out_start
    for _ in range(depth):
      above = np.full(len(program.slots), blank)
      above[inner] = colors[self.maker[program.slots[inner]]]
      above = _sums(_mix(above ^ place), program.slot_start)
      below = _mix(colors[self.reader[self.reading]] ^ place[self.reading] ^ np.uint64(1))
      below = _sums(below, self.first_reading[ends])
      colors = np.where(self.free, _mix(colors ^ _mix(above) ^ _mix(below + np.uint64(1))), blank)
    return colors

  def _grown(self, seeds: np.ndarray) -> np.ndarray:
    """The columns of the group that grows from these equations, whose members may yet differ in wiring."""
    columns: list[np.ndarray] = [seeds]
    self._claim(columns, 0)
    todo = deque(self._edges(seeds, 0))
    postponed: list[tuple] = []
    try:
      while True:
        while todo:
          edge = todo.popleft()
          found, agree = self._across(columns, edge)
          if agree is None:
            continue
          if not agree.all():
            postponed.append(edge)
            continue
          columns.append(found)
          self._claim(columns, len(columns) - 1)
          todo.extend(self._edges(found, len(columns) - 1))
        best = None
        again = []
        for edge in postponed:
          found, agree = self._across(columns, edge)
          if agree is None:
            continue
          again.append(edge)
          count = int(agree.sum())
          if count >= self.min_trip_count and (best is None or count > best[0]):
            best = count, found, agree, edge
        have = (len(columns[0]) - 1) * len(columns)
        if best is None or ((best[0] - 1) * (len(columns) + 1) < have and self._is_together(columns)):
          return np.stack(columns, axis=1)
        _, found, agree, edge = best
        postponed = again
        for column in columns:
          self.member[column] = self.column[column] = -1
        columns = [column[agree] for column in columns] + [found[agree]]
        for k in range(len(columns)):
          self._claim(columns, k)
        todo.extend(self._edges(columns[-1], len(columns) - 1))
    finally:
      for column in columns:
        self.member[column] = self.column[column] = -1

  def _is_together(self, columns) -> bool:
    """Whether enough members can be put in one place, at least in part."""
    return not self.together or any(part.shape[1] > 1 or len(columns) == 1 for part in self._together(np.stack(columns, axis=1)))

  def _claim(self, columns, k: int) -> None:
    self.member[columns[k]] = np.arange(len(columns[k]))
    self.column[columns[k]] = k

  def _edges(self, column: np.ndarray, k: int) -> list[tuple[int, int, int]]:
    """(column, operand slot, -1) and (column, result, which kind of its readers)."""
    program = self.program
    e = int(column[0])
    slots = int(program.slot_start[e + 1] - program.slot_start[e])
    edges = [(k, s, -1) for s in range(slots)]
    for r in range(int(program.out_start[e + 1] - program.out_start[e])):
      values = program.out_start[column] + r
      readers = int((self.first_reading[values + 1] - self.first_reading[values]).max())
      edges += [(k, r, q) for q in range(min(readers, _READERS))]
    return edges

  def _across(self, columns, edge):
    """What lies across an edge in each member, and the members that agree most; None where the group ends."""
    k, which, nth = edge
    program, column = self.program, columns[k]
    self._spend(len(column))
    if nth < 0:
      values = program.slots[program.slot_start[column] + which]
      found = np.where(values >= 0, self.maker[np.maximum(values, 0)], -1)
      place = values - program.out_start[np.maximum(found, 0)]
    else:
      found, place = self._nth_readers(program.out_start[column] + which, nth)
      if found is None:
        return None, None
    new = (found >= 0) & self.free[found] & (self.member[found] < 0)
    if not new.any():
      return None, None
    key = np.where(new, self._kinds(found, place), -1)
    agree = new if (key == key[0]).all() else key == _by_count(key[new])[0]
    one = found[agree].tolist()
    if len(set(one)) < len(one):
      return None, None  # what several members share is no part of any
    return found, agree

  def _kinds(self, eqns: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A number per equation and operand, equal for operands at one place of equal equations."""
    return self.program.fingerprints[eqns] * 1024 + np.minimum(places, 1023)

  def _nth_readers(self, values: np.ndarray, nth: int):
    """Per value the equation of the nth most frequent kind of their readers that reads it, or -1, and at which operand."""
    program = self.program
    first, end = self.first_reading[values], self.first_reading[values + 1]
    if (end - first == 1).all():
      slots = self.reading[first]
      found = self.reader[slots]
      if not nth and self.free[found].all():
        place = slots - program.slot_start[found]
        kinds = self._kinds(found, place)
        if (kinds == kinds[0]).all():
          return found, place
    at = first[:, None] + np.arange(_READERS)
    inside = at < end[:, None]
    slots = self.reading[np.where(inside, at, 0)]
    readers = self.reader[slots]
    inside &= self.free[readers]
    places = slots - program.slot_start[readers]
    kinds = np.where(inside, self._kinds(readers, places), -1)
    by_count = _by_count(kinds[inside])
    if nth >= len(by_count):
      return None, None
    hit = kinds == by_count[nth]
    chosen = np.arange(len(values)), hit.argmax(axis=1)
    return np.where(hit.any(axis=1), readers[chosen], -1), places[chosen]

  # Checking.

  def _verified(self, columns: np.ndarray) -> list[np.ndarray]:
    """Groups of members with one wiring that can be put in one place."""
    columns = columns[:, np.argsort(columns[0], kind="stable")]
    whole = [w for w in self._one_wiring(columns) if self._pays(w)]  # else no part of it does
    divided = self._together if self.together else self._convex
    groups = [g for w in whole for part in divided(w) for g in self._one_wiring(part) if self._pays(g)]
    self.is_apart |= 2 * self._saved(groups) < self._saved(whole)
    return groups

  def _saved(self, groups) -> int:
    return sum((len(g) - 1) * int(self.program.sizes[g[0]].sum()) for g in groups)

  def _pays(self, group: np.ndarray) -> bool:
    size = int(self.program.sizes[group[0]].sum())
    return len(group) >= self.min_trip_count and size >= self.min_body_eqns and self._saved([group]) >= self.min_saved

  def _one_wiring(self, columns: np.ndarray) -> list[np.ndarray]:
    """The members divided by which results of their own each operand is."""
    program = self.program
    trips, width = columns.shape
    self.member[columns] = np.arange(trips)[:, None]
    self.column[columns] = np.arange(width)
    counts = program.slot_start[columns[0] + 1] - program.slot_start[columns[0]]
    own = np.repeat(np.arange(width), counts)  # per slot, its column
    within = np.concatenate([np.arange(c) for c in counts.tolist()]) if width else np.zeros(0, int)
    self._spend(trips * len(own))
    slots = program.slots[program.slot_start[columns[:, own]] + within]
    made = np.where(slots >= 0, self.maker[np.maximum(slots, 0)], -1)
    inner = (made >= 0) & (self.member[made] == np.arange(trips)[:, None])
    column = np.where(inner, self.column[made], -1)
    wiring = np.where(inner, column * 1024 + slots - program.out_start[np.maximum(made, 0)], -1)
    self.member[columns] = self.column[columns] = -1
    ordered = (column < own).all(axis=1)  # what it reads stands before it
    columns, wiring = columns[ordered], wiring[ordered]
    if not len(columns):
      return []
    if (wiring == wiring[0]).all():
      return [columns]
    _, kind = np.unique(wiring, axis=0, return_inverse=True)
    kind = kind.ravel()
    return [columns[kind == k] for k in range(kind.max() + 1)]

  def _together(self, columns: np.ndarray) -> list[np.ndarray]:
    """The group divided so that no path leaves a part and comes back: each can be put in one place."""
    phases = self._phases(columns)
    first = phases.min(axis=1)
    core = (phases == first[:, None]).all(axis=0)
    parts = []
    if core.any():
      parts = [columns[first == p][:, core] for p in np.unique(first) if (first == p).sum() >= self.min_trip_count]
    if core.any() and not core.all():
      parts += self._together(columns[:, ~core])
    return parts

  def _convex(self, columns: np.ndarray) -> list[np.ndarray]:
    """The group divided so that no path leaves a member and comes back, as a member of median span and the shortest have it.

    The last layer's forward and backward may be one piece, where no other's are.
    """
    spans = columns.max(axis=1) - columns.min(axis=1)
    by_span = np.argsort(spans, kind="stable")
    phases = np.stack([self._phases(columns[[k]])[0] for k in (by_span[0], by_span[len(by_span) // 2])])
    return [columns[:, (phases.T == p).all(axis=1)] for p in np.unique(phases, axis=1).T]

  def _phases(self, columns: np.ndarray) -> np.ndarray:
    """Per equation of a group, how often at most a path to it from the group leaves and comes back."""
    nodes = np.sort(columns, axis=None)
    key = nodes.tobytes()
    if key not in self.phases_memo:
      self.phases_memo[key] = self._phases_of(nodes)
    return self.phases_memo[key][np.searchsorted(nodes, columns)]

  def _phases_of(self, nodes: np.ndarray) -> np.ndarray:
    """The same for a group's equations in trace order."""
    low, high = int(nodes[0]), int(nodes[-1])
    if high - low + 1 == len(nodes):
      return np.zeros(len(nodes), int)
    # No path comes back through what stands behind the last of the others that the group reads.
    is_own = np.zeros(len(self.free), bool)
    is_own[nodes] = True
    made, read = self._made(nodes), self._readers(nodes)
    last = int(made[~is_own[made]].max(initial=-1))
    if not (~is_own[read] & (read <= last)).any():
      return np.zeros(len(nodes), int)
    slot_start, sources, first_reader, readers = self._lists
    inside = bytearray(is_own)
    reached = bytearray(inside)
    phase = [-1] * (len(reached) + 1)  # the last one stands for what comes from outside
    for_inside = phase.copy()  # the phase of a reader that is in the group
    count, e = 0, low
    while e >= 0:  # equations stand behind what they read
      count += 1
      made = sources[slot_start[e] : slot_start[e + 1]]
      if inside[e]:
        phase[e] = for_inside[e] = max([0] + [for_inside[source] for source in made])
      else:
        phase[e] = max([phase[source] for source in made])
        for_inside[e] = phase[e] + 1
      for reader in readers[first_reader[e] : first_reader[e + 1]]:
        if reader <= last:
          reached[reader] = 1
      e = reached.find(1, e + 1)
    self._spend(2 * count)
    return np.asarray([phase[e] for e in nodes.tolist()])

  def _made(self, nodes: np.ndarray) -> np.ndarray:
    """The equations whose results some equations read."""
    program = self.program
    first = program.slot_start[nodes]
    values = program.slots[stretches(first, program.slot_start[nodes + 1] - first)]
    return self.maker[values[values >= 0]]

  def _readers(self, nodes: np.ndarray) -> np.ndarray:
    """The equations that read results of some equations."""
    first = self.first_reading[self.program.out_start[nodes]]
    return self.reader[self.reading[stretches(first, self.first_reading[self.program.out_start[nodes + 1]] - first)]]

  # Rolls that other iterations and equations join.

  def _continued(self, roll: np.ndarray) -> np.ndarray | None:
    """The roll's iterations with others like them from elsewhere, if there are any."""
    program = self.program
    template = roll[0].tolist()
    kinds = program.fingerprints[roll[0]]
    counts = np.searchsorted(self.kinds_of_free, kinds, "right") - np.searchsorted(self.kinds_of_free, kinds)
    if not counts.all():
      return None  # an equation that stands nowhere else
    root = int(np.argmin(counts))
    low = int(np.searchsorted(self.kinds_of_free, kinds[root]))
    rows, used = [], set()
    for e in np.sort(self.free_by_kind[low : low + counts[root]]).tolist():
      row = self._matched(template, root, e, used) if self.free[e] and e not in used else None
      if row is not None:
        rows.append(row)
        used.update(row)
    if not rows:
      return None
    same = self._one_wiring(np.concatenate([roll, rows]))
    group = next((g for g in same if len(g) > len(roll) and (g[:, 0] == roll[0, 0]).any()), None)
    parts = [] if group is None else self._together(group)
    if len(parts) != 1 or parts[0].shape != group.shape:
      return None
    self.free[group.ravel()] = False
    return group

  def _matched(self, template: list[int], root: int, e: int, used: set[int]) -> list[int] | None:
    """The equations that stand to `e` as those of the template to its `root`."""
    program = self.program
    first, last = template[0], template[-1]
    match = {root: e}
    todo = [root]
    self._spend(4 * len(template))

    def add(k: int, found: int) -> bool:
      if k in match:
        return match[k] == found
      if not self.free[found] or found in used or program.fingerprints[found] != program.fingerprints[template[k]]:
        return False
      match[k] = found
      todo.append(k)
      return True

    while todo:
      k = todo.pop()
      old, new = template[k], match[k]
      shift = int(program.slot_start[new] - program.slot_start[old])
      for s in range(program.slot_start[old], program.slot_start[old + 1]):
        value = int(program.slots[s])
        if value < program.out_start[first]:
          continue
        other = int(program.slots[s + shift])
        if other < 0 or not add(int(self.maker[value]) - first, int(self.maker[other])):
          return None
      shift = int(program.out_start[new] - program.out_start[old])
      for value in range(program.out_start[old], program.out_start[old + 1]):
        there = self._read_at(value + shift)
        for reader, slot in self._read_at(value):
          if not first <= reader <= last or reader - first in match:
            continue
          others = [r for r, s in there if s == slot
                    and program.fingerprints[r] == program.fingerprints[reader] and r not in match.values()]
          if not others or not add(reader - first, others[0]):
            return None
    return [match[k] for k in range(len(template))] if len(match) == len(template) else None

  def _read_at(self, value: int) -> list[tuple[int, int]]:
    """The equations that read a value, and at which operand; not all of very many."""
    slots = self.reading[self.first_reading[value] : self.first_reading[value + 1]][: 4 * _READERS]
    readers = self.reader[slots]
    return list(zip(readers.tolist(), (slots - self.program.slot_start[readers]).tolist()))

  def _only_draws(self, group: np.ndarray) -> bool:
    """Whether it is a roll of draws, gathered to be made at once: the less it makes of them, the less waits."""
    return self.options.strategy == "auto" and all(
        is_random(self.program.eqns[e], self.random_memo) for e in group[0].tolist()) and any(
        draws_random_bits(self.program.eqns[e], self.draws_memo) for e in group[0].tolist())

  def _joined(self, group: np.ndarray) -> np.ndarray:
    """A roll's iterations with what each alone reads from before the roll or, after it, is read by alone.

    What joins stands before the roll or needs nothing made after it, so that it can be moved.
    """
    low, high = int(group[0, 0]), int(group[-1, -1])
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []
    columns = list(group.T)
    for k, column in enumerate(columns):
      self._claim(columns, k)
    todo = deque(edge for k in self._at_border(columns) for edge in self._edges(columns[k], k))
    while todo:
      edge = todo.popleft()
      found, agree = self._across(columns, edge)
      if agree is None or not agree.all() or not self._may_join(found, low, high, edge[2] < 0):
        continue
      (before if edge[2] < 0 else after).append(found)
      columns.append(found)
      self._claim(columns, len(columns) - 1)
      todo.extend(self._edges(found, len(columns) - 1))
    for column in columns:
      self.member[column] = self.column[column] = -1
    if len(columns) == group.shape[1]:
      return group
    key = lambda c: int(c[0])
    joined = np.stack([*sorted(before, key=key), *group.T, *sorted(after, key=key)], axis=1)
    same = self._one_wiring(joined)
    if len(same) != 1 or len(same[0]) != len(group):
      return group  # the roll's own wiring is checked by the plan; what joined it differs
    self.free[joined.ravel()] = False
    return joined

  def _at_border(self, columns: list[np.ndarray]) -> list[int]:
    """The columns next to equations that are in no group, as the last member has it."""
    program = self.program
    border = []
    for k, column in enumerate(columns):
      e = int(column[-1])
      values = program.slots[program.slot_start[e] : program.slot_start[e + 1]]
      made = self.maker[values[values >= 0]]
      low, high = program.out_start[e], program.out_start[e + 1]
      read = self.reader[self.reading[self.first_reading[low] : self.first_reading[high]]]
      if self.free[made].any() or self.free[read].any():
        border.append(k)
    return border

  def _may_join(self, found: np.ndarray, low: int, high: int, is_operand: bool) -> bool:
    program = self.program
    eqn = program.eqns[found[0]]
    if eqn.primitive.name in _ALREADY_READ or draws_random_bits(eqn, self.draws_memo):
      return False  # draws are made together, by `jaxroll.draws`
    if is_operand:
      if (found > low).any():
        return False
      for i, e in enumerate(found.tolist()):
        values = slice(self.first_reading[program.out_start[e]], self.first_reading[program.out_start[e + 1]])
        readers = self.reader[self.reading[values]]
        if (self.member[readers] != i).any():
          return False
        if (program.last_use[program.out_start[e] : program.out_start[e + 1]] == len(program.eqns)).any():
          return False
      return True
    if (found < high).any():
      return False
    for i, e in enumerate(found.tolist()):
      values = program.slots[program.slot_start[e] : program.slot_start[e + 1]]
      made = self.maker[values[values >= 0]]
      if ((made >= low) & (self.member[made] != i)).any():
        return False
    return True


def _by_count(kinds: np.ndarray) -> list[int]:
  """The distinct ones, the most frequent first, of equally frequent ones that which comes first."""
  return [kind for kind, _ in Counter(kinds.tolist()).most_common()]


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
  """The sum, modulo 2**64, of each stretch of the values."""
  with np.errstate(over="ignore"):
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    return total[starts[1:]] - total[starts[:-1]]
