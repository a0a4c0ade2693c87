"""Equal subgraphs that can't be put in one place, as calls of one function.

Blocks of one configuration with other code between them are no iterations of a loop:
what stands between reads one block's results and makes the next one's arguments. Each
becomes a call of one jitted function, which lowering emits once, and whose results,
and arguments from outside, stand behind fences: so XLA makes the same kernels of each, and compiles them once.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxroll import compat
from jaxroll.options import RollOptions
from jaxroll.order import arranged, effort, placed
from jaxroll.program import Program, reordered
from jaxroll.report import RollRecord
from jaxroll.rewrite import CALLS, is_weak, name_dropped, strong
from jaxroll.scatter import Growth
from jaxroll.work import equation_work

# Unless a strategy is asked for:
_LEAST_BODY = 40  # equations of a block: around fewer, a fence would be felt
_LEAST_SAVED = 200  # equations


@dataclasses.dataclass(frozen=True)
class _Block:
  """What the members of a group have in common.

  Attributes:
    places: where each member starts, which is contiguous.
    period: equations of a member.
    operands: per argument of the function, the operands of a member that are it, as (equation, operand), the
      equation counted from the member's start.
    is_fenced: per argument, whether something that stands behind the block before makes it.
    results: the results that are read outside of members, counted from a member's first.
    is_read_between: per result, whether something that stands before the next block reads it.
  """

  places: tuple[int, ...]
  period: int
  operands: tuple[tuple[tuple[int, int], ...], ...]
  is_fenced: tuple[bool, ...]
  results: tuple[int, ...]
  is_read_between: tuple[bool, ...]


def outline(program: Program, options: RollOptions, strategy: str, platform: str | None, prepare):
  """The program's closed jaxpr with scattered blocks as calls, and a record for each group; None if there are none.

  Args:
    program: an analyzed jaxpr.
    options: of the pass.
    strategy: 'fence' or 'call'.
    platform: where it will run.
    prepare: what is to be done to the body of the function, a closed jaxpr.
  """
  is_auto = options.strategy == "auto"
  body, saved = (_LEAST_BODY, _LEAST_SAVED) if is_auto else (2, 1)
  called = frozenset(e for e, eqn in enumerate(program.eqns) if eqn.params.get("name") in CALLS)
  growth = Growth(program, [], options, saved, effort(program), together=False,
                  least_body=body if is_auto else 1, left_out=called)
  groups = [g for g in growth.run() if int(program.sizes[g[0]].sum()) >= body
            and (not is_auto or _has_kernels(program, g[0]))]
  order = arranged(program, groups, [False] * len(groups)) if groups else None
  if order is None:
    return None
  program = reordered(program, order)
  rows = [at for at in placed(order, groups) if len(at) >= options.min_trip_count]
  calls: dict[int, tuple] = {}  # by the place of a member: its call and how many equations that stands for
  records = []
  unit = np.full(len(order), -1)
  for k, row in enumerate(row for at in rows for row in at):
    unit[row] = k
  for at in rows:
    block = _block(program, at, unit)
    if block is None:
      continue
    call = _call(program, block, strategy, platform, prepare)
    for start in block.places:
      calls[start] = _placed(program, block, start, call), block.period
    records.append(_record(program, block, strategy))
  if not records:
    return None
  eqns, e = [], 0
  while e < len(program.eqns):
    eqn, count = calls.get(e, (program.eqns[e], 1))
    eqns.append(eqn)
    e += count
  return compat.replace_eqns(program.closed, eqns), records


def _has_kernels(program: Program, member: np.ndarray) -> bool:
  """Whether a member does not fuse into one kernel with its neighbours."""
  return any(equation_work(program.eqns[e]).kernels for e in member.tolist())


def _block(program: Program, at: np.ndarray, unit: np.ndarray) -> _Block | None:
  """What members at these places have in common; None if they differ in what a call can't be handed.

  `unit` is int64[n], the member that each equation belongs to, -1 for what stands between.
  """
  operands = _operands(program, at)
  if operands is None:
    return None
  results, is_read_between = _results(program, at, unit)
  return _Block(
      places=tuple(at[:, 0].tolist()), period=at.shape[1], operands=tuple(map(tuple, operands.values())),
      is_fenced=_made_between(program, at, unit, list(operands)), results=results, is_read_between=is_read_between)


def _operands(program: Program, at: np.ndarray) -> dict[tuple[int, ...], list[tuple[int, int]]] | None:
  """By the values that members read from outside, one per member: where the first one reads them.

  None if they differ in a static operand. What they have in common that is written within equations is left out.
  """
  start, period = int(at[0, 0]), at.shape[1]
  low, first = program.slot_start[at[:, 0]], int(program.out_start[start])
  slots = program.slots[low[:, None] + np.arange(int(program.slot_start[start + period] - low[0]))]
  is_own = (slots[0] >= first) & (slots[0] < program.out_start[start + period])
  is_same = (slots == slots[0]).all(axis=0)
  operands: dict[tuple[int, ...], list[tuple[int, int]]] = {}
  k = 0
  for j in range(period):
    eqn = program.eqns[start + j]
    for n in range(int(program.slot_start[start + j + 1] - program.slot_start[start + j])):
      if n >= len(eqn.invars):
        if not is_same[k]:
          return None
      elif not is_own[k] and not (is_same[k] and type(eqn.invars[n]) is compat.Literal):
        operands.setdefault(tuple(slots[:, k].tolist()), []).append((j, n))
      k += 1
  return operands


def _made_between(program: Program, at: np.ndarray, unit: np.ndarray, operands: list[tuple[int, ...]]) -> tuple[bool, ...]:
  """Per argument, whether something between two blocks makes it.

  What stood there before the first of the two is a residual, which XLA may make anew where it is read.
  """
  starts = at[:, 0]
  before = np.append(np.iinfo(np.int64).max, np.sort(starts))[np.argsort(np.argsort(starts))]  # the first has none
  values = np.asarray(operands, np.int64).reshape(len(operands), len(starts))
  made = np.where(values >= 0, program.makers[np.maximum(values, 0)], -1)
  return tuple(((made > before) & (unit[made] < 0)).any(axis=1).tolist())


def _results(program: Program, at: np.ndarray, unit: np.ndarray):
  """The results read outside of members, counted from a member's first; which are read before the next block."""
  places, period = at[:, 0], at.shape[1]
  first = program.out_start[places]
  members = first[:, None] + np.arange(int(program.out_start[places[0] + period] - first[0]))
  inner = program.slots >= 0
  read, reader = program.slots[inner], program.readers[inner]
  values = len(program.makers)
  leaves, first_between = np.zeros(values, bool), np.full(values, len(unit))
  leaves[read[unit[reader] != unit[program.makers[read]]]] = True
  leaves[[r for r in program.results if r >= 0]] = True
  np.minimum.at(first_between, read[unit[reader] < 0], reader[unit[reader] < 0])
  # What is only read after the next block started is a residual, which XLA may make anew where it is read.
  starts = np.sort(places)
  until = np.append(starts[1:], starts[-1] + np.diff(starts).max())[np.argsort(np.argsort(places))]
  needed = np.flatnonzero(leaves[members].any(axis=0))
  is_read_between = (first_between[members] < until[:, None]).any(axis=0)[needed]
  return tuple(needed.tolist()), tuple(is_read_between.tolist())


