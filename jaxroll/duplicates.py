"""What a program computes twice, computed once.

XLA merges equal equations of an unrolled program, but not those of different iterations
of a loop, nor across fences: a velocity Verlet step that ends with the acceleration at
which the next one starts, a loss evaluated beside its gradient. Such work is merged
before the search, and what is merged goes from one iteration to the next as any other
result does.

What many iterations compute alike, such as a mask that each layer makes, is left alone:
merged, only the first would hold it and be like no other. The planner hoists it.
"""

from __future__ import annotations

import numpy as np

from jaxroll import compat
from jaxroll.program import Program
from jaxroll.work import equation_work, holds

# What is computed anew behind these is so by intent, to save memory.
_BARRIERS = frozenset({"optimization_barrier", "checkpoint", "remat2"})
_FEW = 3  # So many equal equations are never what all iterations compute alike.


def without_duplicates(program: Program, memo: dict):
  """The program's closed jaxpr with its equal kernels, and what is made of them, merged; or that jaxpr itself.

  The first of equal equations stays. `memo` keeps the work of nested jaxprs from call to call.
  """
  barriers: dict = {}
  starts = program.out_start[:-1]
  made = np.flatnonzero(np.diff(program.out_start) > 0)
  original = np.arange(len(program.eqns))  # per equation the first that is equal to it
  original[made] = program.makers[program.canonical[starts[made]]]
  again = np.flatnonzero(original != np.arange(len(original)))
  if not len(again):
    return program.closed
  few = _are_few(program, original, again).tolist()
  slots, slot_start, makers = program.lists.slots, program.lists.slot_start, program.lists.makers
  chosen: dict[int, int] = {}
  apart: set[int] = set()  # what a barrier keeps apart
  for e, is_few in zip(again.tolist(), few):
    eqn = program.eqns[e]
    sources = {makers[v] for v in slots[slot_start[e] : slot_start[e + 1]] if v >= 0}
    if eqn.effects or not apart.isdisjoint(sources) or holds(eqn, _BARRIERS, barriers):
      apart.add(e)
    elif is_few and (not chosen.keys().isdisjoint(sources) or _is_kernel(eqn, memo)):
      chosen[e] = int(original[e])
  return _without(program, chosen) if chosen else program.closed


def _are_few(program: Program, original: np.ndarray, again: np.ndarray) -> np.ndarray:
  """bool, per equation of `again`, whether it is not one of what all iterations compute alike."""
  groups, index, counts = np.unique(original[again], return_inverse=True, return_counts=True)
  kinds = program.fingerprints[groups]
  _, kind, groups_of_kind = np.unique(kinds, return_inverse=True, return_counts=True)
  members = counts + 1
  return ((members <= _FEW) | (groups_of_kind[kind] > 2 * members))[index]


def _is_kernel(eqn, memo: dict) -> bool:
  work = equation_work(eqn, memo)
  return work.kernels > 0 and not work.draws and not eqn.primitive.name.startswith("random_")


def _without(program: Program, chosen: dict[int, int]):
  """The jaxpr without the equations that are keys, whose results are those of the equations that are values."""
  names: dict = {}
  outvars: dict[int, list] = {}
  for e, first in chosen.items():
    kept = outvars.setdefault(id(program.eqns[first]), list(program.eqns[first].outvars))
    for k, v in enumerate(program.eqns[e].outvars):
      if type(kept[k]) is compat.DropVar:
        kept[k] = v
      elif type(v) is not compat.DropVar:
        names[v] = kept[k]
  gone = {id(program.eqns[e]) for e in chosen}
  rename = lambda a: a if type(a) is compat.Literal else names.get(a, a)
  eqns = []
  for eqn in program.jaxpr.eqns:
    if id(eqn) in gone:
      continue
    invars = [rename(a) for a in eqn.invars]
    if id(eqn) in outvars or any([a is not b for a, b in zip(invars, eqn.invars)]):
      eqn = eqn.replace(invars=invars, outvars=outvars.get(id(eqn), eqn.outvars))
    eqns.append(eqn)
  return compat.replace_eqns(program.closed, eqns, [rename(a) for a in program.jaxpr.outvars])
