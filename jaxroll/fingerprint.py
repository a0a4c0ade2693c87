"""Fingerprints: an integer per equation, equal for equations that do the same.

Two equations have one fingerprint if they have the same primitive, parameters,
operand types and result types, and may therefore share a loop body. Keys are
interned (compared exactly by the dictionary, never by hash alone), nested jaxprs
are compared up to renaming, and names and source locations are ignored.

What may differ between iterations, the *static operands* of `jaxroll.statics`, is left
out of the fingerprint and handed over.
"""

from __future__ import annotations

import itertools
import types
from typing import Any, Hashable

import jax
import numpy as np

from jaxroll import compat, exempt
from jaxroll.functions import array_key, function_key
from jaxroll.statics import STATIC_OPERANDS, static_operands

# Primitives whose equations are never equal to another: they draw state from outside.
_STATEFUL = frozenset({"rng_uniform", "infeed", "outfeed", "create_token"})
# Parameters that do not change what an equation computes, by primitive.
_COSMETIC = {"jit": ("name",), "custom_vjp_call": ("out_trees",)}


class Fingerprinter:
  """Interns equations, types, parameters and nested jaxprs for one run of the pass."""

  def __init__(self):
    self._ids: dict[Hashable, int] = {}
    self._fresh = itertools.count(-1, -1)
    self._avals: dict[Any, tuple[int, int | None]] = {}
    self._jaxprs: dict[tuple[int, bool], tuple[int | None, Any]] = {}
    self._rules: dict[int, tuple[bool, Any]] = {}  # the same, of `holds`
    self._sizes: dict[int, tuple[int, Any]] = {}  # of jaxprs, by id; holds them
    self._sizes_of_equal: dict[int, int] = {}  # of equations, by fingerprint
    self._equations: dict[int, tuple[tuple[int, tuple], Any]] = {}  # by id; holds the equation, so that ids stay theirs
    self.statics: dict = {}  # `static_operands`' memo

  def _intern(self, key: Hashable) -> int:
    ids = self._ids
    found = ids.get(key)
    if found is None:
      found = ids[key] = len(ids)
    return found

  def unique(self) -> int:
    """A fingerprint that equals no other."""
    return next(self._fresh)

  def aval(self, aval) -> tuple[int, int | None]:
    """Ids of a type, and of it without its weak type; the second is None if it is not plain."""
    found = self._avals.get(aval)
    if found is None:
      exact = strong = self._intern(("aval", aval))
      if not compat.is_plain(aval):
        strong = None
      elif aval.weak_type:
        strong = self._intern(("aval", aval.update(weak_type=False)))
      found = self._avals[aval] = (exact, strong)
    return found

  def literal(self, literal) -> Hashable:
    """A key equal for literals of the same bits, dtype, shape and weak type."""
    return (array_key(literal.val), self.aval(literal.aval)[0])

  def static(self, static) -> Hashable:
    """A key equal for static operands of the same type and bits."""
    if type(static) is compat.Literal:
      return self.literal(static)
    return ("static", static.val) if static.aval is None else (array_key(static.val), self.aval(static.aval)[0])

  def equation(self, eqn) -> tuple[int, tuple]:
    """The fingerprint of `eqn` and its static operands; negative if it must not be merged with any other."""
    found = self._equations.get(id(eqn))
    if found is None:
      found = self._equations[id(eqn)] = (self._equation(eqn), eqn)
    return found[0]

  def has_rule(self, eqn) -> bool:
    """Whether equal equations are to be evaluated each by itself, as they hold a `custom_vjp` function.

    Its rule may do what is not linear in the cotangent, such as to clip it: of one call for two, it would get the sum.
    """
    return bool(eqn.params) and holds(eqn, _RULES, self._rules)

  def _equation(self, eqn) -> tuple[int, tuple]:
    primitive, params, aval = eqn.primitive, eqn.params, self.aval
    statics = static_operands(eqn, self.statics) if params else ()
    operands = tuple([aval(a.aval)[1] for a in eqn.invars])
    outs = [aval(v.aval) for v in eqn.outvars]
    if (None in operands or any([strong is None for _, strong in outs]) or primitive.name in _STATEFUL
        or (eqn.effects and not compat.is_pure(eqn.effects)) or exempt.is_exempt(eqn)):
      return self.unique(), statics
    key = ()
    if params:
      rule = STATIC_OPERANDS.get(primitive)
      key = self._params(eqn, bool(statics)) if rule is None else rule.split(params)[0]
      if key is None:
        return self.unique(), statics
    return self._intern((primitive, eqn.ctx, key, operands, tuple([exact for exact, _ in outs]))), statics

  def _params(self, eqn, has_statics: bool) -> Hashable | None:
    """A key for an equation's parameters, static operands left out; None if they can't be compared."""
    try:
      cosmetic = _COSMETIC.get(eqn.primitive.name, ())
      opened = compat.opened_params(eqn) if has_statics else ()
      return tuple([(k, self._opened(v) if k in opened else self._value(v))
                    for k, v in eqn.params.items() if k not in cosmetic])
    except (_Incomparable, RecursionError):
      return None

  def _opened(self, value) -> Hashable:
    return tuple([self.jaxpr(v, False) for v in value]) if isinstance(value, tuple) else self.jaxpr(value, False)

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

  def jaxpr(self, jaxpr, with_statics: bool = True) -> int:
    """An id equal for jaxprs that are equal up to renaming, constants by value; or equal but for static operands."""
    found = self._jaxprs.get((id(jaxpr), with_statics))
    if found is None:
      try:
        key = self._intern(self._jaxpr_key(jaxpr, with_statics))
      except _Incomparable:
        key = None
      found = self._jaxprs[id(jaxpr), with_statics] = (key, jaxpr)
    if found[0] is None:
      raise _Incomparable
    return found[0]

  def find(self, jaxpr) -> int | None:
    """The same id, or None if the jaxpr can't be compared."""
    try:
      return self.jaxpr(jaxpr)
    except (_Incomparable, RecursionError):
      return None

  def _jaxpr_key(self, closed, with_statics: bool) -> Hashable:
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = getattr(closed, "consts", ())
    numbers: dict[Any, int] = {}
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    for v in inputs:
      numbers[v] = len(numbers)
    def atom(a):
      return numbers[a] if type(a) is not compat.Literal else self.literal(a)
    def operand(a):
      return numbers[a] if type(a) is not compat.Literal else self.literal(a) if with_statics else self.aval(a.aval)
    lines = []
    for eqn in jaxpr.eqns:
      fp, statics = self.equation(eqn)
      if fp < 0:
        raise _Incomparable
      held = tuple(map(self.static, statics)) if with_statics else len(statics)
      lines.append((fp, held, tuple(map(operand, eqn.invars)),
                    tuple([type(v) is compat.DropVar for v in eqn.outvars])))
      for v in eqn.outvars:
        numbers[v] = len(numbers)
    return ("jaxpr", with_statics, len(jaxpr.constvars), tuple([self.aval(v.aval)[0] for v in inputs]),
            tuple([array_key(c) for c in consts]) if with_statics else len(consts), tuple(lines),
            tuple([atom(a) for a in jaxpr.outvars]))

  def size(self, eqn) -> int:
    """How many equations `eqn` stands for, as XLA meets them: nested ones counted, generators written out."""
    fingerprint = self._equations.get(id(eqn), _NO_FINGERPRINT)[0][0]
    found = self._sizes_of_equal.get(fingerprint)
    if found is None:
      found = _SIZES.get(eqn.primitive.name, 1) + sum([self.jaxpr_size(j) for j in nested_jaxprs(eqn.params)])
      if fingerprint >= 0:
        self._sizes_of_equal[fingerprint] = found
    return found

  def jaxpr_size(self, jaxpr) -> int:
    """How many equations a jaxpr has, nested ones counted."""
    found = self._sizes.get(id(jaxpr))
    if found is None:
      found = self._sizes[id(jaxpr)] = (sum(self.size(e) for e in getattr(jaxpr, "jaxpr", jaxpr).eqns), jaxpr)
    return found[0]


