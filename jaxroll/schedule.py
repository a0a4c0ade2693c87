"""From rolls to loops: what each loop takes, what it must return, and what is left over.

Walks the program backwards from its results. What nothing needs any more, such as
the equations that took an array apart that a loop now reads whole, is dropped.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict

import jax
import numpy as np

from jaxroll import compat
from jaxroll.plan import Carry, Const, Roll, Slices, Xs
from jaxroll.program import Program, Static


@dataclasses.dataclass(frozen=True)
class Part:
  """Elements `first`, `first + step`, ... (`count` of them) of the stacked `result` of loop `loop`."""

  loop: int
  result: int
  first: int
  step: int
  count: int


@dataclasses.dataclass(frozen=True)
class One:
  """A single value."""

  value: int


@dataclasses.dataclass(frozen=True)
class Chain:
  """A shift register: after an iteration, register 1 holds `result`, register r+1 what r held.

  `inits[-r]` is what register r holds at first.
  """

  result: int
  inits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
  """One `lax.scan` to emit.

  Attributes:
    roll: the roll.
    reverse: whether the scan runs from the last element of its xs to the first.
    offsets: the equations of the body, as offsets from its start.
    inputs: indices of `roll.inputs` that the body reads, in the order of its arguments.
    chains: the carries.
    registers: for each `Carry` among `inputs`, its chain and register.
    feeds: for each `Xs` among `inputs`, its parts in the order of the xs' leading axis.
    lasts: body results of which only the last iteration's is needed.
    ys: body results that are stacked.
    taken: for each of `ys`, the iterations whose value is needed by itself.
  """

  roll: Roll
  reverse: bool
  offsets: tuple[int, ...]
  inputs: tuple[int, ...]
  chains: tuple[Chain, ...]
  registers: dict[int, tuple[int, int]]
  feeds: dict[int, tuple[Part | One, ...]]
  lasts: tuple[int, ...]
  ys: tuple[int, ...]
  taken: dict[int, tuple[int, ...]]

  def index(self, trip: int) -> int:
    """Where iteration `trip` stands on the leading axis of xs and ys."""
    return self.roll.trips - 1 - trip if self.reverse else trip


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A program's equations and loops in the order in which to run them.

  `steps` holds tuples of equation indices and `int` loop indices; `loops` is by
  index, None for a loop that nothing needs. `resolve` maps a value to the one
  that is computed in its stead.
  """

  steps: tuple[tuple[int, ...] | int, ...]
  loops: tuple[Loop | None, ...]
  values: Values
  needed: frozenset[int]


class Values:
  """Where each value of the program is made, once the rolls are there."""

  def __init__(self, program: Program, rolls: list[Roll]):
    self.program, self.rolls = program, rolls
    self._firsts = [r.first_result for r in rolls]
    self._hoisted = []
    for r in rolls:
      out_of = program.out_start[r.start : r.start + r.period + 1] - r.first_result
      self._hoisted.append({q for j in r.hoisted for q in range(out_of[j], out_of[j + 1])})

  def _owner(self, value: int) -> int | None:
    if value < 0:
      return None
    k = bisect.bisect_right(self._firsts, value) - 1
    if k < 0 or value >= self.rolls[k].first_result + self.rolls[k].trips * self.rolls[k].results:
      return None
    return k

  def resolve(self, value: int) -> int:
    """The value computed in its stead: a hoisted equation's results are made once."""
    k = self._owner(value)
    if k is None or self.rolls[k].locate(value)[1] not in self._hoisted[k]:
      return value
    return int(self.program.canonical[value])

  def loop_result(self, value: int) -> tuple[int, int, int] | None:
    """(loop, iteration, body result) of a resolved value that a loop makes, else None."""
    k = self._owner(value)
    if k is None:
      return None
    trip, result = self.rolls[k].locate(value)
    return None if result in self._hoisted[k] else (k, trip, result)


