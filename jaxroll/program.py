"""A jaxpr as arrays: what the search and the planner read.

Every value has an integer id. Results of equations are numbered from 0 in trace
order; values from outside (inputs, constants, literals, static operands) have
negative ids, equal ones the same: constants and literals are unified by value.
Dead equations are left out, but for small ones that make an iteration like the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from jaxroll import compat
from jaxroll.fingerprint import Fingerprinter
from jaxroll.functions import array_key

_SMALL_BYTES = 1 << 10  # of a dead equation's results, for it to be kept


class Lists(NamedTuple):
  """A program's arrays of these names, as lists: quicker to look few elements up in."""

  fingerprints: list[int]
  slots: list[int]
  slot_start: list[int]
  out_start: list[int]
  canonical: list[int]
  makers: list[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A closed jaxpr with its equations fingerprinted and its values numbered.

  Attributes:
    closed: the jaxpr.
    fingerprinter: what fingerprinted it.
    eqns: its equations that are not left out, in trace order.
    fingerprints: int64[n], negative for equations that match no other.
    sizes: int64[n], equations counted with nested ones.
    slots: value ids of all operands, then static operands, equation by equation.
    slot_start: int64[n + 1], where each equation's slots start.
    out_start: int64[n + 1], the id of each equation's first result.
    out_vars: the variable of each result.
    out_bytes: int64, the bytes of each result.
    outer: the variable, literal or `Static` of each value from outside; id -1-k is outer[k].
    results: the value ids of the jaxpr's results.
    canonical: int64, per result the id of the first result known to be equal to it.
    first_use: int64, per result the first equation that reads it; n for none.
    last_use: int64, per result the last equation that reads it; n for the jaxpr's results, else -1.
  """

  closed: Any
  fingerprinter: Fingerprinter
  eqns: tuple
  fingerprints: np.ndarray
  sizes: np.ndarray
  slots: np.ndarray
  slot_start: np.ndarray
  out_start: np.ndarray
  out_vars: tuple
  out_bytes: np.ndarray
  outer: tuple
  results: tuple[int, ...]
  canonical: np.ndarray
  first_use: np.ndarray
  last_use: np.ndarray

  @property
  def jaxpr(self):
    return self.closed.jaxpr

  def result_starts(self, start: int, period: int) -> list[int]:
    """Where each of `period` equations' results start, and the last one's end, counted from the first's."""
    return (self.out_start[start : start + period + 1] - self.out_start[start]).tolist()

  def slot_starts(self, start: int, period: int) -> list[int]:
    """The same for their slots."""
    return (self.slot_start[start : start + period + 1] - self.slot_start[start]).tolist()

  def constant(self, value: int) -> np.ndarray | None:
    """What a value from outside is, if that is known and may be written anywhere."""
    atom = self.outer[-1 - value] if value < 0 else None
    if type(atom) is compat.Var:
      atom = self.consts.get(atom)
      return None if atom is None else compat.as_constant(atom)
    if atom is None:
      return None
    if atom.aval is None or atom.aval.shape:
      return compat.as_constant(atom.val)
    return np.asarray(atom.val, atom.aval.dtype)

  def is_computed(self, value: int) -> bool:
    """Whether a value is an array that depends on the program's inputs, as far as one equation back tells."""
    if not compat.is_plain(self.aval(value)):
      return False
    if value < 0:
      return type(self.outer[-1 - value]) is compat.Var and self.constant(value) is None
    return any(type(a) is compat.Var for a in self.eqns[self.maker(value)].invars)

  @functools.cached_property
  def consts(self) -> dict:
    """The jaxpr's constants by their variables."""
    return dict(zip(self.jaxpr.constvars, self.closed.consts))

  @functools.cached_property
  def makers(self) -> np.ndarray:
    """int64, per result the equation that makes it."""
    return np.repeat(np.arange(len(self.eqns)), np.diff(self.out_start))

  @functools.cached_property
  def readers(self) -> np.ndarray:
    """int64, per slot the equation that reads it."""
    return np.repeat(np.arange(len(self.eqns)), np.diff(self.slot_start))

  @functools.cached_property
  def lists(self) -> Lists:
    return Lists(*[getattr(self, name).tolist() for name in Lists._fields])

  def maker(self, value: int) -> int | None:
    """The equation that makes a value; None for one from outside."""
    return self.lists.makers[value] if value >= 0 else None

  def aval(self, value: int):
    """The type of a value; None for an integer that is a static operand."""
    if value >= 0:
      return self.out_vars[value].aval
    atom = self.outer[-1 - value]
    return atom.aval

  def nbytes(self, value: int) -> int:
    return aval_bytes(self.aval(value))


def aval_bytes(aval) -> int:
  """Bytes of an array of this type; a static operand's count as four."""
  if aval is None:
    return 4
  return int(getattr(aval.dtype, "itemsize", 4) * math.prod(map(reckoned, getattr(aval, "shape", ()))))


def reckoned(dimension) -> int:
  """A dimension or length as estimates reckon with it, where nothing can be compared with a symbolic one: that counts as 1."""
  return int(dimension) if isinstance(dimension, (int, np.integer)) else 1


def analyze(closed, fingerprinter: Fingerprinter) -> Program:
  """Numbers and fingerprints a closed jaxpr's live equations, in one walk."""
  jaxpr = closed.jaxpr
  eqns = _equations(jaxpr, fingerprinter)
  ids: dict[Any, int] = {}
  outer: list[Any] = []
  outer_ids: dict[Any, int] = {}

  def new_outer(key, atom):
    found = outer_ids.get(key)
    if found is None:
      outer.append(atom)
      found = outer_ids[key] = -len(outer)
    return found

  for v in jaxpr.invars:
    ids[v] = new_outer(v, v)
  for v, c in zip(jaxpr.constvars, closed.consts):
    ids[v] = new_outer((array_key(c), v.aval), v)

  fingerprints, slots, slot_start, out_start = [], [], [0], [0]
  out_vars: list[Any] = []
  canonical: list[int] = []
  numbering: dict[Any, int] = {}
  literal_type, literal_key = compat.Literal, fingerprinter.literal
  for eqn in eqns:
    operands = [ids[a] if type(a) is not literal_type else new_outer(literal_key(a), a) for a in eqn.invars]
    fp, statics = fingerprinter.equation(eqn)
    if statics:
      operands += [new_outer(fingerprinter.static(s), s) for s in statics]
    first = same = len(canonical)
    if fp >= 0 and not fingerprinter.has_rule(eqn):
      same = numbering.setdefault((fp, *[canonical[o] if o >= 0 else o for o in operands]), first)
    for k, v in enumerate(eqn.outvars):
      ids[v] = first + k
      canonical.append(same + k)
    out_vars += eqn.outvars
    fingerprints.append(fp)
    slots += operands
    slot_start.append(len(slots))
    out_start.append(len(canonical))

  results = tuple(new_outer(literal_key(a), a) if type(a) is literal_type else ids[a] for a in jaxpr.outvars)
  arrays = [np.asarray(a, np.int64) for a in (fingerprints, slots, slot_start, out_start, canonical)]
  fingerprints, slots, slot_start, out_start, canonical = arrays
  # Equal equations have the same size and results of the same types: looked up for one of each.
  _, firsts, kind = np.unique(fingerprints, return_index=True, return_inverse=True)
  firsts = [eqns[e] for e in firsts.tolist()]
  sizes = np.asarray([fingerprinter.size(e) for e in firsts], np.int64)[kind]
  first_bytes = np.asarray([aval_bytes(v.aval) for e in firsts for v in e.outvars], np.int64)
  first_start = np.cumsum([0, *[len(e.outvars) for e in firsts]])
  out_bytes = first_bytes[stretches(first_start[kind], np.diff(out_start))]
  first_use = np.full(len(out_vars), len(eqns), np.int64)
  last_use = np.full(len(out_vars), -1, np.int64)
  reader = np.repeat(np.arange(len(eqns)), np.diff(slot_start))
  inner = slots >= 0
  last_use[slots[inner]] = reader[inner]  # readers ascend: the last write stays
  first_use[slots[inner][::-1]] = reader[inner][::-1]
  last_use[[r for r in results if r >= 0]] = len(eqns)
  return Program(
      closed=closed, fingerprinter=fingerprinter, eqns=tuple(eqns), fingerprints=fingerprints, sizes=sizes,
      slots=slots, slot_start=slot_start, out_start=out_start, out_vars=tuple(out_vars),
      out_bytes=out_bytes, outer=tuple(outer), results=results, canonical=canonical, first_use=first_use, last_use=last_use)


def reordered(program: Program, order: np.ndarray, same: np.ndarray | None = None) -> Program:
  """The same program with its equations in another order that respects their dependencies.

  `order` is int64[n], per place the equation that comes there. Fewer than all may come if `same` is given: int64,
  per result the one of an equation that comes which stands for it.
  """
  n, values = len(order), len(program.out_vars)
  outs = np.diff(program.out_start)[order]
  slots = np.diff(program.slot_start)[order]
  out_start = np.concatenate([[0], np.cumsum(outs)])
  slot_start = np.concatenate([[0], np.cumsum(slots)])
  old_values = stretches(program.out_start[order], outs)  # by new value, the old one
  renamed = np.empty(values, np.int64)
  renamed[old_values] = np.arange(len(old_values))
  if same is not None:
    renamed = renamed[same]

  def rename(old: np.ndarray) -> np.ndarray:
    return np.where(old >= 0, renamed[np.maximum(old, 0)], old) if values else old

  new_slots = rename(program.slots[stretches(program.slot_start[order], slots)])
  first = np.full(values, values)  # of those known to be equal, the one that now comes first
  np.minimum.at(first, program.canonical[old_values], np.arange(len(old_values)))
  reader = np.repeat(np.arange(n), slots)
  inner = new_slots >= 0
  first_use, last_use = np.full(len(old_values), n, np.int64), np.full(len(old_values), -1, np.int64)
  last_use[new_slots[inner]] = reader[inner]
  first_use[new_slots[inner][::-1]] = reader[inner][::-1]
  results = tuple(int(renamed[r]) if r >= 0 else r for r in program.results)
  last_use[[r for r in results if r >= 0]] = n
  return dataclasses.replace(
      program, eqns=tuple([program.eqns[e] for e in order.tolist()]), fingerprints=program.fingerprints[order],
      sizes=program.sizes[order], slots=new_slots, slot_start=slot_start, out_start=out_start,
      out_vars=tuple([program.out_vars[v] for v in old_values.tolist()]), out_bytes=program.out_bytes[old_values],
      results=results, canonical=first[program.canonical[old_values]], first_use=first_use, last_use=last_use)


def stretches(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """`starts[i], starts[i] + 1, ...`, `lengths[i]` of them, for each i in turn."""
  ends = np.cumsum(lengths)
  return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1] if len(ends) else 0)