def distinct_size(jaxpr) -> int:
  """How many equations a jaxpr has, nested ones counted, a jaxpr that occurs several times once."""
  return _distinct_size(jaxpr, {})


def _distinct_size(jaxpr, seen: dict[int, Any]) -> int:
  if id(jaxpr) in seen:
    return 0
  seen[id(jaxpr)] = jaxpr
  eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
  return len(eqns) + sum(_distinct_size(j, seen) for e in eqns if e.params for j in nested_jaxprs(e.params))


# Calls of a random-number generator.
GENERATORS = frozenset({"random_bits", "random_split", "random_fold_in", "threefry2x32"})
# XLA compiles this many instructions for an equation.
_SIZES = dict.fromkeys(GENERATORS, 100)
_RULES = frozenset({"custom_vjp_call"})
_NO_FINGERPRINT = ((-1,),)


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


def holds(eqn, names: frozenset[str], memo: dict) -> bool:
  """Whether an equation, or one nested in it, is of one of these primitives; `memo` is for these names alone."""
  if eqn.primitive.name in names:
    return True
  for jaxpr in nested_jaxprs(eqn.params) if eqn.params else ():
    found = memo.get(id(jaxpr))
    if found is None:
      eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
      found = memo[id(jaxpr)] = (any([holds(e, names, memo) for e in eqns]), jaxpr)
    if found[0]:
      return True
  return False
