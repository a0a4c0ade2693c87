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

import dataclasses
import itertools
from collections import Counter

import numpy as np

from jaxroll import compat
from jaxroll.fingerprint import holds
from jaxroll.program import Program, reordered, stretches
from jaxroll.work import equation_work

# What is computed anew behind these is so by intent, to save memory.
_BARRIERS = frozenset({"optimization_barrier", "checkpoint", "remat2"})
_FEW = 3  # So many equal equations are never what all iterations compute alike.


def without_duplicates(program: Program, memo: dict) -> Program:
  """The program with its equal kernels, and what is made of them, merged; itself if it has none.

  The first of equal equations stays. `memo` keeps the work of nested jaxprs from call to call.
  """
  starts = program.out_start[:-1]
  made = np.flatnonzero(np.diff(program.out_start) > 0)
  original = np.arange(len(program.eqns))  # per equation the first that is equal to it
  original[made] = program.makers[program.canonical[starts[made]]]
  again = np.flatnonzero(original != np.arange(len(original)))
  if not len(again):
    return program
  few = _are_few(program, original, again).tolist()
  slots, slot_start, makers = program.lists.slots, program.lists.slot_start, program.lists.makers
  kinds = program.fingerprints[again].tolist()
  is_apart, is_kernel = {}, {}  # by fingerprint
  barriers: dict = {}
  chosen: set[int] = set()
  apart: set[int] = set()  # what a barrier keeps apart
  for e, is_few, kind in zip(again.tolist(), few, kinds):
    if kind not in is_apart:
      eqn = program.eqns[e]
      is_apart[kind] = bool(eqn.effects) or holds(eqn, _BARRIERS, barriers)
      is_kernel[kind] = _is_kernel(eqn, memo)
    sources = {makers[v] for v in slots[slot_start[e] : slot_start[e + 1]] if v >= 0}
    if is_apart[kind] or not apart.isdisjoint(sources):
      apart.add(e)
    elif is_few and (is_kernel[kind] or not chosen.isdisjoint(sources)):
      chosen.add(e)
  return _merged(program, np.asarray(sorted(chosen)), original) if chosen else program


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


def _merged(program: Program, gone: np.ndarray, original: np.ndarray) -> Program:
  """The program without the equations `gone` and what only they read; the original ones' results stand for theirs."""
  lists = program.lists
  lengths = np.diff(program.out_start)[gone]
  values = stretches(program.out_start[gone], lengths)
  same = np.arange(len(program.out_vars))  # per result the one that stands for it
  same[values] = stretches(program.out_start[original[gone]], lengths)
  out_vars, eqns = list(program.out_vars), list(program.eqns)
  for value, first in zip(values.tolist(), same[values].tolist()):
    if type(out_vars[first]) is compat.DropVar and type(out_vars[value]) is not compat.DropVar:
      out_vars[first] = out_vars[value]
      e = lists.makers[first]
      eqns[e] = eqns[e].replace(outvars=out_vars[lists.out_start[e] : lists.out_start[e + 1]])
  slots = np.where(program.slots >= 0, same[np.maximum(program.slots, 0)], program.slots)
  results = [same[r] if r >= 0 else r for r in program.results]
  is_kept = _is_kept(program, gone, slots.tolist(), results)
  changed = np.flatnonzero((slots != program.slots) & is_kept[program.readers])
  for e, group in itertools.groupby(changed.tolist(), program.readers.__getitem__):
    invars = list(eqns[e].invars)
    for k in group:
      invars[k - lists.slot_start[e]] = out_vars[slots[k]]
    eqns[e] = eqns[e].replace(invars=invars)
  renamed = dataclasses.replace(program, eqns=tuple(eqns), out_vars=tuple(out_vars))
  merged = reordered(renamed, np.flatnonzero(is_kept), same)
  atoms = [out_vars[r] if r >= 0 else a for r, a in zip(results, program.jaxpr.outvars)]
  return dataclasses.replace(merged, closed=compat.replace_eqns(program.closed, merged.eqns, atoms))


def _is_kept(program: Program, gone: np.ndarray, slots: list[int], results: list[int]) -> np.ndarray:
  """bool, per equation whether it is none of `gone` and not read by those alone.

  `slots` and `results` are the values that are read once those of `gone` have others in their stead.
  """
  lists = program.lists
  readers = Counter(slots)
  readers.update(results)
  is_kept = np.ones(len(program.eqns), bool)
  is_kept[gone] = False
  waiting = gone.tolist()
  while waiting:
    e = waiting.pop()
    for v in slots[lists.slot_start[e] : lists.slot_start[e + 1]]:
      readers[v] -= 1
      if v < 0 or readers[v]:
        continue
      maker = lists.makers[v]
      if is_kept[maker] and not program.eqns[maker].effects and not any(
          [readers[r] for r in range(lists.out_start[maker], lists.out_start[maker + 1])]):
        is_kept[maker] = False
        waiting.append(maker)
  return is_kept
