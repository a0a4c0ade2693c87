"""From rolls to loops: what each loop takes, what it must return, and what is left over.

Walks the program backwards from its results. What nothing needs any more, such as
the equations that took an array apart that a loop now reads whole, is dropped.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import jax
import numpy as np

from jaxroll import compat
from jaxroll.parts import Finder, Source
from jaxroll.plan import Carry, Const, Roll, Slices, Xs, body_closure, home
from jaxroll.program import Program
from jaxroll.residuals import Remade, Remaking, operands, remake
from jaxroll.statics import Static


# scan: one `lax.scan`; `batch`, the same for independent iterations of elementwise operations, as one vectorized
# call. The others call one shared function per iteration: `fence`, with a barrier on what goes
# from one iteration to the next, so that XLA fuses within iterations only; `call`, kept out of line by XLA;
# `inline`, inlined by XLA, so that what it optimizes is the program as written.
STRATEGIES = ("scan", "batch", "fence", "call", "inline")
STACKING = ("scan", "batch")


@dataclasses.dataclass(frozen=True)
class Chain:
  """A shift register: after an iteration, register 1 holds `result`, register r+1 what r held.

  `inits[-r]` is what register r holds at first.
  """

  result: int
  inits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Loop:
  """One roll to emit: a `lax.scan`, or a call per iteration.

  Attributes:
    roll: the roll.
    strategy: one of `STRATEGIES`.
    reverse: whether a scan runs from the last element of its xs to the first.
    offsets: the equations of the body, as offsets from its start.
    inputs: indices of `roll.inputs` that the body reads, in the order of its arguments.
    chains: a scan's carries.
    registers: for each `Carry` among a scan's `inputs`, its chain and register.
    feeds: for each `Xs` among a scan's `inputs`, its parts in the order of the xs' leading axis.
    lasts: body results of which a scan needs only the last iteration's.
    ys: body results that a scan stacks, or that a call returns.
    carried_ys: indices of `roll.inputs`, carries whose value at each iteration's start a scan stacks.
    taken: for each of `ys`, the iterations whose row is needed by itself; for one of `carried_ys`, by its -1 - index.
    read_whole: those of `ys`, and of `carried_ys` by their -1 - index, that a later scan reads.
    unfenced: those of `ys` that go from one iteration to the next past the fence.
    segments: how many scans the iterations are divided among.
    unroll: how many iterations a step of the scan makes, `lax.scan`'s `unroll`.
    remade: inputs that the body makes anew from the others, and what is between.
    recomputed_bytes: how many bytes less that takes from elsewhere, over all iterations.
  """

  roll: Roll
  strategy: str
  reverse: bool
  offsets: tuple[int, ...]
  inputs: tuple[int, ...]
  chains: tuple[Chain, ...]
  registers: dict[int, tuple[int, int]]
  feeds: dict[int, tuple[Source, ...]]
  lasts: tuple[int, ...]
  ys: tuple[int, ...]
  carried_ys: tuple[int, ...]
  taken: dict[int, tuple[int, ...]]
  read_whole: frozenset[int] = frozenset()
  unfenced: frozenset[int] = frozenset()
  segments: int = 1
  unroll: int = 1
  remade: tuple[Remade, ...] = ()
  recomputed_bytes: int = 0

  @property
  def carried(self) -> frozenset[int]:
    """Body results that go from one iteration to another."""
    return frozenset(s.result for s in (self.roll.inputs[i] for i in self.inputs) if isinstance(s, Carry))

  def index(self, trip: int) -> int:
    """Where iteration `trip` stands on the leading axis of xs and ys."""
    return self.roll.trips - 1 - trip if self.reverse else trip

  def row(self, q: int, trip: int) -> int:
    """The value that iteration `trip` puts into the stack `q`, a key of `taken`."""
    if q >= 0:
      return self.roll.value(trip, q)
    carry = self.roll.inputs[-1 - q]
    return carry.inits[trip] if trip < carry.lag else self.roll.value(trip - carry.lag, carry.result)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A program's equations and loops in the order in which to run them.

  `steps` holds tuples of equation indices and `int` loop indices; `loops` is by
  index, None for a loop that nothing needs. `collected` has the parts of each
  equation that puts loops' results together. `values.resolve` maps a value to the
  one that is computed in its stead. `remade` are results of loops that are made anew
  for equations outside of them. `on_one_device` says whether constants and rows of xs
  may be put behind fences.
  """

  steps: tuple[tuple[int, ...] | int, ...]
  loops: tuple[Loop | None, ...]
  collected: dict[int, tuple[Source, ...]]
  values: Values
  needed: frozenset[int]
  remade: frozenset[int] = frozenset()
  on_one_device: bool = True


_HOISTED, _NOBODY, _NO_ROLL = -1, -2, -3