def _call(program: Program, block: _Block, strategy: str, platform: str | None, prepare):
  """The equation that calls the function, of its own variables."""
  start = block.places[0]
  eqns = program.eqns[start : start + block.period]
  atoms = _arguments(block, eqns)
  avals = [a.aval.update(weak_type=False) if a.aval.weak_type else a.aval for a in atoms]
  arguments = compat.fresh_vars(avals)
  of_place = {place: v for places, v in zip(block.operands, arguments) for place in places}
  first = int(program.out_start[start])
  named = name_dropped(program, [first + r for r in block.results])
  body, at = [], first
  for j, eqn in enumerate(eqns):
    read = [of_place.get((j, n), atom) for n, atom in enumerate(eqn.invars)]
    outs = [named.get(at + i, v) for i, v in enumerate(eqn.outvars)]
    body.append(eqn.replace(invars=read, outvars=outs))
    at += len(eqn.outvars)
  wanted = [named.get(first + r, program.out_vars[first + r]) for r in block.results]
  closed = prepare(compat.close(compat.open_jaxpr(program.jaxpr, arguments, wanted, body)))

  def fenced(values, which):
    some = [v for v, w in zip(values, which) if w]
    behind = iter(compat.fence(some, platform) if some else ())
    return [next(behind) if w else v for v, w in zip(values, which)]

  def call(*args):
    args = fenced(args, block.is_fenced)
    outs = fenced(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args), block.is_read_between)
    return [_of_type(o, v.aval) for o, v in zip(outs, wanted)]

  call.__name__ = strategy + "_body"
  function = compat.out_of_line(call) if strategy == "call" else jax.jit(call)
  eqn, = jax.make_jaxpr(function)(*avals).jaxpr.eqns
  return eqn


def _arguments(block: _Block, eqns) -> list:
  """What a member hands over."""
  return [eqns[places[0][0]].invars[places[0][1]] for places in block.operands]


def _of_type(x, aval):
  """`x` weakly typed if and only if `aval` is."""
  if not aval.weak_type:
    return strong(x)
  return x if is_weak(x) else compat.as_weak(x)


def _placed(program: Program, block: _Block, start: int, call):
  """The call with a member's operands and results."""
  eqns = program.eqns[start : start + block.period]
  outs = [v for e in eqns for v in e.outvars]
  return call.replace(
      invars=_arguments(block, eqns), outvars=[outs[r] for r in block.results],
      source_info=eqns[0].source_info)


def _record(program: Program, block: _Block, strategy: str) -> RollRecord:
  start, end = block.places[0], block.places[0] + block.period
  n = len(block.operands)
  return RollRecord(
      strategy=strategy, reason="other code stands between", trip_count=len(block.places), body_eqns=block.period,
      body_size=int(program.sizes[start:end].sum()), carries=0, consts=0, xs=n, ys=len(block.results), reverse=False,
      feeds=("arguments",) * n, copied_bytes=(0,) * n, unstacked_bytes=0, operations=0, recomputed_bytes=0, depth=0,
      location=compat.location(program.eqns[start]))
