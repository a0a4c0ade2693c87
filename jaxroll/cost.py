"""Which rolls pay: compile work saved against what a loop costs.

A loop's inputs that are not one array already must be stacked, and its results
that are read one by one must be taken apart: each is an operation per iteration,
and a copy of the bytes.
"""

from __future__ import annotations

import dataclasses

from jaxroll import compat
from jaxroll.options import RollOptions
from jaxroll.plan import Carry, Const, Roll, Slices, Xs
from jaxroll.program import Program, aval_bytes
from jaxroll.report import Refusal, RollRecord
from jaxroll.rewrite import constant_xs
from jaxroll.schedule import Loop, One, Part, Schedule, schedule

# 'auto' rolls a repeat only if it saves this many equations ...
_MIN_SAVED = 60
# ... and this many per operation that stacks or takes apart.
_SAVED_PER_COPY = 4


def choose(program: Program, rolls: list[Roll], options: RollOptions):
  """The rolls that pay, their schedule, and refusals for the others.

  Refusing one changes what others cost (its results are no longer stacked
  already), so that the choice is repeated until nothing changes.
  """
  refusals: list[Refusal] = []
  while rolls:
    plan = schedule(program, rolls)
    if options.strategy != "auto":
      return rolls, plan, refusals
    kept = []
    for k, roll in enumerate(rolls):
      reason = _too_dear(program, plan, k) if plan.loops[k] else ""
      if reason:
        refusals.append(Refusal(roll.start, roll.period, roll.trips, reason))
      else:
        kept.append(roll)
    if len(kept) == len(rolls):
      return rolls, plan, refusals
    rolls = kept
  return [], None, refusals


def _too_dear(program: Program, plan: Schedule, k: int) -> str:
  loop = plan.loops[k]
  size = int(sum(program.sizes[loop.roll.start + j] for j in loop.offsets))
  saved = size * (loop.roll.trips - 1)
  if saved < _MIN_SAVED:
    return f"saves only {saved} equations"
  copies = sum(len(t) for t in loop.taken.values())
  copies += sum(sum(isinstance(p, One) for p in parts) for i, parts in loop.feeds.items()
                if constant_xs(program, loop.roll.inputs[i].values) is None)
  if saved < _SAVED_PER_COPY * copies:
    return f"saves {saved} equations but needs {copies} operations to stack and take apart"
  return ""


def record(program: Program, plan: Schedule, k: int, depth: int) -> RollRecord:
  """A roll for the report."""
  loop = plan.loops[k]
  roll = loop.roll
  feeds, copied = [], []
  for i in loop.inputs:
    source = roll.inputs[i]
    if isinstance(source, (Xs, Slices)):
      kind, size = _feed(program, plan, loop, i)
      feeds.append(kind)
      copied.append(size)
  by_type = [type(roll.inputs[i]) for i in loop.inputs]
  return RollRecord(
      strategy="scan", trip_count=roll.trips, body_eqns=len(loop.offsets),
      body_size=int(sum(program.sizes[roll.start + j] for j in loop.offsets)),
      carries=sum(len(c.inits) for c in loop.chains) + len(loop.lasts), consts=by_type.count(Const), xs=len(feeds),
      ys=len(loop.ys), reverse=loop.reverse, feeds=tuple(feeds), copied_bytes=tuple(copied),
      unstacked_bytes=sum(program.nbytes(roll.value(0, q)) * len(t) for q, t in loop.taken.items()), depth=depth,
      location=compat.location(program.eqns[roll.start]))


def _feed(program: Program, plan: Schedule, loop: Loop, i: int) -> tuple[str, int]:
  """How an xs is made, and the bytes copied to make it."""
  source = loop.roll.inputs[i]
  if isinstance(source, Slices):
    aval = program.aval(source.value)
    whole = len(source.starts) == aval.shape[0] and (source.starts[0] > source.starts[-1]) == loop.reverse
    return "slice", 0 if whole else aval_bytes(aval) // max(aval.shape[0], 1) * len(source.starts)
  if constant_xs(program, source.values) is not None:
    return "constants", 0
  parts = loop.feeds[i]
  size = program.nbytes(source.values[0]) * loop.roll.trips
  if len(parts) == 1 and isinstance(parts[0], Part):
    whole = parts[0].step == 1 and parts[0].count == plan.loops[parts[0].loop].roll.trips
    return ("ys", 0) if whole else ("ys part", size)
  return ("stack" if all(isinstance(p, One) for p in parts) else "ys part"), size


def located(program: Program, refusal: Refusal) -> Refusal:
  """The refusal with the place in the user's code."""
  return dataclasses.replace(refusal, location=compat.location(program.eqns[refusal.start]))
