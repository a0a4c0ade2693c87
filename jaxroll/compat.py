"""The one place that knows what differs between JAX versions or is not public in JAX.

Every other module imports from `jax`, `jax.lax`, `jax.core` and `jax.extend` only.
"""

from __future__ import annotations

import contextlib
import os

import jax
import jax.extend.source_info_util as source_info_util
from jax._src import source_info_util as _private_source_info
from jax._src import traceback_util as _private_traceback
from jax.extend import core as jex_core
from jax.extend.core import primitives

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
DropVar = jex_core.DropVar
Var = jex_core.Var
ShapedArray = jax.core.ShapedArray

jit_p = primitives.jit_p
slice_p = primitives.slice_p


def hide_frames(directory: str) -> None:
  """Keeps `directory`'s frames out of filtered tracebacks and of source locations."""
  source_info_util.register_exclusion(directory)
  _private_traceback.register_exclusion(directory)


def under_jit() -> bool:
  """Whether a `jax.jit` is being traced around this call."""
  return jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


def is_plain(aval) -> bool:
  """Whether `aval` is an ordinary array type: no reference, token or float0."""
  return type(aval) is ShapedArray and aval.dtype != jax.dtypes.float0


def is_pure(effects) -> bool:
  """Whether an equation may be moved, merged and repeated.

  Named-axis effects only say that a collective stands under its axis.
  """
  return all(type(effect).__name__ == "NamedAxisEffect" for effect in effects)


def is_high(closed: ClosedJaxpr) -> bool:
  """Whether the jaxpr is of high-level (not yet lowered) types, which the pass leaves alone."""
  return bool(getattr(closed.jaxpr, "is_high", False))


def open_jaxpr(jaxpr: Jaxpr, invars, outvars, eqns) -> Jaxpr:
  """A constant-free jaxpr of some of `jaxpr`'s equations (or edited copies of them)."""
  effects = set().union(*(e.effects for e in eqns)) if eqns else set()
  return jaxpr.replace(
      constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns),
      effects=effects or jex_core.no_effects, debug_info=jaxpr.debug_info.with_unknown_names())


def close(jaxpr: Jaxpr, consts=()) -> ClosedJaxpr:
  return ClosedJaxpr(jaxpr, list(consts))


def fresh_vars(avals) -> list[Var]:
  """New variables of these types, made by JAX itself."""
  return list(jax.make_jaxpr(lambda *args: args)(*avals).jaxpr.invars)


def as_weak(x):
  """`x` with the weak type bit set."""
  return primitives.convert_element_type_p.bind(
      x, new_dtype=x.dtype, weak_type=True, sharding=None)


def check_jaxpr(closed: ClosedJaxpr) -> None:
  """JAX's own type check of a jaxpr."""
  jex_core.check_jaxpr(closed.jaxpr)


def location(eqn: JaxprEqn) -> str:
  """`file.py:line (function)` of the user's code that made the equation, or ''."""
  with contextlib.suppress(Exception):
    frame = _private_source_info.user_frame(eqn.source_info.traceback)
    if frame is not None:
      return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"
  return ""


def traced_jvp_rule(params):
  """The jaxpr and constants of a `custom_jvp_call`'s rule, for non-zero tangents."""
  fun = params["jvp_jaxpr_fun"]
  jaxpr, consts, zeros = fun.call_wrapped(*[False] * (len(params["call_jaxpr"].jaxpr.invars) - params["num_consts"]))
  return jaxpr, consts, tuple(zeros)


def traced_fwd_rule(params):
  """The jaxpr and constants of a `custom_vjp_call`'s forward rule, for non-zero cotangents."""
  fun = params["fwd_jaxpr_thunk"]
  out = fun.call_wrapped(*[False] * (len(params["call_jaxpr"].jaxpr.invars) - params["num_consts"]))
  return out[0], out[1]


def bwd_identity(params):
  """An object that is equal for two `custom_vjp_call`s only if their backward rules are the same."""
  bwd = params["bwd"]
  stack = tuple((t[0] if isinstance(t, tuple) else t) for t in getattr(bwd, "transforms", ()))
  return bwd.f, stack


def replace_eqns(closed: ClosedJaxpr, eqns) -> ClosedJaxpr:
  """The closed jaxpr with other equations over the same variables."""
  if ClosedJaxpr is Jaxpr:
    return closed.replace(eqns=list(eqns))
  return ClosedJaxpr(closed.jaxpr.replace(eqns=list(eqns)), closed.consts)
