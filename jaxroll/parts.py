"""Sequences of values that lie in one array already: an earlier loop's ys, or an array taken apart.

What a scan reads per iteration, and what a `stack` or `concatenate` puts together,
is such a sequence. It is written as few parts: of ys, of one array's pieces, and values by themselves.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxroll.plan import Carry, Roll
from jaxroll.program import Program
from jaxroll.statics import STATIC_OPERANDS

_JOINED = 3  # values that are worth putting together as one array
_WAYS = 4  # ys that are woven into one xs


@dataclasses.dataclass(frozen=True)
class Part:
  """Elements `first`, `first + step`, ... (`count` of `available`) of what loop `loop` stacks of `result`.

  A negative `result`, -1-i, is what the loop's input i, a carry, was at the start of each iteration.
  """

  loop: int
  result: int
  first: int
  step: int
  count: int
  available: int

  @property
  def is_whole(self) -> bool:
    """Whether this is the stacked array as it is."""
    return (self.first, self.step, self.count) == (0, 1, self.available)

  @property
  def reads(self) -> tuple[tuple[int, int], ...]:
    """The loops and results whose ys it reads."""
    return ((self.loop, self.result),)

  @property
  def value(self) -> None:
    """A value by itself that it reads: none."""


@dataclasses.dataclass(frozen=True)
class Pieces:
  """A value's pieces, cut along `axis` into `available` equal ones: those at `indices`, each brought into `shape`."""

  value: int
  axis: int
  available: int
  shape: tuple[int, ...]
  indices: tuple[int, ...]
  reads = ()

  @property
  def is_whole(self) -> bool:
    """Whether the value itself, reshaped, has the pieces along its leading axis."""
    return self.axis == 0 and self.indices == tuple(range(self.available))


@dataclasses.dataclass(frozen=True)
class One:
  """A single value."""

  value: int
  reads = ()
  count = 1


@dataclasses.dataclass(frozen=True)
class Woven:
  """The elements of several parts of equal length in turn: the first of each, the second of each, and so on."""

  parts: tuple[Part, ...]
  value = None

  @property
  def reads(self) -> tuple[tuple[int, int], ...]:
    return tuple((p.loop, p.result) for p in self.parts)

  @property
  def count(self) -> int:
    return sum(p.count for p in self.parts)


Source = Part | Pieces | One | Woven