def schedule(program: Program, rolls: list[Roll]) -> Schedule:
  """Decides what each loop reads and returns and which equations stay."""
  values = Values(program, rolls)
  reverse = _directions(program, rolls, values)
  steps = _order(program, rolls)
  needed: set[int] = set()
  taken: list[dict[int, set[int]]] = [defaultdict(set) for _ in rolls]
  stacked: list[set[int]] = [set() for _ in rolls]

  def need(value: int) -> None:
    value = values.resolve(value)
    made = values.loop_result(value)
    if made:
      taken[made[0]][made[2]].add(made[1])
    elif value >= 0:
      needed.add(value)

  for value in program.results:
    need(value)
  kept: list[tuple[int, ...] | int] = []
  loops: list[Loop | None] = [None] * len(rolls)
  for step in reversed(steps):
    if isinstance(step, int):
      if not taken[step] and not stacked[step]:
        continue
      loop = loops[step] = _loop(program, rolls, values, reverse, step, taken[step], stacked[step])
      for k in loop.inputs:
        source = loop.roll.inputs[k]
        if isinstance(source, (Const, Slices)):
          need(source.value)
      for chain in loop.chains:
        for value in chain.inits:
          need(value)
      for parts in loop.feeds.values():
        for part in parts:
          if isinstance(part, Part):
            stacked[part.loop].add(part.result)
          else:
            need(part.value)
      kept.append(step)
    else:
      live = []
      for e in reversed(step):
        outs = range(program.out_start[e], program.out_start[e + 1])
        if program.eqns[e].effects or any(v in needed for v in outs):
          live.append(e)
          for value in program.slots[program.slot_start[e] : program.slot_start[e + 1]].tolist():
            need(value)
      if live:
        kept.append(tuple(reversed(live)))
  return Schedule(tuple(reversed(kept)), tuple(loops), values, frozenset(needed))


def _order(program: Program, rolls: list[Roll]) -> list[tuple[int, ...] | int]:
  """Equations outside the rolls, each roll's hoisted equations, and the rolls, in order."""
  steps: list[tuple[int, ...] | int] = []
  at = 0
  for k, roll in enumerate(rolls):
    before = (*range(at, roll.start), *(roll.start + j for j in sorted(roll.hoisted)))
    if before:
      steps.append(before)
    steps.append(k)
    at = roll.end
  if at < len(program.eqns):
    steps.append(tuple(range(at, len(program.eqns))))
  return steps


def _directions(program: Program, rolls: list[Roll], values: Values) -> list[bool]:
  """Per roll, whether to scan in reverse: as most bytes of its stacked inputs lie."""
  reverse: list[bool] = []
  for roll in rolls:
    forth = back = 0
    for source in roll.inputs:
      if isinstance(source, Slices):
        order, size = source.starts, program.nbytes(source.value)
      elif isinstance(source, Xs):
        made = [values.loop_result(values.resolve(v)) for v in source.values]
        if None in made or len({(k, q) for k, _, q in made}) > 1:
          continue
        k = made[0][0]
        order = [(-t if reverse[k] else t) for _, t, _ in made]
        size = program.nbytes(source.values[0]) * roll.trips
      else:
        continue
      if order[-1] < order[0]:
        back += size
      else:
        forth += size
    reverse.append(back > forth)
  return reverse


def _loop(program: Program, rolls, values: Values, reverse: list[bool], k: int,
          taken: dict[int, set[int]], stacked: set[int]) -> Loop:
  roll = rolls[k]
  offsets, inputs = _live_body(program, roll, {*taken, *stacked})
  chains, registers = _chains([(i, roll.inputs[i]) for i in inputs if isinstance(roll.inputs[i], Carry)])
  depth: dict[int, int] = defaultdict(int)
  for chain in chains:
    depth[chain.result] = max(depth[chain.result], len(chain.inits))
  lasts, ys = [], []
  for result in sorted({*taken, *stacked}):
    trips = taken.get(result, set())
    if result in stacked:
      ys.append(result)
    elif min(trips) >= roll.trips - depth[result]:
      continue  # a final carry
    elif trips == {roll.trips - 1} and _has_zero(program.out_vars[roll.value(0, result)].aval):
      lasts.append(result)
    else:
      ys.append(result)
  feeds = {
      i: _parts(roll.inputs[i].values, values, rolls, reverse, reverse[k])
      for i in inputs if isinstance(roll.inputs[i], Xs) and program.aval(roll.inputs[i].values[0]) is not None}
  return Loop(roll, reverse[k], offsets, inputs, chains, registers, feeds, tuple(lasts), tuple(ys),
              {q: tuple(sorted(taken[q])) for q in ys if taken.get(q)})


