"""From runs to rolls: where each operand of a loop body comes from.

A run says that equations recur; a roll says that they recur *with the same
dataflow*. For each operand slot of the body, over all iterations, the value is

  internal  a result of the same iteration,
  carry     the same result of the iteration `lag` before, at first values from outside,
  const     one value from outside, or one that every iteration computes anew alike,
  xs        a value from outside per iteration.

Iterations that fit none of these are peeled off, at either end or between.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import numpy as np

from jaxroll import compat
from jaxroll.options import RollOptions
from jaxroll.program import Program
from jaxroll.repeats import Run, find_runs
from jaxroll.report import Refusal
from jaxroll.statics import STATIC_OPERANDS

_ROUNDS = 3  # of search, each over what the ones before left over
_TRIES_PER_RUN = 24  # attempts to find a consistent stretch in one run
_EFFORT = 40  # slots looked at, per slot of the program, before the search stops
_CHEAP_BYTES = 1 << 14  # an invariant this small is computed once, before the loop


@dataclasses.dataclass(frozen=True)
class Const:
  """The same value in every iteration."""

  value: int


@dataclasses.dataclass(frozen=True)
class Carry:
  """Body result `result` of the iteration `lag` before; at first, `inits` in turn."""

  result: int
  lag: int
  inits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Xs:
  """A value from outside per iteration."""

  values: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Slices:
  """A slice of one array per iteration: `value[start : start + 1]` along its leading axis."""

  value: int
  starts: tuple[int, ...]


Input = Const | Carry | Xs | Slices


@dataclasses.dataclass(frozen=True)
class Roll:
  """`trips` iterations of `period` equations, from equation `start`, with one dataflow.

  Attributes:
    bindings: per slot of the body, a body result (>= 0) or -1-k for `inputs[k]`.
    inputs: what comes from outside the iteration.
    hoisted: offsets of equations that compute the same in every iteration.
    members: offsets of the equations that the roll computes. The others are hoisted, or another roll's over
      the same iterations.
    first_result: value id of the first result of the first iteration.
    results: how many results an iteration has.
  """

  start: int
  period: int
  trips: int
  bindings: tuple[int, ...]
  inputs: tuple[Input, ...]
  hoisted: frozenset[int]
  members: frozenset[int]
  first_result: int
  results: int

  @property
  def end(self) -> int:
    return self.start + self.trips * self.period

  def locate(self, value: int) -> tuple[int, int]:
    """The iteration and the body result of a value that the roll makes."""
    return divmod(value - self.first_result, self.results)

  def value(self, trip: int, result: int) -> int:
    return self.first_result + trip * self.results + result


def find_rolls(program: Program, options: RollOptions, known: Sequence[Run] = ()) -> tuple[list[Roll], list[Refusal]]:
  """Rolls that do not overlap, in program order, and why other runs were refused; `known` runs are tried first."""
  rolls: list[Roll] = []
  refusals: list[Refusal] = []
  covered = np.zeros(len(program.eqns), bool)
  budget = _EFFORT * (len(program.slots) + 1000)
  for round_ in range(_ROUNDS):
    before = len(rolls)
    # Covered equations and unmergeable ones equal nothing.
    taken = covered | (program.fingerprints < 0)
    free = np.where(taken, -1 - np.arange(len(covered)), program.fingerprints)
    found_runs = find_runs(free, program.sizes, options.min_trip_count)
    for run in [*known, *found_runs] if round_ == 0 else found_runs:
      for start, end in _gaps(covered, run):
        trips = (end - start) // run.period
        if trips < options.min_trip_count:
          continue
        size = int(program.sizes[start : start + run.period].sum())
        if size < options.min_body_eqns:
          continue
        budget -= int(program.slot_start[end] - program.slot_start[start])
        if budget < 0:
          refusals.append(Refusal(start, run.period, trips, "the search stopped here: its bound on work is reached"))
          return sorted(rolls, key=lambda r: r.start), refusals
        found = _best_rotation(program, start, end, run.period, options.min_trip_count)
        if not found:
          refusals.append(Refusal(start, run.period, trips, "the iterations' dataflow differs"))
        for roll in found:
          if mesh_giver(program, roll) is None:
            refusals.append(Refusal(roll.start, roll.period, roll.trips, "iterations join arrays of different meshes"))
            continue
          rolls.append(roll)
          covered[roll.start : roll.end] = True
    if len(rolls) == before:
      break
  return sorted(rolls, key=lambda r: r.start), refusals


def mesh_giver(program: Program, roll: Roll):
  """The equation of the body under whose mesh a loop can run, None if there is none.

  What goes into and out of iterations must be on that mesh. What stays within one may be on others.
  """
  end = roll.start + roll.period
  eqns = program.eqns[roll.start : end]
  if compat.on_one_mesh(eqns):
    return eqns[0]
  results = range(roll.first_result, roll.first_result + roll.results)
  avals = [program.aval(v) for v in results if program.last_use[v] >= end]
  constants = set()
  for i, source in enumerate(roll.inputs):
    if isinstance(source, Xs) and program.constant(source.values[0]) is not None:
      constants.add(-1 - i)
    elif isinstance(source, (Xs, Slices)):
      avals.append(program.aval(source.values[0] if isinstance(source, Xs) else source.value))
    elif isinstance(source, Const) and getattr(program.aval(source.value), "weak_type", False):
      avals.append(program.aval(source.value))  # converted; others are read within as they are
  # Constants are stacked under the loop's mesh, and so must be read under it.
  reader = np.repeat(np.arange(roll.period), np.diff(program.slot_starts(roll.start, roll.period))).tolist()
  readers = [eqns[j] for j, b in zip(reader, roll.bindings) if b in constants]
  fitting = [e for e in eqns if compat.fits_mesh(e, avals) and compat.on_one_mesh([e, *readers], contexts_only=True)]
  return fitting[0] if fitting else None


def saved(program: Program, roll: Roll) -> int:
  """How many equations the roll saves, nested ones counted."""
  return int(program.sizes[roll.start : roll.start + roll.period].sum()) * (roll.trips - 1)


def home(program: Program, first_result: int, result: int) -> int:
  """The value computed in the stead of a hoisted `result`: an equal one made before the roll, else the first iteration's."""
  canonical = int(program.canonical[first_result + result])
  return canonical if canonical < first_result else first_result + result