class Finder:
  """Finds the parts of sequences, given where each loop's results will lie."""

  def __init__(self, program: Program, rolls: list[Roll], values, scanned: list[bool], reverse: list[bool]):
    self.program, self.rolls, self.values, self.scanned, self.reverse = program, rolls, values, scanned, reverse
    self._pieces: dict[int, tuple | None] = {}

  def parts(self, wanted: tuple[int, ...], backwards: bool = False) -> tuple[Source, ...]:
    """The wanted values, backwards if so asked, as parts of earlier ys, as pieces of one array, and single values."""
    wanted = wanted[::-1] if backwards else wanted
    pieces = self._one_arrays_pieces(wanted)
    if pieces:
      return (pieces,)
    elements = [self._part(self.values.resolve(v)) for v in wanted]
    if not any(isinstance(e, Part) for e in elements):
      return tuple(elements)
    parts = self._joined(elements)
    for ways in range(2, min(_WAYS, len(wanted) // 2, len(parts)) + 1):
      columns = [self._joined(elements[i::ways]) for i in range(ways)] if len(wanted) % ways == 0 else []
      if columns and all(len(c) == 1 and isinstance(c[0], Part) for c in columns):
        return (Woven(tuple(c[0] for c in columns)),)
    return tuple(self._single(p) if isinstance(p, Part) and p.count == 1 else p for p in parts)

  def _joined(self, elements) -> list[Part | One]:
    """As few parts as these elements make."""
    parts: list[Part | One] = []
    for new in elements:
      joined = self._join(parts[-1], new) if parts else None
      if joined:
        parts[-1] = joined
      else:
        parts.append(new)
    return parts

  def collected(self, e: int) -> tuple[Source, ...] | None:
    """Parts of ys in place of the operands of equation `e`, if that puts a loop's results together.

    They may have got or lost axes of size 1 in between.
    """
    aval = self.program.eqns[e].outvars[0].aval if self.program.eqns[e].outvars else None
    if self.program.eqns[e].primitive.name not in ("stack", "concatenate") or not _is_local(aval) or 0 in aval.shape:
      return None
    operands = self._operands(e)
    parts = self.parts(tuple(self._unwrapped(v) for v in operands))
    if len(operands) < _JOINED or len(parts) * 2 > len(operands) or any(isinstance(p, Pieces) for p in parts):
      return None
    at, out = 0, []
    for part in parts:
      out.append(One(operands[at]) if isinstance(part, One) else part)
      at += part.count
    return tuple(out)

  def _operands(self, e: int) -> list[int]:
    """What equation `e` puts together; of a concatenation of concatenations, all that they do."""
    program, eqn = self.program, self.program.eqns[e]
    operands = program.slots[program.slot_start[e] : program.slot_start[e + 1]].tolist()
    if eqn.primitive.name == "stack":
      return operands
    makers = [program.maker(v) for v in operands]
    is_inner = [m is not None and program.eqns[m].primitive is eqn.primitive and program.eqns[m].params == eqn.params
                for m in makers]
    return [v for operand, maker, inner in zip(operands, makers, is_inner)
            for v in (self._operands(maker) if inner else [operand])]

  def _part(self, value: int) -> Part | One:
    made = self.values.loop_result(value)
    if made is None or not self.scanned[made[0]]:
      return One(value)
    loop, trip, result = made
    return Part(loop, result, _index(self.rolls[loop], self.reverse[loop], trip), 1, 1, self.rolls[loop].trips)

  def _join(self, last: Part | One, new: Part | One) -> Part | None:
    """Both as one part, if the second continues the first."""
    if isinstance(last, Part) and isinstance(new, Part):
      if (last.result < 0 <= new.result and last.loop == new.loop
          and self.rolls[new.loop].inputs[-1 - last.result].result == new.result):
        new = _carried_in(new, -1 - last.result, self.reverse[new.loop])
      if new is None or (last.loop, last.result) != (new.loop, new.result):
        return None
      step = new.first - (last.first + last.step * (last.count - 1))
      if step in (1, -1) and (last.count == 1 or step == last.step):
        return Part(last.loop, last.result, last.first, step, last.count + 1, last.available)
      return None
    if isinstance(last, One) and isinstance(new, One):
      return None
    # A carry's first value and its later ones: what the carry was at each iteration's start.
    part, one = (last, new) if isinstance(last, Part) else (new, last)
    if part.result < 0:
      return None
    roll = self.rolls[part.loop]
    i = next((i for i, s in enumerate(roll.inputs)
              if isinstance(s, Carry) and (s.result, s.lag, s.inits) == (part.result, 1, (one.value,))), None)
    carried = None if i is None else _carried_in(part, i, self.reverse[part.loop])
    if carried is None:
      return None
    start = Part(part.loop, -1 - i, _index(roll, self.reverse[part.loop], 0), 1, 1, roll.trips)
    return self._join(carried, start) if part is last else self._join(start, carried)

  def _single(self, part: Part) -> One:
    roll = self.rolls[part.loop]
    return One(roll.value(_index(roll, self.reverse[part.loop], part.first), part.result))

  def _unwrapped(self, value: int) -> int:
    """The loop's result of which `value` is a reshaped form, if there is one, else `value`."""
    e = self.program.maker(value)
    inner = None if e is None else _same_elements(self.program, e)
    made = None if inner is None or inner < 0 else self.values.loop_result(self.values.resolve(inner))
    return value if made is None or not self.scanned[made[0]] else inner

  def _one_arrays_pieces(self, wanted: tuple[int, ...]) -> Pieces | None:
    found, indices = None, []
    for value in wanted if len(wanted) >= _JOINED else ():
      if value not in self._pieces:
        self._pieces[value] = _piece(self.program, value)
      piece = self._pieces[value]
      if piece is None or found not in (None, piece[0]):
        return None
      found = piece[0]
      indices.append(piece[1])
    return Pieces(*found, self.program.aval(wanted[0]).shape, tuple(indices)) if found else None


def _piece(program: Program, value: int) -> tuple[tuple[int, int, int], int] | None:
  """The (array, axis, number of pieces) that a value is a piece of, and which piece."""
  e = program.maker(value)
  if e is None:
    return None
  inner = _same_elements(program, e)
  if inner is not None:
    value, e = inner, program.maker(inner)
    if e is None:
      return None
  eqn, which = program.eqns[e], value - int(program.out_start[e])
  name = eqn.primitive.name
  if name not in ("slice", "split", "unstack") or not _is_local(eqn.invars[0].aval):
    return None
  array, *statics = program.slots[program.slot_start[e] : program.slot_start[e + 1]].tolist()
  shape = eqn.invars[0].aval.shape
  if name == "unstack":
    return (array, eqn.params["axis"], shape[eqn.params["axis"]]), which
  if name == "split":
    sizes = eqn.params["sizes"]
    return ((array, eqn.params["axis"], len(sizes)), which) if len(set(map(int, sizes))) == 1 else None
  starts = [program.outer[-1 - s].val for s in statics]
  (sizes, strides), _ = STATIC_OPERANDS[eqn.primitive].split(eqn.params)
  cut = [d for d, (n, size) in enumerate(zip(shape, sizes)) if n != size]
  if len(cut) != 1 or len(statics) != len(shape) or any(s != 1 for s in strides):
    return None
  axis, = cut
  size, start = sizes[axis], starts[axis]
  if not size or shape[axis] % size or start % size:
    return None
  return (array, axis, shape[axis] // size), start // size


def _same_elements(program: Program, e: int) -> int | None:
  """The operand of an equation that only adds or drops axes of size 1, else None."""
  eqn = program.eqns[e]
  if eqn.primitive.name not in ("squeeze", "reshape", "broadcast_in_dim") or len(eqn.invars) != 1:
    return None
  if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
    return None
  shapes = [getattr(v.aval, "shape", None) for v in (eqn.invars[0], eqn.outvars[0])]
  if None in shapes or not all(_is_local(v.aval) for v in (eqn.invars[0], eqn.outvars[0])):
    return None
  before, after = ([d for d in shape if d != 1] for shape in shapes)
  return int(program.slots[program.slot_start[e]]) if before == after else None


def _is_local(aval) -> bool:
  """Whether an array's axes may be cut and moved freely: of known sizes, not explicitly sharded."""
  spec = getattr(getattr(aval, "sharding", None), "spec", ())
  return all(isinstance(d, (int, np.integer)) for d in aval.shape) and not any(s is not None for s in spec)


def _index(roll: Roll, reverse: bool, trip: int) -> int:
  return roll.trips - 1 - trip if reverse else trip


def _carried_in(part: Part, i: int, is_reverse: bool) -> Part | None:
  """The same values as a part of what carry `i` was at each iteration's start: one iteration later."""
  later = -1 if is_reverse else 1
  first, last = part.first + later, part.first + part.step * (part.count - 1) + later
  if not (0 <= first < part.available and 0 <= last < part.available):
    return None  # what the last iteration makes is no later one's start
  return dataclasses.replace(part, result=-1 - i, first=first)
