"""Jaxprs within equations: which of them may be rewritten, and how that is done.

A nested jaxpr may be replaced by one of the same types, effects and results. What an
equation says of it besides (how many operands are constants or carries, where
its residuals come from, its derivative rules) then still holds. The rules of
`custom_jvp` and `custom_vjp` are functions of their own: what they call is not the
jaxpr, which only serves where nothing is differentiated.

Not in the table, and left alone: kernels (`pallas_call`), what runs on references
(`run_state`), jaxprs that a primitive transposes or solves with
(`custom_linear_solve`), and those that combine two numbers (`reduce`, `scatter`).
"""

from __future__ import annotations

from typing import Any, Callable

import jax

from jaxroll import compat

REWRITABLE = {
    "jit": ("jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "shard_map": ("jaxpr",),
}
_HOLDS_CONSTS = frozenset({"jit"})


def map_nested(eqn, rewrite: Callable) -> Any:
  """The equation with each nested jaxpr rewritten, or the same object if none changed.

  `rewrite` takes a nested jaxpr as the equation holds it, closed or open, and returns
  a closed one of the same types and effects, or the very same object.
  """
  changed = {}
  for name in REWRITABLE.get(eqn.primitive.name, ()):
    old = eqn.params[name]
    many = old if isinstance(old, tuple) else (old,)
    with compat.nested_context(eqn):
      new = tuple([_fitted(eqn, inner, rewrite(inner)) for inner in many])
    if any([a is not b for a, b in zip(many, new)]):
      changed[name] = new if isinstance(old, tuple) else new[0]
  return eqn.replace(params={**eqn.params, **changed}) if changed else eqn


def map_equations(jaxpr, rewrite: Callable) -> Any:
  """A closed jaxpr that is `jaxpr`, closed or open, with equations replaced, or the same object if none was.

  `rewrite` takes an equation and returns the equations that stand for it, or None for itself.
  """
  closed = compat.as_closed(jaxpr)
  eqns, changed = [], False
  for eqn in closed.jaxpr.eqns:
    new = rewrite(eqn)
    changed |= new is not None
    eqns += [eqn] if new is None else new
  return compat.replace_eqns(closed, eqns) if changed else jaxpr


def _fitted(eqn, old, new):
  """The closed jaxpr `new` in the form in which the equation held `old`."""
  if new is old:
    return old
  if new.consts and eqn.primitive.name not in _HOLDS_CONSTS:
    # A function that it calls may close over them.
    new = jax.make_jaxpr(jax.jit(compat.as_function(new)))(*new.in_avals)
    if new.consts:
      return old
  return compat.in_place_of(old, new)