def body_closure(program: Program, roll: Roll, results) -> tuple[frozenset[int], frozenset[int]]:
  """The offsets and the inputs of the body that these results depend on, through the carries too."""
  out_of = program.result_starts(roll.start, roll.period)
  slot_of = program.slot_starts(roll.start, roll.period)
  maker = np.repeat(np.arange(roll.period), np.diff(out_of)).tolist()
  offsets: set[int] = set()
  inputs: set[int] = set()
  todo = [maker[q] for q in results]
  while todo:
    j = todo.pop()
    if j in offsets:
      continue
    offsets.add(j)
    for b in roll.bindings[slot_of[j] : slot_of[j + 1]]:
      if b >= 0:
        todo.append(maker[b])
      elif -1 - b not in inputs:
        inputs.add(-1 - b)
        source = roll.inputs[-1 - b]
        if isinstance(source, Carry):
          todo.append(maker[source.result])
  return frozenset(offsets), frozenset(inputs)


def _gaps(covered: np.ndarray, run: Run) -> list[tuple[int, int]]:
  """The uncovered stretches within a run."""
  taken = covered[run.start : run.end]
  if not taken.any():
    return [(run.start, run.end)]
  edges = np.flatnonzero(np.diff(np.concatenate([[True], taken, [True]]).astype(np.int8)))
  return [(run.start + int(a), run.start + int(b)) for a, b in zip(edges[::2], edges[1::2])]


def _best_rotation(program: Program, start: int, end: int, period: int, min_trip_count: int) -> list[Roll]:
  """The rolls within [start, end) under the rotation that serves best.

  A period has no natural first equation. Preferred is the cut with the fewest
  bytes crossing from one iteration to the next among those that keep every
  iteration; then the cut with the fewest of all.
  """
  crossing = _crossing_bytes(program, start, end, period)
  spare = (end - start) % period
  whole, narrowest = int(np.argmin(crossing[: spare + 1])), int(np.argmin(crossing))

  def rolls_at(cut):
    trips = (end - start - cut) // period
    rolls = _consistent_rolls(program, start + cut, period, trips, min_trip_count) if trips >= min_trip_count else []
    return rolls, sum((r.trips - 1) * r.period for r in rolls)

  rolls, saved = rolls_at(whole)
  if narrowest != whole:
    others, others_saved = rolls_at(narrowest)
    # A carry of half the bytes is worth peeling one iteration, not more.
    much_narrower = crossing[narrowest] * 2 < crossing[whole] and others_saved >= saved - period
    if others_saved > saved or (others and much_narrower):
      return others
  return rolls


