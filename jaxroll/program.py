"""A jaxpr as arrays: what the search and the planner read.

Every value has an integer id. Results of equations are numbered from 0 in trace
order; values from outside (inputs, constants, literals, static operands) have
negative ids, equal ones the same: constants and literals are unified by value.
Dead equations are left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxroll import compat
from jaxroll.fingerprint import Fingerprinter
from jaxroll.functions import array_key


@dataclasses.dataclass(frozen=True)
class Static:
  """A static operand: an integer taken out of an equation's parameters."""

  val: int


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A closed jaxpr with its equations fingerprinted and its values numbered.

  Attributes:
    closed: the jaxpr.
    eqns: its live equations, in trace order.
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

  def aval(self, value: int):
    """The type of a value; None for a static operand."""
    if value >= 0:
      return self.out_vars[value].aval
    atom = self.outer[-1 - value]
    return None if type(atom) is Static else atom.aval

  def nbytes(self, value: int) -> int:
    return aval_bytes(self.aval(value))


def aval_bytes(aval) -> int:
  """Bytes of an array of this type; symbolic dimensions count as one, a static operand as four."""
  if aval is None:
    return 4
  size = getattr(aval.dtype, "itemsize", 4)
  for d in getattr(aval, "shape", ()):
    size *= d if isinstance(d, (int, np.integer)) else 1
  return int(size)


def analyze(closed, fingerprinter: Fingerprinter) -> Program:
  """Numbers and fingerprints a closed jaxpr's live equations, in one walk."""
  jaxpr = closed.jaxpr
  eqns = _live_equations(jaxpr)
  ids: dict[Any, int] = {}
  avals: dict[int, tuple] = {}
  outer: list[Any] = []
  outer_ids: dict[Any, int] = {}

  def new_outer(key, atom, aval):
    found = outer_ids.get(key)
    if found is None:
      outer.append(atom)
      found = outer_ids[key] = -len(outer)
      avals[found] = aval
    return found

  for v in jaxpr.invars:
    ids[v] = new_outer(v, v, fingerprinter.aval(v.aval))
  for v, c in zip(jaxpr.constvars, closed.consts):
    ids[v] = new_outer((array_key(c), v.aval), v, fingerprinter.aval(v.aval))

  fingerprints, sizes, slots, slot_start, out_start = [], [], [], [0], [0]
  out_vars: list[Any] = []
  canonical: list[int] = []
  numbering: dict[Any, int] = {}
  literal_type = compat.Literal
  for eqn in eqns:
    operands = []
    for atom in eqn.invars:
      if type(atom) is literal_type:
        operands.append(new_outer(fingerprinter.literal(atom), atom, fingerprinter.aval(atom.aval)))
      else:
        operands.append(ids[atom])
    fp, statics = fingerprinter.equation(eqn, [avals[o] for o in operands])
    if statics:
      operands += [new_outer(("static", int(s)), Static(int(s)), None) for s in statics]
    first = len(out_vars)
    same = first
    if fp >= 0:
      same = numbering.setdefault((fp, *[canonical[o] if o >= 0 else o for o in operands]), first)
    for k, v in enumerate(eqn.outvars):
      ids[v] = first + k
      avals[first + k] = fingerprinter.aval(v.aval)
      canonical.append(same + k)
    out_vars += eqn.outvars
    fingerprints.append(fp)
    sizes.append(fingerprinter.size(eqn))
    slots += operands
    slot_start.append(len(slots))
    out_start.append(len(out_vars))

  results = tuple(
      new_outer(fingerprinter.literal(a), a, None) if type(a) is literal_type else ids[a] for a in jaxpr.outvars)
  arrays = [np.asarray(a, np.int64) for a in (fingerprints, sizes, slots, slot_start, out_start, canonical)]
  fingerprints, sizes, slots, slot_start, out_start, canonical = arrays
  first_use = np.full(len(out_vars), len(eqns), np.int64)
  last_use = np.full(len(out_vars), -1, np.int64)
  reader = np.repeat(np.arange(len(eqns)), np.diff(slot_start))
  inner = slots >= 0
  last_use[slots[inner]] = reader[inner]  # readers ascend: the last write stays
  first_use[slots[inner][::-1]] = reader[inner][::-1]
  last_use[[r for r in results if r >= 0]] = len(eqns)
  return Program(
      closed=closed, eqns=tuple(eqns), fingerprints=fingerprints, sizes=sizes, slots=slots, slot_start=slot_start,
      out_start=out_start, out_vars=tuple(out_vars),
      out_bytes=np.asarray([aval_bytes(v.aval) for v in out_vars], np.int64), outer=tuple(outer), results=results,
      canonical=canonical, first_use=first_use, last_use=last_use)


def _live_equations(jaxpr) -> list:
  """The equations that a result or an effect depends on, in order."""
  literal_type = compat.Literal
  needed = {a for a in jaxpr.outvars if type(a) is not literal_type}
  live = []
  for eqn in reversed(jaxpr.eqns):
    if eqn.effects or any([v in needed for v in eqn.outvars]):
      live.append(eqn)
      needed.update([a for a in eqn.invars if type(a) is not literal_type])
  live.reverse()
  return live