class Values:
  """Where each value of the program is made, once the rolls are there."""

  def __init__(self, program: Program, rolls: list[Roll]):
    self._rolls = rolls
    maker = np.full(len(program.out_vars), _NO_ROLL)  # per value the roll, or why it is none
    resolved = np.arange(len(program.out_vars))
    for k, roll in enumerate(rolls):
      out_of = program.result_starts(roll.start, roll.period)
      made = slice(roll.first_result, roll.value(roll.trips, 0))
      makers, homes = (a[made].reshape(roll.trips, roll.results) for a in (maker, resolved))
      if not k or rolls[k - 1].first_result != roll.first_result:  # the first of the rolls there
        makers[:] = _NOBODY
      for offsets, by in ((roll.members, k), (roll.hoisted, _HOISTED)):
        results = [q for j in offsets for q in range(out_of[j], out_of[j + 1])]
        makers[:, results] = by
        if by == _HOISTED:
          homes[:, results] = [home(program, roll.first_result, q) for q in results]
    self._makers, self._resolved = maker.tolist(), resolved.tolist()

  def resolve(self, value: int) -> int:
    """The value computed in its stead: a hoisted equation's results are made once."""
    return self._resolved[value] if value >= 0 else value

  def loop_result(self, value: int) -> tuple[int, int, int] | None:
    """(loop, iteration, body result) of a resolved value that a loop makes, else None."""
    maker = self._makers[value] if value >= 0 else _NO_ROLL
    if maker >= 0:
      return (maker, *self._rolls[maker].locate(value))
    if maker == _NOBODY:
      raise AssertionError(f"nothing makes value {value}, a result of equations that are rolled")
    return None


def schedule(program: Program, rolls: list[Roll], strategies: list[str]) -> Schedule:
  """Decides what each loop reads and returns and which equations stay."""
  plan = _schedule(program, rolls, strategies, frozenset())
  made = [plan.values.loop_result(plan.values.resolve(r.value)) for loop in plan.loops if loop for r in loop.remade]
  stored = {(k, q) for k, loop in enumerate(plan.loops) if loop for q in (*loop.ys, *loop.lasts)}
  remade = frozenset((m[0], m[2]) for m in made if m)
  # Stored for odd iterations alone, which can make it anew as well as the others.
  return _schedule(program, rolls, strategies, remade) if remade & stored else plan


def _schedule(program: Program, rolls: list[Roll], strategies: list[str],
              remakable: frozenset[tuple[int, int]]) -> Schedule:
  """The schedule, in which equations outside of loops make the results of loops that are `remakable` anew."""
  values = Values(program, rolls)
  scanned = [s in STACKING for s in strategies]
  reverse = _directions(program, rolls, values, scanned)
  finder = Finder(program, rolls, values, scanned, reverse)
  steps = _order(program, rolls)
  collected: dict[int, tuple[Source, ...]] = {}
  needed: set[int] = set()
  remade: set[int] = set()
  taken: list[dict[int, set[int]]] = [defaultdict(set) for _ in rolls]
  stacked: list[set[int]] = [set() for _ in rolls]

  def need(value: int, is_plain: bool = False) -> None:
    todo = [value]
    while todo:
      value = values.resolve(todo.pop())
      made = values.loop_result(value)
      if is_plain and made and (made[0], made[2]) in remakable:
        if value not in remade:
          remade.add(value)
          todo += operands(program, value).values()
      elif made:
        taken[made[0]][made[2]].add(made[1])
      elif value >= 0:
        needed.add(value)

  def need_parts(parts) -> None:
    for part in parts:
      for loop, result in part.reads:
        stacked[loop].add(result)
      if part.value is not None:
        need(part.value)

  def is_kept(value: int) -> bool:
    made = values.loop_result(values.resolve(value))
    return made is not None and (made[2] in stacked[made[0]] or made[1] in taken[made[0]].get(made[2], ()))

  for value in program.results:
    need(value)
  kept: list[tuple[int, ...] | int] = []
  loops: list[Loop | None] = [None] * len(rolls)
  for step in reversed(steps):
    if isinstance(step, int):
      if not taken[step] and not stacked[step]:
        continue
      if scanned[step]:
        loop = _scan(
            program, rolls[step], strategies[step], finder, reverse[step], taken[step], stacked[step], is_kept)
      else:
        loop = _calls(program, rolls[step], strategies[step], taken[step], is_kept)
      loops[step] = loop
      for k in loop.inputs:
        source = loop.roll.inputs[k]
        if isinstance(source, (Const, Slices)):
          need(source.value)
      for chain in loop.chains:
        for value in chain.inits:
          need(value)
      for parts in loop.feeds.values():
        need_parts(parts)
      if not scanned[step]:
        for k in loop.inputs:
          source = loop.roll.inputs[k]
          for value in source.values if isinstance(source, Xs) else source.inits if isinstance(source, Carry) else ():
            need(value)
      kept.append(step)
    else:
      live = []
      for e in reversed(step):
        outs = range(program.out_start[e], program.out_start[e + 1])
        if program.eqns[e].effects or any(v in needed for v in outs):
          live.append(e)
          parts = finder.collected(e)
          if parts:
            collected[e] = parts
            need_parts(parts)
            continue
          for value in program.slots[program.slot_start[e] : program.slot_start[e + 1]].tolist():
            need(value, True)
      if live:
        kept.append(tuple(reversed(live)))
  return Schedule(tuple(reversed(kept)), tuple(loops), collected, values, frozenset(needed), frozenset(remade))


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