def _crossing_bytes(program: Program, start: int, end: int, period: int) -> np.ndarray:
  """For each offset in the period, the bytes made before it and read after it, within the run."""
  first, last = program.out_start[start], program.out_start[end]
  slots = program.slots[program.slot_start[start] : program.slot_start[end]]
  reader = np.repeat(np.arange(start, end), np.diff(program.slot_start[start : end + 1]))
  inner = slots >= first
  maker = np.repeat(np.arange(start, end), np.diff(program.out_start[start : end + 1]))
  last_read = maker.copy()
  np.maximum.at(last_read, slots[inner] - first, reader[inner])
  size = program.out_bytes[first:last].astype(float)
  change = np.zeros(end - start + 2)
  np.add.at(change, maker - start + 1, size)
  np.add.at(change, last_read - start + 1, -size)
  live = np.cumsum(change)  # live[c]: crosses the cut before equation start + c
  return live[period : 2 * period]


def _consistent_rolls(program: Program, start: int, period: int, trips: int, min_trip_count: int) -> list[Roll]:
  """Maximal stretches of iterations with one dataflow, from left to right."""
  rolls = []
  flow = _Dataflow(program, start, period, trips)
  at = tries = 0
  while at + min_trip_count <= trips and tries < _TRIES_PER_RUN:
    tries += 1
    options = [(flow.consistent_until(a) - a, a) for a in range(at, min(at + 3, trips - min_trip_count + 1))]
    length, first = max(options, key=lambda o: (o[0], -o[1]))
    if length >= min_trip_count:
      rolls.append(flow.roll(first, length))
      at = first + length
    else:
      at += max(1, options[0][0])
  return rolls


