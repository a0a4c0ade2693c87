"""Running a schedule: the rolled program, written in JAX's public API.

Equations that stay are evaluated by `jax.core.eval_jaxpr` on sub-jaxprs, so that
binding, contexts and source locations remain JAX's business. Loops are emitted
through `jax.lax.scan`, or as calls of a `jax.jit`ted function.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll import compat
from jaxroll.bodies import fused_elements
from jaxroll.parts import One, Part, Pieces, Source, Woven
from jaxroll.plan import Carry, Const, Slices, Xs, mesh_giver
from jaxroll.program import Program, aval_bytes
from jaxroll.residuals import alone, equations, operands
from jaxroll.schedule import STACKING, Loop, Schedule
from jaxroll.statics import Static, with_operands

# Names of the functions that the pass calls.
CALLS = frozenset({"fence_body", "call_body", "inline_body", "batch_body", "fence", "stack", "unstack"})
_FUSED_PARTS = 8  # XLA:CPU leaves longer concatenations alone
# A row of xs of at most so many bytes is copied if at least so many elements are made where it is read.
_COPIED_ROW, _FUSED_ELEMENTS = 1 << 16, 1 << 12
_LARGEST_CONSTANT = 1 << 18  # bytes


def evaluate(program: Program, schedule: Schedule, bodies: list, functions: dict, platform: str | None,
             spell: Callable, args) -> list:
  """The program's results for these arguments, computed by the schedule.

  `bodies` holds each loop's body as a closed jaxpr, from `loop_body`; `functions`, what
  was made of bodies that are called, so that loops with the same body call the same
  function; `platform` is where the program will run, None if that is not known;
  `spell` writes the draws of a closed jaxpr, all of an array of keys at once, as they are to be.
  """
  return _Evaluation(program, schedule, bodies, functions, platform, spell, args).run()


def loop_body(program: Program, schedule: Schedule, loop: Loop):
  """The body of a loop as a closed jaxpr.

  Arguments: the loop's inputs. Results: those of the chains, of `lasts` and of `ys`.
  """
  roll = loop.roll
  inputs = [roll.inputs[i] for i in loop.inputs]
  avals = [_input_aval(program, roll, source) for source in inputs]
  arguments = compat.fresh_vars([a.update(weak_type=False) if a.weak_type else a for a in avals])
  of_input = dict(zip(loop.inputs, arguments))
  wanted = [*(c.result for c in loop.chains), *loop.lasts, *loop.ys]
  named = name_dropped(program, [roll.value(0, q) for q in wanted])
  eqns = equations(program, loop.remade, of_input)
  for j in loop.offsets:
    eqns += _body_equations(program, roll, j, of_input, named)
  outs = [named.get(roll.value(0, q), program.out_vars[roll.value(0, q)]) for q in wanted]
  return compat.close(compat.open_jaxpr(program.jaxpr, arguments, outs, eqns))


def _input_aval(program: Program, roll, source):
  if isinstance(source, Const):
    return program.aval(source.value)
  if isinstance(source, Carry):
    return program.out_vars[roll.value(0, source.result)].aval
  if isinstance(source, Slices):
    aval = program.aval(source.value)
    return aval.update(shape=(1, *aval.shape[1:]))
  return program.aval(source.values[0]) or compat.ShapedArray((), np.dtype(np.int32))


def name_dropped(program: Program, values) -> dict[int, Any]:
  """Variables for results that the original program drops."""
  dropped = [v for v in values if type(program.out_vars[v]) is compat.DropVar]
  return dict(zip(dropped, compat.fresh_vars([program.out_vars[v].aval for v in dropped]))) if dropped else {}


def _body_equations(program: Program, roll, j: int, of_input, named) -> list:
  """The first iteration's equation at offset `j`, reading the body's arguments."""
  e = roll.start + j
  eqn = program.eqns[e]
  lo = int(program.slot_start[e] - program.slot_start[roll.start])
  hi = int(program.slot_start[e + 1] - program.slot_start[roll.start])
  statics = hi - lo - len(eqn.invars)
  read = []
  for k in range(lo, hi - statics):
    b, atom = roll.bindings[k], eqn.invars[k - lo]
    if b >= 0:
      value = roll.value(0, b)
      read.append(named.get(value, program.out_vars[value]))
    elif type(atom) is compat.Literal and isinstance(roll.inputs[-1 - b], Const):
      read.append(atom)
    else:
      read.append(of_input[-1 - b])
  first = int(program.out_start[e])
  outs = [named.get(first + i, v) for i, v in enumerate(eqn.outvars)]
  own = roll.bindings[hi - statics : hi]
  moving = [None if isinstance(roll.inputs[-1 - b], Const) else of_input[-1 - b] for b in own]
  return with_operands(eqn.replace(invars=read, outvars=outs), moving, program.fingerprinter.statics)


class _Evaluation:
  """One walk over a schedule's steps, with the values made so far."""

  def __init__(self, program: Program, schedule: Schedule, bodies, functions, platform, spell, args):
    self.program, self.schedule, self.bodies = program, schedule, bodies
    self.functions, self.platform, self.spell = functions, platform, spell
    self.outer = dict(zip(program.jaxpr.constvars, program.closed.consts))
    self.outer.update(zip(program.jaxpr.invars, args))
    self.may_fence = platform == "cpu" and schedule.on_one_device  # what need not be, for speed
    self.made: dict[int, Any] = {}  # by resolved value
    self.fenced: set[int] = set()  # those of the made that are read from behind a fence
    self.stacks: dict[tuple[int, int], Any] = {}  # (loop, body result) -> ys
    self.stacked: dict[Any, Any] = {}  # parts or slices -> xs, shared between loops

  def run(self) -> list:
    for step in self.schedule.steps:
      if isinstance(step, int):
        self.loop(step)
      else:
        for is_collected, group in itertools.groupby(step, self.schedule.collected.__contains__):
          if is_collected:
            for e in group:
              with compat.mesh_context(self.program.eqns[e]):
                self.collect(e)
          else:
            self.equations(tuple(group))
    return [self.result(v, a) for v, a in zip(self.program.results, self.program.jaxpr.outvars)]

  def read(self, value: int) -> Any:
    value = self.schedule.values.resolve(value)
    if value < 0:
      atom = self.program.outer[-1 - value]
      return atom.val if isinstance(atom, (compat.Literal, Static)) else self.outer[atom]
    if value not in self.made and value in self.schedule.remade:
      arguments = [self.read(v) for v in operands(self.program, value).values()]
      self.made[value], = jax.core.eval_jaxpr(alone(self.program, value), (), *arguments)
    return self.made[value]

  def array(self, value: int) -> Any:
    """The value as an array of its type, not weakly typed."""
    x, aval = self.read(value), self.program.aval(value)
    if not hasattr(x, "dtype"):
      return jnp.asarray(x, np.int32 if aval is None else aval.dtype)
    return strong(x) if getattr(aval, "weak_type", False) else x  # loops' results are strong where the program's are weak

  def result(self, value: int, atom) -> Any:
    if type(atom) is compat.Literal:
      return atom.val
    x = self.read(value)
    return compat.as_weak(x) if getattr(atom.aval, "weak_type", False) and not is_weak(x) else x

  def equations(self, step: tuple[int, ...]) -> None:
    program = self.program
    outs = [v for e in step for v in range(program.out_start[e], program.out_start[e + 1])]
    named = name_dropped(program, [v for v in outs if v in self.schedule.needed])
    eqns = [program.eqns[e] for e in step]
    if named:
      eqns = [
          e.replace(outvars=[named.get(int(program.out_start[i]) + k, v) for k, v in enumerate(e.outvars)])
          for i, e in zip(step, eqns)]
    own: set[Any] = set()
    inputs: dict[Any, Any] = {}
    for n, (i, eqn) in enumerate(zip(step, eqns)):
      read = list(eqn.invars)
      for k, atom in enumerate(read):
        if type(atom) is compat.Literal:
          continue
        value = int(program.slots[program.slot_start[i] + k])
        resolved = self.schedule.values.resolve(value)
        if resolved != value:  # computed once, elsewhere: maybe by an equation of this very step
          atom = read[k] = named.get(resolved, program.out_vars[resolved])
        if atom not in own and atom not in inputs:
          inputs[atom] = self.read(resolved)
      if any(a is not b for a, b in zip(read, eqn.invars)):
        eqns[n] = eqn.replace(invars=read)
      own.update(eqn.outvars)
    outs = [v for v in outs if v in self.schedule.needed]
    variables = [named.get(v, program.out_vars[v]) for v in outs]
    jaxpr = compat.open_jaxpr(program.jaxpr, inputs, variables, eqns)
    self.made.update(zip(outs, jax.core.eval_jaxpr(jaxpr, (), *inputs.values())))

  def collect(self, e: int) -> None:
    """An equation that puts values together along an axis, from the arrays in which they lie together."""
    eqn = self.program.eqns[e]
    is_stack = eqn.primitive.name == "stack"
    axis = eqn.params["axis" if is_stack else "dimension"]
    shape = eqn.outvars[0].aval.shape
    before, after = shape[:axis], shape[axis + 1 :]
    arrays = []
    for part in self.schedule.collected[e]:
      if isinstance(part, One):
        array = self.array(part.value)
        arrays.append(lax.expand_dims(array, (axis,)) if is_stack else array)
        continue
      array = self.assemble((part,))
      length = array.size // (part.count * math.prod(before + after))  # of an element, along the axis
      element = (*before, *after) if length == 1 else (*before, length, *after)
      array = jnp.moveaxis(_reshaped(array, (part.count, *element)), 0, axis)
      arrays.append(_reshaped(array, (*before, part.count * length, *after)))
    self.made[int(self.program.out_start[e])] = arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, axis)

  def loop(self, k: int) -> None:
    loop = self.schedule.loops[k]
    with compat.mesh_context(mesh_giver(self.program, loop.roll)):
      if loop.strategy in STACKING:
        self.scan(k, loop, self.bodies[k])
      else:
        self.calls(loop, self.bodies[k])

  def calls(self, loop: Loop, body) -> None:
    """One call per iteration of one function, which lowering emits once."""
    roll = loop.roll
    call = self.function(loop.strategy, body)
    fences = loop.strategy == "fence"
    hidden = self.hidden(loop) if fences and self.may_fence else {}
    carried = [q for q in loop.ys if fences and q in loop.carried and q not in loop.unfenced]
    # What the first iteration starts from, too, or its kernels are fused with what makes that, and are others.
    self.fence([v for s in (roll.inputs[i] for i in loop.inputs) if isinstance(s, Carry) and s.result in carried
                for v in s.inits if self.program.is_computed(v)])
    for trip in range(roll.trips):
      arguments = [self.argument(loop, roll.inputs[i], trip, hidden) for i in loop.inputs]
      call = call if trip else _bound(call, arguments)
      outs = call(*arguments)
      self.made.update((roll.value(trip, q), value) for q, value in zip(loop.ys, outs))
      self.fence([roll.value(trip, q) for q in carried])

  def apart(self, loop: Loop, body, xs: dict) -> list[int]:
    """The inputs whose rows are copied out of the xs in each iteration, and not read where they lie.

    What XLA:CPU fuses with the slice at an unknown place it does not vectorize: an element takes a nanosecond or two,
    against a microsecond for the copy (jax 0.10.2 and 0.12).
    """
    if loop.strategy != "scan" or not self.may_fence:
      return []
    rows = [n for n, i in enumerate(loop.inputs) if i in xs and xs[i].ndim > 1 and not compat.key_impl(xs[i])
            and aval_bytes(body.in_avals[n]) <= _COPIED_ROW]
    return [loop.inputs[n] for n, fused in zip(rows, fused_elements(body, rows)) if fused >= _FUSED_ELEMENTS]

  def fence(self, values: list[int]) -> None:
    """Puts values that have been made behind a fence, once."""
    values = [v for v in dict.fromkeys(map(self.schedule.values.resolve, values))
              if v in self.made and v not in self.fenced]
    if values:
      self.made.update(zip(values, compat.fence([self.made[v] for v in values], self.platform)))
      self.fenced.update(values)

  def function(self, strategy: str, body) -> Callable:
    """The body as a function that JAX calls, not evaluates."""
    key = id(body), strategy
    if key not in self.functions:
      def call(*args):
        return [strong(o) for o in jax.core.eval_jaxpr(body.jaxpr, body.consts, *args)]

      call.__name__ = strategy + "_body"
      self.functions[key] = compat.out_of_line(call) if strategy == "call" else jax.jit(call)
    return self.functions[key]

  def hidden(self, loop: Loop) -> dict:
    """The scalar constants that differ between iterations, by value, behind a fence.

    XLA would write them into the kernels of each iteration, which then are as many different ones to compile.
    """
    known, arrays = {}, []
    for source in (loop.roll.inputs[i] for i in loop.inputs):
      if isinstance(source, Slices):
        known.update((("start", start), np.int32(start)) for start in source.starts)
      elif isinstance(source, Xs):
        constants = [self.program.constant(v) for v in source.values]
        if all(c is not None and c.ndim == 0 for c in constants):
          known.update(zip(source.values, constants))
        else:
          arrays.append(source.values[0])
      elif isinstance(source, Const):
        arrays.append(source.value)
    # Constants alone would be folded away: what XLA does not know, and the body reads, goes through the fence with them.
    arrays = [v for v in arrays if self.program.is_computed(v)]
    if not known or not arrays:
      return {}
    smallest = min(arrays, key=self.program.nbytes)
    names = (smallest, *known)
    return dict(zip(names, compat.fence([self.array(smallest), *known.values()], self.platform)))

  def argument(self, loop: Loop, source, trip: int, hidden: dict):
    """An input of the body in iteration `trip` of a roll that is not scanned."""
    if isinstance(source, Const):
      return hidden[source.value] if source.value in hidden else self.array(source.value)
    if isinstance(source, Carry):
      before = trip - source.lag
      return self.array(source.inits[trip] if before < 0 else loop.roll.value(before, source.result))
    if isinstance(source, Slices):
      start = source.starts[trip]
      array = self.array(source.value)
      at = hidden.get(("start", start))
      if at is None:
        return lax.slice_in_dim(array, start, start + 1)
      return lax.dynamic_slice_in_dim(array, at, 1, allow_negative_indices=False)
    value = source.values[trip]
    return hidden[value] if value in hidden else self.array(value)

  def scan(self, k: int, loop: Loop, body) -> None:
    roll = loop.roll
    order = [roll.inputs[i] for i in loop.inputs]
    consts = {i: self.array(s.value) for i, s in zip(loop.inputs, order) if isinstance(s, Const)}
    xs, indexed = {}, {}
    for i, source in zip(loop.inputs, order):
      if isinstance(source, (Xs, Slices)):
        xs[i], indexed[i] = self.xs(loop, i)
    registers = [[self.array(v) for v in reversed(chain.inits)] for chain in loop.chains]
    zeros = [self.zero(roll.value(0, q)) for q in loop.lasts]
    n_chains, n_lasts = len(loop.chains), len(loop.lasts)
    apart = self.apart(loop, body, xs)

    def step(carry, x):
      registers, _ = carry
      x = {**x, **dict(zip(apart, compat.fence([x[i] for i in apart], self.platform)))} if apart else x
      def argument(i, source):
        if isinstance(source, Const):
          return consts[i]
        if isinstance(source, Carry):
          chain, lag = loop.registers[i]
          return registers[chain][lag - 1]
        return x[i] if indexed[i] is None else indexed[i](x[i])
      outs = jax.core.eval_jaxpr(
          body.jaxpr, body.consts, *[argument(i, s) for i, s in zip(loop.inputs, order)])
      outs = [strong(o) for o in outs]
      started = [registers[c][r - 1] for c, r in (loop.registers[i] for i in loop.carried_ys)]
      moved = [[new, *old[:-1]] for new, old in zip(outs, registers)]
      return (moved, outs[n_chains : n_chains + n_lasts]), (outs[n_chains + n_lasts :], started)

    carry, pieces, batches = (registers, zeros), [], {}
    bounds = [roll.trips * n // loop.segments for n in range(loop.segments + 1)]
    for low, high in zip(bounds, bounds[1:]):
      some = xs if loop.segments == 1 else {i: lax.slice_in_dim(x, low, high) for i, x in xs.items()}
      if loop.strategy == "batch":
        if high - low not in batches:
          batches[high - low] = self.batch(step, carry, some)
        carry, (ys, started) = batches[high - low](carry, some)
      else:
        carry, (ys, started) = lax.scan(
            step, carry, some, length=high - low, reverse=loop.reverse, unroll=loop.unroll)
      pieces.append([*ys, *started])
    registers, lasts = carry
    for chain, held in zip(loop.chains, registers):
      for lag, value in enumerate(held, 1):
        if lag <= roll.trips:
          self.made[roll.value(roll.trips - lag, chain.result)] = value
    for q, value in zip(loop.lasts, lasts):
      self.made[roll.value(roll.trips - 1, q)] = value
    for n, q in enumerate([*loop.ys, *(-1 - i for i in loop.carried_ys)]):
      self.stacks[k, q] = pieces[0][n] if loop.segments == 1 else None
      trips = loop.taken.get(q, ())
      for piece, low, high in zip(pieces, bounds, bounds[1:]):
        inside = [t for t in trips if low <= loop.index(t) < high]
        if inside:
          parts = self.take_apart(piece[n], [loop.index(t) - low for t in inside])
          self.made.update((loop.row(q, t), part) for t, part in zip(inside, parts))

  def take_apart(self, ys, indices: list[int]) -> list:
    if len(indices) <= 2:
      return [lax.index_in_dim(ys, i, 0, keepdims=False) for i in indices]
    return _unstack(ys, tuple(indices), self.platform)

  def batch(self, step: Callable, carry, xs):
    """All iterations at once, of which none reads what another made, as a function of carry and xs."""
    vectorized = jax.vmap(step, (None, 0), (None, 0))
    closed, shapes = jax.make_jaxpr(vectorized, return_shape=True)(carry, xs)
    closed = self.spell(closed)

    @jax.jit
    def batch_body(consts, leaves):
      return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

    def run(carry, xs):
      outs = batch_body(closed.consts, jax.tree.leaves((carry, xs)))
      carry, (ys, started) = jax.tree.unflatten(jax.tree.structure(shapes), outs)
      # A fence, or each reader would make its part of them anew; a key's derivation has its own.
      fenced = iter(compat.fence([y for y in ys if not compat.key_impl(y)], self.platform))
      return carry, ([y if compat.key_impl(y) else next(fenced) for y in ys], started)

    return run

  def zero(self, value: int):
    aval = self.program.aval(value)
    return lax.full(aval.shape, 0, aval.dtype)

  def xs(self, loop: Loop, i: int):
    """The xs of an input, and how the input is read with an element of it; None where that is the input itself."""
    source = loop.roll.inputs[i]
    if isinstance(source, Slices):
      starts = source.starts[::-1] if loop.reverse else source.starts
      key = (source.value, starts)
      if key not in self.stacked:
        self.stacked[key] = _rows(self.array(source.value), starts)
      return self.stacked[key], lambda row: lax.expand_dims(row, (0,))
    ordered = source.values[::-1] if loop.reverse else source.values
    constants = constant_xs(self.program, ordered)
    if constants is not None:
      return self.sequence(constants), None
    parts = loop.feeds[i]
    if is_indexed(parts):
      return self.indexed(parts[0])
    if parts not in self.stacked:
      self.stacked[parts] = self.pieces(parts[0]) if isinstance(parts[0], Pieces) else self.assemble(parts)
    return self.stacked[parts], (lambda x: _reshaped(x, parts[0].shape)) if isinstance(parts[0], Pieces) else None

  def pieces(self, part: Pieces):
    """An array with all pieces along its leading axis, each in the shape in which it lies in the value.

    Axes of size one are left to the body: XLA may give an array with such an axis another layout for the loop than
    the value has, and so copy it (jax 0.10.2 on CPU).
    """
    array = self.array(part.value)
    return array if len(array) == part.available else lax.reshape(
        array, (part.available, len(array) // part.available, *array.shape[1:]))

  def indexed(self, part: Part | Pieces):
    """Indices as xs, and what reads the element at one of them."""
    if isinstance(part, Part):
      array = self.stacks[part.loop, part.result]
      indices = np.arange(part.count, dtype=np.int32) * np.int32(part.step) + np.int32(part.first)
      return self.sequence(indices), lambda k: _element(array, k)
    array = self.array(part.value)
    size = array.shape[part.axis] // part.available
    return (self.sequence(np.asarray(part.indices, np.int32) * np.int32(size)),
            lambda k: _reshaped(
                lax.dynamic_slice_in_dim(array, k, size, part.axis, allow_negative_indices=False), part.shape))

  def sequence(self, constants: np.ndarray):
    """The constants; computed, if they are integers in even steps."""
    if constants.dtype != np.int32 or constants.ndim != 1 or len(constants) < 3 or np.diff(constants, 2).any():
      return constants
    first, step = int(constants[0]), int(np.diff(constants)[0])
    key = ("sequence", len(constants), first, step)
    if key not in self.stacked:
      array = lax.iota(np.int32, len(constants))
      array = array if step == 1 else array * np.int32(step)
      self.stacked[key] = array if first == 0 else array + np.int32(first)
    return self.stacked[key]

  def assemble(self, parts: tuple[Source, ...]):
    """An array whose leading axis runs through the parts."""
    if isinstance(parts[0], Pieces):
      return _reshaped(self.array(parts[0].value), (parts[0].available, *parts[0].shape))
    if len(parts) == 1 and isinstance(parts[0], Part):
      return self.part(parts[0])
    if len(parts) == 1 and isinstance(parts[0], Woven):
      # Along axis 1: where the columns are slices of one array, XLA sees that it need not be put together.
      return lax.collapse(lax.concatenate([lax.expand_dims(self.part(p), (1,)) for p in parts[0].parts], 1), 0, 2)
    if all(isinstance(p, One) for p in parts):
      return _stack([self.array(p.value) for p in parts], self.platform)
    pieces = [
        self.part(p) if isinstance(p, Part) else lax.expand_dims(self.array(p.value), (0,)) for p in parts]
    return lax.concatenate(pieces, 0)

  def part(self, part: Part):
    ys = self.stacks[part.loop, part.result]
    last = part.first + part.step * (part.count - 1)
    low, high = min(part.first, last), max(part.first, last) + 1
    if (low, high) != (0, part.available):
      ys = lax.slice_in_dim(ys, low, high)
    return lax.rev(ys, (0,)) if part.step < 0 else ys


def _bound(call: Callable, arguments) -> Callable:
  """`call`, a jitted function, for many calls in one context: JAX looks up how to bind it once, not at each call."""
  avals = tuple(map(jax.typeof, arguments))
  jaxpr = jax.make_jaxpr(call)(*avals).jaxpr
  eqn = jaxpr.eqns[0] if len(jaxpr.eqns) == 1 else None
  if eqn is None or jaxpr.constvars or eqn.invars != jaxpr.invars or eqn.outvars != jaxpr.outvars:
    return call  # a result is an argument

  def bind(*args):
    if tuple(map(jax.typeof, args)) != avals:
      return call(*args)
    with eqn.ctx.manager:
      return eqn.primitive.bind(*args, **eqn.params)

  return bind


def is_indexed(parts: tuple[Source, ...]) -> bool:
  """Whether an xs is better read in the body, element by element, than cut out of the array where it lies."""
  return len(parts) == 1 and isinstance(parts[0], (Part, Pieces)) and not parts[0].is_whole


def _reshaped(array, shape):
  return array if array.shape == tuple(shape) else lax.reshape(array, shape)


def constant_xs(program: Program, values) -> np.ndarray | None:
  """The values as one constant array, if all are known and it is not large."""
  arrays = []
  for value in values:
    arrays.append(program.constant(value))
    if arrays[-1] is None or arrays[-1].nbytes * len(values) > _LARGEST_CONSTANT:
      return None
  return np.stack(arrays)


def is_weak(x) -> bool:
  """Whether an array is weakly typed."""
  return bool(getattr(jax.typeof(x), "weak_type", False))


def strong(x):
  """The array, not weakly typed."""
  return lax.convert_element_type(x, x.dtype) if is_weak(x) else x


@functools.partial(jax.jit, static_argnums=1)
def _stack(arrays, platform):
  rows = [lax.expand_dims(a, (0,)) for a in arrays]
  if platform == "cpu" and len(rows) <= _FUSED_PARTS:
    # Fused with what makes or shapes its operands, a concatenation compiles to elementwise code, several times as
    # much as the copies that it is by itself.
    rows = compat.fence(rows, platform)
  return lax.concatenate(rows, 0)


_stack.__wrapped__.__name__ = "stack"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unstack(stacked, indices, platform):
  # Slices and their readers that are equal but for the slice's offset would be as many different kernels to
  # compile: behind the fence XLA does not know the offsets.
  stacked, *at = compat.fence([stacked, *map(np.int32, indices)], platform)
  return [_element(stacked, i) for i in at]


_unstack.__wrapped__.__name__ = "unstack"


def _element(array, index):
  return lax.dynamic_index_in_dim(array, index, 0, keepdims=False, allow_negative_indices=False)


def _rows(array, starts: tuple[int, ...]):
  """`array[starts]`, the starts in even steps."""
  step = starts[1] - starts[0] if len(starts) > 1 else 1
  low, high = min(starts), max(starts) + 1
  if (low, high, abs(step)) != (0, array.shape[0], 1):
    array = lax.slice_in_dim(array, low, high, abs(step))
  return lax.rev(array, (0,)) if step < 0 else array
