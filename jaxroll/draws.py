"""Random numbers drawn together: reorders a program so that equal draws stand next to each other.

A generator is dear to compile and cheap to run, and XLA gets a copy of it for every
draw: dropout's masks, wherever they stand in a program, cost more to compile than
all the rest. But draws depend on keys alone, and keys on little. So the equations
that derive keys go to the front, and after them the draws, equal ones together,
where the search finds them as repeats like any other and one loop makes them all.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from jaxroll import compat
from jaxroll.fingerprint import nested_jaxprs
from jaxroll.program import Program, live_equations, reordered
from jaxroll.work import FUSIBLE, draws_random_bits

# Key derivations have small values; anything bigger on a draw's way is not a key.
_KEY_BYTES = 1 << 16
_RANDOM = frozenset({"random_bits", "random_split", "random_fold_in", "random_seed", "random_wrap", "random_unwrap",
                     "threefry2x32", "iota_2x32_shape"})
_KEYED = frozenset({"random_bits", "random_split", "random_fold_in"})
_PLUMBING = FUSIBLE | _RANDOM | {"gather", "concatenate"}


def is_random(eqn, memo: dict) -> bool:
  """Whether an equation does nothing but derive keys, draw bits, and arithmetic that fuses with them.

  Only threefry gives for many keys at once the bits that it gives for each: other generators' keys are left alone.
  """
  if eqn.primitive.name in _KEYED and compat.key_impl(eqn.invars[0].aval) != "threefry2x32":
    return False
  if not eqn.params or eqn.primitive.name not in ("jit", "closed_call"):
    return eqn.primitive.name in _PLUMBING
  for jaxpr in nested_jaxprs(eqn.params):
    found = memo.get(id(jaxpr))
    if found is None:
      eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
      found = memo[id(jaxpr)] = (all([is_random(e, memo) for e in eqns]), jaxpr)
    if not found[0]:
      return False
  return True


def how_many(program: Program) -> int:
  """The equations that draw random bits."""
  memo: dict = {}
  return sum(draws_random_bits(e, memo) for e in program.eqns)


def gather(program: Program, loose, min_trip_count: int):
  """The program with equal draws together; None if no draws can be moved.

  Args:
    program: an analyzed jaxpr.
    loose: bool[equations], which ones may be moved.
    min_trip_count: so many equal draws are worth the while.
  """
  draws_memo: dict = {}
  draws = [e for e in np.flatnonzero(loose).tolist() if draws_random_bits(program.eqns[e], draws_memo)]
  if len(draws) < min_trip_count:
    return None
  walk = _Keys(program)
  draws = [e for e in draws if walk.is_free(e) and walk.is_early(e)]
  readers = _readers(program)
  groups: dict[tuple, list[list[int]]] = defaultdict(list)
  for e in draws:
    cluster = _cluster(program, e, readers)
    groups[tuple(program.fingerprints[cluster].tolist())].append(cluster)
  chosen = [g for g in groups.values() if len(g) >= min_trip_count]
  if not chosen:
    return None
  live = set(map(id, live_equations(program.jaxpr)))
  unread = [e for e in np.flatnonzero(loose).tolist()
            if id(program.eqns[e]) not in live and walk.is_free(e) and walk.is_early(e)]
  # Keys that nothing reads are where others derive keys that are read: they must not stay behind.
  keys = walk.derivations(c[0] for g in chosen for c in g) | walk.derivations(unread) | set(unread)
  first = sorted(keys)
  for group in chosen:
    for cluster in group:
      if cluster[0] not in keys:  # a draw that another's key depends on has gone to the front
        first += cluster
  moved = set(first)
  order = first + [e for e in range(len(program.eqns)) if e not in moved]
  if order == list(range(len(order))):
    return None
  return reordered(program, np.asarray(order))


class _Keys:
  """What draws depend on."""

  def __init__(self, program: Program):
    self.program = program
    self.maker = program.makers.tolist()
    self.memo: dict = {}
    self.early: dict[int, bool] = {}

  def is_free(self, e: int) -> bool:
    """Whether the equation may be moved, and is random-number code."""
    return self.program.fingerprints[e] >= 0 and is_random(self.program.eqns[e], self.memo)

  def operands(self, e: int) -> list[int]:
    """The equations that make its operands."""
    slots = self.program.slots[self.program.slot_start[e] : self.program.slot_start[e + 1]].tolist()
    return [self.maker[v] for v in slots if v >= 0]

  def _is_small(self, e: int) -> bool:
    outs = slice(self.program.out_start[e], self.program.out_start[e + 1])
    return int(self.program.out_bytes[outs].sum()) <= _KEY_BYTES

  def is_early(self, e: int) -> bool:
    """Whether all that the operands depend on is small random-number code."""
    todo = self.operands(e)
    path: list[int] = []
    while todo:
      d = todo[-1]
      if self.early.get(d) is False:
        return False
      if d in self.early:
        todo.pop()
        continue
      if path and path[-1] == d:  # all that it depends on has been seen
        self.early[d] = True
        path.pop()
        todo.pop()
        continue
      if not (self.is_free(d) and self._is_small(d)):
        self.early.update(dict.fromkeys([d, *path], False))
        return False
      path.append(d)
      todo += [o for o in self.operands(d) if self.early.get(o) is not True]
    return True

  def derivations(self, draws) -> set[int]:
    """The equations that these draws depend on."""
    found: set[int] = set()
    todo = [o for e in draws for o in self.operands(e)]
    while todo:
      e = todo.pop()
      if e not in found:
        found.add(e)
        todo += self.operands(e)
    return found


def _readers(program: Program):
  """Per value, the equations that read it, as a function."""
  order = np.argsort(program.slots, kind="stable")
  values = program.slots[order]
  equation = program.readers[order]

  def readers(value: int) -> list[int]:
    lo, hi = np.searchsorted(values, [value, value + 1])
    return equation[lo:hi].tolist()

  return readers


def _cluster(program: Program, draw: int, readers) -> list[int]:
  """A draw and the arithmetic that follows on it alone and makes its result no bigger, such as a comparison."""
  cluster = [draw]
  while program.out_start[cluster[-1] + 1] - program.out_start[cluster[-1]] == 1:
    value = int(program.out_start[cluster[-1]])
    reading = set(readers(value))
    if len(reading) != 1 or program.last_use[value] == len(program.eqns):
      break
    e, = reading
    eqn = program.eqns[e]
    slots = program.slots[program.slot_start[e] : program.slot_start[e + 1]].tolist()
    if program.fingerprints[e] < 0 or eqn.primitive.name not in FUSIBLE or any(nested_jaxprs(eqn.params)):
      break
    if any(v >= 0 and v != value or v < 0 and program.nbytes(v) > 8 for v in slots):
      break
    outs = slice(program.out_start[e], program.out_start[e + 1])
    if int(program.out_bytes[outs].sum()) > int(program.out_bytes[value]):
      break
    cluster.append(e)
  return cluster
