"""Fingerprints: an integer per equation, equal for equations that do the same.

Two equations have one fingerprint if they have the same primitive, parameters,
operand types and result types, and may therefore share a loop body. Keys are
interned (compared exactly by the dictionary, never by hash alone), nested jaxprs
are compared up to renaming, and names and source locations are ignored.

What may differ between iterations is left out of the fingerprint and handed over
as *static operands*: integers that a rule in `STATIC_OPERANDS` takes out of the
parameters, such as where a slice starts.
"""

from __future__ import annotations

import itertools
import types
from typing import Any, Callable, Hashable

import jax
import numpy as np
from jax import lax

from jaxroll import compat, exempt
from jaxroll.functions import array_key, function_key

# Primitives whose equations are never equal to another: they draw state from outside.
_STATEFUL = frozenset({"rng_uniform", "infeed", "outfeed", "create_token"})
# Parameters that do not change what an equation computes, by primitive.
_COSMETIC = {"jit": ("name",), "custom_vjp_call": ("out_trees",)}


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
  return (tuple(b - a for a, b in zip(starts, limits)), tuple(strides)), tuple(starts)


def _apply_slice(operands, starts, params):
  (sizes, strides), _ = _split_slice(params)
  out = lax.dynamic_slice(operands[0], starts, sizes)
  if any(s != 1 for s in strides):
    out = lax.slice(out, (0,) * len(sizes), sizes, strides)
  return [out]


STATIC_OPERANDS = {compat.slice_p: StaticOperands(_split_slice, _apply_slice)}


