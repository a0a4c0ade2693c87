"""Static operands: what an equation holds that may differ between iterations.

They are left out of its fingerprint and count as operands of their own, so that
equations that differ in nothing else share a body, in which they are data:

  integers that a rule in `STATIC_OPERANDS` takes out of the parameters, such as where a slice starts;
  literals, arrays closed over, and static operands within the jaxprs of a `jit`, `checkpoint`, `scan`, `while` or
  `cond`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Callable

import jax
import numpy as np
from jax import lax

from jaxroll import compat, where

_SMALL = 256  # elements of an array for whose every one there may be a choice
_MOST = 300  # static operands of one equation; with more it matches only if all are the same


@dataclasses.dataclass(frozen=True, eq=False)
class Static:
  """A static operand that is no literal: an int, or with a type, an array."""

  val: Any
  aval: Any = None


class StaticOperands:
  """How a primitive's static parameters become operands.

  `split(params)` gives the parameters that must be equal and the integers that
  may differ; `apply(operand_values, integers, params)` computes the equation with
  the integers given as int32 scalars, bit for bit as the primitive would.
  """

  def __init__(self, split: Callable, apply: Callable):
    self.split, self.apply = split, apply


def _split_slice(params):
  starts, limits = params["start_indices"], params["limit_indices"]
  if not all(isinstance(i, (int, np.integer)) for i in (*starts, *limits)):
    return (starts, limits, params["strides"]), ()  # symbolic: compared as it stands
  strides = params["strides"] or (1,) * len(starts)
  reach = [(b - a - 1) // s * s + 1 if b > a else 0 for a, b, s in zip(starts, limits, strides)]  # first to last
  return (tuple(reach), tuple(strides)), tuple(starts)


def _apply_slice(operands, starts, params):
  (sizes, strides), _ = _split_slice(params)
  out = lax.dynamic_slice(operands[0], starts, sizes, allow_negative_indices=False)
  if any(s != 1 for s in strides):
    out = lax.slice(out, (0,) * len(sizes), sizes, strides)
  return [out]


def _split_pad(params):
  config = params["padding_config"]
  if not all(isinstance(i, (int, np.integer)) and i >= 0 for c in config for i in c):
    return (config,), ()  # symbolic, or cropping
  return tuple([(int(low + high), int(gap)) for low, high, gap in config]), tuple([int(low) for low, _, _ in config])


def _apply_pad(operands, starts, params):
  operand, fill = operands
  spread = lax.pad(operand, fill, [(0, 0, gap) for _, _, gap in params["padding_config"]])
  shape = [n + low + high for n, (low, high, _) in zip(spread.shape, params["padding_config"])]
  sharding = where.explicit_sharding(jax.typeof(spread))
  fill = lax.broadcast(fill, shape, out_sharding=sharding)
  around = [d for d, (low, high, _) in enumerate(params["padding_config"]) if low + high]
  is_small = all(isinstance(n, int) for n in shape) and math.prod(shape) <= _SMALL
  if is_small and around and all(spread.shape[d] == 1 for d in around):
    # One element, row or column: a choice fuses with its reader, and is not compiled anew for each as an update is.
    here = [lax.eq(lax.broadcasted_iota(np.int32, shape, d, out_sharding=sharding), starts[d]) for d in around]
    chosen = functools.reduce(lax.bitwise_and, here)
    return [lax.select(chosen, lax.broadcast_in_dim(spread, shape, range(len(shape)), out_sharding=sharding), fill)]
  return [lax.dynamic_update_slice(fill, spread, starts, allow_negative_indices=False)]


STATIC_OPERANDS = {
    compat.slice_p: StaticOperands(_split_slice, _apply_slice),
    compat.pad_p: StaticOperands(_split_pad, _apply_pad),
}


def static_operands(eqn, memo: dict) -> tuple[Static | compat.Literal, ...]:
  """The static operands of an equation, in an order that equations of the same fingerprint share.

  `memo` keeps those of nested jaxprs from call to call.
  """
  rule = STATIC_OPERANDS.get(eqn.primitive)
  if rule is not None:
    return tuple([Static(int(i)) for i in rule.split(eqn.params)[1]])
  held = []
  for jaxpr in compat.opened_jaxprs(eqn):
    own = _held_by(jaxpr, memo)
    if own is None or len(held) + len(own) > _MOST:
      return ()
    held += own
  return tuple(held)


def _held_by(jaxpr, memo: dict) -> tuple | None:
  """The static operands within a jaxpr, None if they are too many."""
  found = memo.get(id(jaxpr))
  if found is None:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    held = [Static(c, v.aval) for v, c in zip(inner.constvars, getattr(jaxpr, "consts", ()))]
    for eqn in inner.eqns:
      held += [a for a in eqn.invars if type(a) is compat.Literal]
      held += static_operands(eqn, memo)
      if len(held) > _MOST:
        break
    found = memo[id(jaxpr)] = (tuple(held) if len(held) <= _MOST else None, jaxpr)
  return found[0]


def with_operands(eqn, moving: list, memo: dict) -> list:
  """Equations that compute `eqn` with some of its static operands given.

  `moving` has, for each static operand, the variable that holds it, or None if it
  stays what it is. `memo` is that of `static_operands`.
  """
  given = [v for v in moving if v is not None]
  if not given:
    return [eqn]
  rule = STATIC_OPERANDS.get(eqn.primitive)
  if rule is None:
    jaxprs, extras, rest = [], [], iter(moving)
    for jaxpr in compat.opened_jaxprs(eqn):
      own = list(itertools.islice(rest, len(_held_by(jaxpr, memo))))
      jaxprs.append(_opened(jaxpr, own, memo))
      extras.append(_distinct(own))
    return [compat.with_more_operands(eqn, jaxprs, extras)]
  fixed = [s.val for s in static_operands(eqn, memo)]
  count = len(eqn.invars)

  def apply(operands):
    rest = iter(operands[count:])
    integers = [np.int32(i) if v is None else next(rest) for i, v in zip(fixed, moving)]
    return rule.apply(operands[:count], integers, eqn.params)

  return compat.splice(eqn.replace(invars=[*eqn.invars, *given]), apply)


def _opened(jaxpr, moving: list, memo: dict):
  """The jaxpr with an argument more for each of its static operands that moves."""
  inner = getattr(jaxpr, "jaxpr", jaxpr)
  held = _held_by(jaxpr, memo)
  avals = [compat.ShapedArray((), np.dtype(np.int32)) if h.aval is None else h.aval for h in held]
  aval_of = dict(zip(moving, avals))
  given = _distinct(moving)
  argument_of = dict(zip(given, compat.fresh_vars([aval_of[v] for v in given])))
  rest = iter([argument_of.get(v) for v in moving])
  consts = [(v, c, next(rest)) for v, c in zip(inner.constvars, getattr(jaxpr, "consts", ()))]
  renamed = {v: new for v, _, new in consts if new is not None}
  eqns = []
  for eqn in inner.eqns:
    read = [(next(rest) or a) if type(a) is compat.Literal else renamed.get(a, a) for a in eqn.invars]
    own = [next(rest) for _ in static_operands(eqn, memo)]
    eqns += with_operands(eqn.replace(invars=read), own, memo)
  outvars = [a if type(a) is compat.Literal else renamed.get(a, a) for a in inner.outvars]
  kept = [(v, c) for v, c, new in consts if new is None]
  return compat.with_more_inputs(jaxpr, kept, list(argument_of.values()), outvars, eqns)


def _distinct(variables: list) -> list:
  """The variables, None left out, each once: iterations that differ in a literal may hold it at many places."""
  return [v for v in dict.fromkeys(variables) if v is not None]