def _directions(program: Program, rolls: list[Roll], values: Values, scanned: list[bool]) -> list[bool]:
  """Per roll, whether to scan in reverse: as most bytes of its stacked inputs lie."""
  reverse: list[bool] = []
  for roll, is_scan in zip(rolls, scanned):
    forth = back = 0
    for source in roll.inputs:
      if isinstance(source, Slices):
        order, size = source.starts, program.nbytes(source.value)
      elif isinstance(source, Xs):
        if values.loop_result(values.resolve(source.values[0])) is None:
          continue
        made = [values.loop_result(values.resolve(v)) for v in source.values]
        if None in made or len({(k, q) for k, _, q in made}) > 1 or not scanned[made[0][0]]:
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
    reverse.append(is_scan and back > forth)
  return reverse


def _calls(program: Program, roll: Roll, strategy: str, taken: dict[int, set[int]], is_kept) -> Loop:
  offsets, inputs = _live_body(program, roll, set(taken))
  again = remake(program, roll, inputs, False, is_kept) if strategy == "call" else Remaking(roll, inputs)
  carried = {roll.inputs[i].result for i in inputs if isinstance(roll.inputs[i], Carry)}
  results = tuple(sorted({*taken, *carried}))
  return Loop(again.roll, strategy, False, offsets, again.inputs, (), {}, {}, (), results, (),
              {q: tuple(sorted(t)) for q, t in taken.items()}, remade=again.remade, recomputed_bytes=again.saved)


def _scan(program: Program, roll: Roll, strategy: str, finder: Finder, reverse: bool, taken: dict[int, set[int]],
          stacked: set[int], is_kept) -> Loop:
  results = {*taken, *(q for q in stacked if q >= 0)}
  carried_ys = tuple(sorted(-1 - q for q in stacked if q < 0))
  offsets, inputs = _live_body(program, roll, results | {roll.inputs[i].result for i in carried_ys})
  inputs = tuple(sorted({*inputs, *carried_ys}))
  again = remake(program, roll, inputs, True, is_kept) if strategy == "scan" else Remaking(roll, inputs)
  roll, inputs = again.roll, again.inputs
  chains, registers = _chains([(i, roll.inputs[i]) for i in inputs if isinstance(roll.inputs[i], Carry)])
  depth: dict[int, int] = defaultdict(int)
  for chain in chains:
    depth[chain.result] = max(depth[chain.result], len(chain.inits))
  lasts, ys, rows = [], [], {q: taken[q] for q in stacked if q in taken}
  started = {roll.inputs[i].result: i for i in carried_ys}
  for result in sorted(results):
    trips = taken.get(result, set())
    before = {t for t in trips if t < roll.trips - depth[result]}  # the others are final carries
    if result in stacked:
      ys.append(result)
    elif not before:
      continue
    elif result in started:  # each is what a later iteration starts from, and stacks
      i = started[result]
      rows[-1 - i] = {t + roll.inputs[i].lag for t in before}
    elif strategy == "scan" and trips == {roll.trips - 1} and _has_zero(program.out_vars[roll.value(0, result)].aval):
      lasts.append(result)
    else:
      ys.append(result)
      rows[result] = trips
  feeds = {
      i: finder.parts(roll.inputs[i].values, reverse)
      for i in inputs if isinstance(roll.inputs[i], Xs) and program.aval(roll.inputs[i].values[0]) is not None}
  return Loop(roll, strategy, reverse, offsets, inputs, chains, registers, feeds, tuple(lasts), tuple(ys), carried_ys,
              {q: tuple(sorted(trips)) for q, trips in rows.items()}, frozenset(stacked), remade=again.remade,
              recomputed_bytes=again.saved)


def _live_body(program: Program, roll: Roll, roots) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """The equations and inputs of the body that its needed results depend on."""
  offsets, inputs = body_closure(program, roll, roots)
  return tuple(sorted(offsets)), tuple(sorted(i for i in inputs if not _in_place(program, roll.inputs[i])))


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