def _equations(jaxpr, fingerprinter: Fingerprinter) -> list:
  """The live equations, and small dead ones that occur at least twice as often live, in order.

  What a loop hands on to its next iteration nothing reads after the last one: a key that was split once more.
  Without the equations that make it, the last iteration would not be like the others.
  """
  live = live_equations(jaxpr)
  if len(live) == len(jaxpr.eqns):
    return live
  is_live = {id(e) for e in live}
  dead = [e for e in jaxpr.eqns
          if id(e) not in is_live and sum([aval_bytes(v.aval) for v in e.outvars]) <= _SMALL_BYTES]
  primitives = {e.primitive for e in dead}

  kinds = {id(e): fingerprinter.equation(e)[0] for e in dead}
  often = Counter([fingerprinter.equation(e)[0] for e in live if e.primitive in primitives])
  often.subtract({k: 2 * n for k, n in Counter(kinds.values()).items()})
  if not any(k >= 0 and often[k] >= 0 for k in kinds.values()):
    return live
  left_out: set[Any] = set()
  kept = []
  for eqn in jaxpr.eqns:
    repeats = kinds.get(id(eqn), -1) >= 0 and often[kinds[id(eqn)]] >= 0
    if id(eqn) in is_live or repeats and left_out.isdisjoint(
        [a for a in eqn.invars if type(a) is not compat.Literal]):
      kept.append(eqn)
    else:
      left_out.update(eqn.outvars)
  return kept


def live_equations(jaxpr) -> list:
  """The equations that a result or an effect depends on, in order."""
  literal_type = compat.Literal
  needed = {a for a in jaxpr.outvars if type(a) is not literal_type}
  live = []
  for eqn in reversed(jaxpr.eqns):
    outs = eqn.outvars
    if (outs[0] in needed if len(outs) == 1 else not needed.isdisjoint(outs)) or eqn.effects:
      live.append(eqn)
      needed.update([a for a in eqn.invars if type(a) is not literal_type])
  live.reverse()
  return live