def _live_body(program: Program, roll: Roll, roots: set[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The equations and inputs of the body that its needed results depend on."""
  out_of = (program.out_start[roll.start : roll.start + roll.period + 1] - roll.first_result).tolist()
  slot_of = (program.slot_start[roll.start : roll.start + roll.period + 1] - program.slot_start[roll.start]).tolist()
  maker = np.repeat(np.arange(roll.period), np.diff(out_of))
  offsets: set[int] = set()
  inputs: set[int] = set()
  todo = [int(maker[q]) for q in roots]
  while todo:
    j = todo.pop()
    if j in offsets:
      continue
    offsets.add(j)
    for b in roll.bindings[slot_of[j] : slot_of[j + 1]]:
      if b >= 0:
        todo.append(int(maker[b]))
      elif -1 - b not in inputs and not _in_place(program, roll.inputs[-1 - b]):
        inputs.add(-1 - b)
        source = roll.inputs[-1 - b]
        if isinstance(source, Carry):
          todo.append(int(maker[source.result]))
  return tuple(sorted(offsets)), tuple(sorted(inputs))


def _in_place(program: Program, source) -> bool:
  """Whether the body's equations hold this input themselves: a literal or a static operand that stays the same."""
  return isinstance(source, Const) and source.value < 0 and isinstance(
      program.outer[-1 - source.value], (Static, compat.Literal))


def _chains(carries: list[tuple[int, Carry]]) -> tuple[tuple[Chain, ...], dict[int, tuple[int, int]]]:
  """Shift registers for the carries; one serves several lags of a result where their inits agree."""
  chains: list[Chain] = []
  registers: dict[int, tuple[int, int]] = {}
  for i, carry in sorted(carries, key=lambda c: (-c[1].lag, c[0])):
    for c, chain in enumerate(chains):
      if chain.result == carry.result and chain.inits[len(chain.inits) - carry.lag :] == carry.inits:
        break
    else:
      c = len(chains)
      chains.append(Chain(carry.result, carry.inits))
    registers[i] = (c, carry.lag)
  return tuple(chains), registers


def _has_zero(aval) -> bool:
  """Whether `lax.full` makes a value of this very type, to start a carry with."""
  if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
    return False
  return compat.ShapedArray(aval.shape, aval.dtype) == aval.update(weak_type=False)


def _parts(wanted: tuple[int, ...], values: Values, rolls, reverse: list[bool], backwards: bool) -> tuple[Part | One, ...]:
  """The wanted values, in the order of the scan's leading axis, as parts of earlier ys and single values."""
  parts: list[Part | One] = []
  for value in wanted[::-1] if backwards else wanted:
    value = values.resolve(value)
    made = values.loop_result(value)
    if made is None:
      parts.append(One(value))
      continue
    loop, trip, result = made
    at = rolls[loop].trips - 1 - trip if reverse[loop] else trip
    last = parts[-1] if parts else None
    if isinstance(last, Part) and (last.loop, last.result) == (loop, result):
      step = at - (last.first + last.step * (last.count - 1))
      if step in (1, -1) and (last.count == 1 or step == last.step):
        parts[-1] = Part(loop, result, last.first, step, last.count + 1)
        continue
    parts.append(Part(loop, result, at, 1, 1))
  return tuple(_single(p, rolls, reverse) if isinstance(p, Part) and p.count == 1 else p for p in parts)


def _single(part: Part, rolls, reverse) -> One:
  roll = rolls[part.loop]
  trip = roll.trips - 1 - part.first if reverse[part.loop] else part.first
  return One(roll.value(trip, part.result))