class Fingerprinter:
  """Interns equations, types, parameters and nested jaxprs for one run of the pass."""

  def __init__(self):
    self._ids: dict[Hashable, int] = {}
    self._fresh = itertools.count(-1, -1)
    self._avals: dict[Any, tuple[int, int, bool]] = {}
    self._jaxprs: dict[int, tuple[int | None, Any]] = {}
    self._sizes: dict[int, tuple[int, Any]] = {}

  def _intern(self, key: Hashable) -> int:
    ids = self._ids
    found = ids.get(key)
    if found is None:
      found = ids[key] = len(ids)
    return found

  def unique(self) -> int:
    """A fingerprint that equals no other."""
    return next(self._fresh)

  def aval(self, aval) -> tuple[int, int, bool]:
    """Ids of a type with and without its weak type, and whether it is plain."""
    found = self._avals.get(aval)
    if found is None:
      plain = compat.is_plain(aval)
      exact = self._intern(("aval", aval))
      strong = exact
      if plain and aval.weak_type:
        strong = self._intern(("aval", aval.update(weak_type=False)))
      found = self._avals[aval] = (exact, strong, plain)
    return found

  def literal(self, literal) -> Hashable:
    """A key equal for literals of the same bits, dtype, shape and weak type."""
    value = literal.val
    if type(value) in (bool, int, float):
      return (type(value), repr(value), self.aval(literal.aval)[0])
    return (array_key(value), self.aval(literal.aval)[0])

  def equation(self, eqn, operand_avals) -> tuple[int, tuple[int, ...]]:
    """The fingerprint of `eqn` and its static operands.

    `operand_avals` are the `aval` ids of its operands. An equation that must not
    be merged with any other has a negative fingerprint.
    """
    primitive, params = eqn.primitive, eqn.params
    rule = STATIC_OPERANDS.get(primitive)
    key, statics = (None, ()) if rule is None else rule.split(params)
    outs = [self.aval(v.aval) for v in eqn.outvars]
    if ((eqn.effects and not compat.is_pure(eqn.effects)) or primitive.name in _STATEFUL
        or not all([a[2] for a in operand_avals]) or not all([a[2] for a in outs]) or exempt.is_exempt(eqn)):
      return self.unique(), statics
    if rule is None:
      key = self._params(primitive, params)
      if key is None:
        return self.unique(), statics
    key = (primitive, eqn.ctx, key, tuple([a[1] for a in operand_avals]), tuple([a[0] for a in outs]))
    return self._intern(key), statics

  def _params(self, primitive, params) -> Hashable | None:
    """A key for an equation's parameters, or None if they can't be compared."""
    if not params:
      return ()
    try:
      cosmetic = _COSMETIC.get(primitive.name, ())
      return tuple([(k, self._value(v)) for k, v in params.items() if k not in cosmetic])
    except (_Incomparable, RecursionError):
      return None

  def _value(self, value) -> Hashable:
    kind = type(value)
    if kind in _ATOMS:
      return (kind, value)
    if kind is float or kind is complex:
      return (kind, repr(value))
    if kind is tuple or kind is list:
      return tuple([self._value(v) for v in value])
    if isinstance(value, np.integer):
      return (int, int(value))
    if kind is compat.ClosedJaxpr or kind is compat.Jaxpr:
      return ("jaxpr", self.jaxpr(value))
    if isinstance(value, tuple):  # a named tuple, such as GatherDimensionNumbers
      return (kind, *[self._value(v) for v in value])
    if kind is dict:
      return ("dict", *[(k, self._value(v)) for k, v in sorted(value.items(), key=lambda i: str(i[0]))])
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
      return array_key(value)
    if isinstance(value, (types.FunctionType, compat.WrappedFun)):
      return function_key(value, self.jaxpr)
    try:
      hash(value)
    except TypeError:
      raise _Incomparable from None
    return ("equal", value)

  def jaxpr(self, jaxpr) -> int:
    """An id equal for jaxprs that are equal up to renaming, constants by value."""
    found = self._jaxprs.get(id(jaxpr))
    if found is None:
      try:
        key = self._intern(self._jaxpr_key(jaxpr))
      except _Incomparable:
        key = None
      found = self._jaxprs[id(jaxpr)] = (key, jaxpr)
    if found[0] is None:
      raise _Incomparable
    return found[0]

  def _jaxpr_key(self, closed) -> Hashable:
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = getattr(closed, "consts", ())
    numbers: dict[Any, int] = {}
    avals: dict[Any, tuple] = {}
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    for v in inputs:
      numbers[v], avals[v] = len(numbers), self.aval(v.aval)
    def atom(a):
      return self.literal(a) if type(a) is compat.Literal else numbers[a]
    lines = []
    for eqn in jaxpr.eqns:
      fp, statics = self.equation(
          eqn, [self.aval(a.aval) if type(a) is compat.Literal else avals[a] for a in eqn.invars])
      if fp < 0:
        raise _Incomparable
      lines.append((fp, statics, tuple([atom(a) for a in eqn.invars]),
                    tuple([type(v) is compat.DropVar for v in eqn.outvars])))
      for v in eqn.outvars:
        numbers[v], avals[v] = len(numbers), self.aval(v.aval)
    return ("jaxpr", len(jaxpr.constvars), tuple([avals[v][0] for v in inputs]),
            tuple([array_key(c) for c in consts]), tuple(lines), tuple([atom(a) for a in jaxpr.outvars]))

  def size(self, eqn) -> int:
    """How many equations `eqn` stands for, nested ones counted."""
    if not eqn.params:
      return 1
    return 1 + sum(self._jaxpr_size(j) for j in nested_jaxprs(eqn.params))

  def _jaxpr_size(self, jaxpr) -> int:
    found = self._sizes.get(id(jaxpr))
    if found is None:
      found = self._sizes[id(jaxpr)] = (sum(self.size(e) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns), jaxpr)
    return found[0]


def distinct_size(jaxpr) -> int:
  """How many equations a jaxpr has, nested ones counted, a jaxpr that occurs several times once."""
  seen: dict[int, Any] = {}

  def count(jaxpr) -> int:
    if id(jaxpr) in seen:
      return 0
    seen[id(jaxpr)] = jaxpr
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return len(eqns) + sum(count(j) for e in eqns if e.params for j in nested_jaxprs(e.params))

  return count(jaxpr)


class _Incomparable(Exception):
  """Parameters that can't be compared: the equation matches no other."""


_ATOMS = frozenset({int, str, bool, type(None), bytes})


def nested_jaxprs(params):
  """The jaxprs, open and closed, among an equation's parameters."""
  for value in params.values():
    kind = type(value)
    if kind is compat.ClosedJaxpr or kind is compat.Jaxpr:
      yield value
    elif isinstance(value, tuple):
      for v in value:
        if type(v) is compat.ClosedJaxpr or type(v) is compat.Jaxpr:
          yield v