class _Dataflow:
  """The operand slots of a run as a matrix, iterations by slots."""

  def __init__(self, program: Program, start: int, period: int, trips: int):
    self.program, self.start, self.period, self.trips = program, start, period, trips
    lo, hi = program.slot_start[start], program.slot_start[start + trips * period]
    self.slots = program.slots[lo:hi].reshape(trips, -1)
    self.results = int(program.out_start[start + period] - program.out_start[start])
    self.base = program.out_start[start] + self.results * np.arange(trips)
    self.relative = self.slots - self.base[:, None]  # in [0, results): internal; below: earlier

  def consistent_until(self, first: int) -> int:
    """The end of the longest stretch from iteration `first` with one dataflow."""
    done, step = first + 1, 8
    while done < self.trips:
      rows = slice(done - 1, min(done + step, self.trips))
      outside = self.slots[rows] < self.base[first]
      relative = self.relative[rows]
      was, now = outside[:-1], outside[1:]
      same = ~was & ~now & (relative[:-1] == relative[1:])
      trip = np.arange(rows.start + 1, rows.stop)[:, None]
      enters = was & ~now & (relative[1:] < 0) & (trip + relative[1:] // self.results == first)
      bad = np.flatnonzero(~((was & now) | same | enters).all(axis=1))
      if len(bad):
        return done + int(bad[0])
      done, step = rows.stop, step * 2
    return self.trips

  def roll(self, first: int, trips: int) -> Roll:
    """The roll of `trips` iterations from iteration `first`, whose dataflow is consistent."""
    program, results, period = self.program, self.results, self.period
    start = self.start + first * period
    end = start + trips * period
    base = int(self.base[first])
    slots = self.slots[first : first + trips]
    last = self.relative[first + trips - 1]
    outside = slots[-1] < base
    canonical = np.where(slots >= 0, program.canonical[np.maximum(slots, 0)], slots)
    alike = (canonical == canonical[0]).all(axis=0)
    carried = {int(r) % results for r in last[~outside & (last < 0)]}
    hoisted = self._hoisted(start, end, base, outside, alike, last, carried)
    maker = np.repeat(np.arange(period), np.diff(program.out_start[start : start + period + 1]))

    inputs: dict[Input, int] = {}
    bindings: list[int] = []

    def bind(source: Input) -> int:
      return -1 - inputs.setdefault(source, len(inputs))

    def outer_source(k: int) -> Input:
      return Const(int(canonical[0, k])) if alike[k] else Xs(tuple(slots[:, k].tolist()))

    sliced: dict[int, Slices] = {}  # by body result
    for j in range(period):
      eqn = start + j
      lo, hi = (int(program.slot_start[e] - program.slot_start[start]) for e in (eqn, eqn + 1))
      first_out = int(program.out_start[eqn] - program.out_start[start])
      if program.eqns[eqn].primitive is compat.slice_p and outside[lo:hi].all() and first_out not in carried:
        source = self._slices([outer_source(k) for k in range(lo, hi)], program.eqns[eqn])
        if source:
          sliced[first_out] = source  # the equation stays a member, for what may need its result elsewhere
      for k in range(lo, hi):
        if outside[k]:
          bindings.append(bind(outer_source(k)))
          continue
        lag, result = -(int(last[k]) // results), int(last[k]) % results
        if lag:
          bindings.append(bind(Carry(result, lag, tuple(slots[:lag, k].tolist()))))
        elif int(maker[result]) in hoisted:
          bindings.append(bind(Const(home(program, base, result))))
        elif result in sliced:
          bindings.append(bind(sliced[result]))
        else:
          bindings.append(result)
    members = frozenset(range(period)) - hoisted
    return Roll(start, period, trips, tuple(bindings), tuple(inputs), frozenset(hoisted), members, base, results)

  def _read_after(self, end: int, base: int, trips: int) -> np.ndarray:
    """Per body result, whether an equation after the roll reads any iteration's."""
    uses = self.program.last_use[base : base + trips * self.results].reshape(trips, self.results)
    return (uses >= end).any(axis=0)

  def _slices(self, sources: list[Input], eqn) -> Slices | None:
    """The leading-axis slices that a `slice` equation takes in turn, if it takes such."""
    if len(sources) < 2:
      return None  # of a scalar, or with symbolic starts
    array, starts, rest = sources[0], sources[1], sources[2:]
    (sizes, strides), _ = STATIC_OPERANDS[compat.slice_p].split(eqn.params)
    shape = eqn.invars[0].aval.shape
    if not (isinstance(array, Const) and isinstance(starts, Xs) and all(isinstance(r, Const) for r in rest)):
      return None
    if sizes[0] != 1 or sizes[1:] != tuple(shape[1:]) or any(s != 1 for s in strides):
      return None
    at = [self.program.outer[-1 - v].val for v in starts.values]
    steps = set(np.diff(at).tolist())
    return Slices(array.value, tuple(at)) if len(steps) == 1 and 0 not in steps else None

  def _hoisted(self, start, end, base, outside, alike, last, carried) -> set[int]:
    """Equations that compute the same in every iteration and are better computed once.

    Left in the body is what only makes bytes of nothing (an iota, a broadcast zero)
    and is not read after the loop, as XLA fuses it into its readers; and a matrix that is transposed for products:
    XLA reads it as it lies, but would keep a copy that was made before the loop.
    """
    program, period = self.program, self.period
    slot_of = program.slot_starts(start, period)
    out_of = program.result_starts(start, period)
    made = program.canonical[base : base + (end - start) // period * self.results].reshape(-1, self.results)
    invariant = (made == made[0]).all(axis=0)
    read_after = self._read_after(end, base, len(made))
    maker = np.repeat(np.arange(period), np.diff(out_of))
    can: set[int] = set()
    needs: dict[int, list[int]] = {}
    for j in range(period):
      outs = range(out_of[j], out_of[j + 1])
      if not all(invariant[q] for q in outs) or any(q in carried for q in outs):
        continue
      ks = range(slot_of[j], slot_of[j + 1])
      inner = [int(maker[last[k]]) for k in ks if not outside[k] and last[k] >= 0]
      if all(i in can for i in inner) and all(alike[k] if outside[k] else last[k] >= 0 for k in ks):
        can.add(j)
        needs[j] = inner
    reader = np.repeat(np.arange(period), np.diff(slot_of))

    def is_read_as_it_lies(j: int) -> bool:
      readers = reader[~outside & (last == out_of[j])].tolist()
      return program.eqns[start + j].primitive.name == "transpose" and bool(readers) and all(
          program.eqns[start + r].primitive.name == "dot_general" for r in readers)

    hoisted: set[int] = set()
    for j in sorted(can, reverse=True):
      outs = range(out_of[j], out_of[j + 1])
      operands = sum(program.nbytes(int(v)) for v in program.slots[program.slot_start[start + j] : program.slot_start[start + j + 1]])
      size = int(program.out_bytes[program.out_start[start + j] : program.out_start[start + j + 1]].sum())
      is_better_before = size <= _CHEAP_BYTES or size <= operands and not is_read_as_it_lies(j)
      if j in hoisted or is_better_before or any(read_after[q] for q in outs):
        hoisted.add(j)
        hoisted.update(needs[j])
    return hoisted
