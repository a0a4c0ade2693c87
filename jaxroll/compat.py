"""The one place that knows what differs between JAX versions or is not public in JAX.

Every other module imports from `jax`, `jax.lax`, `jax.core` and `jax.extend` only.
"""

from __future__ import annotations

import contextlib
import os

import jax
import numpy as np
import jax.extend.source_info_util as source_info_util
from jax._src import api_util as _api_util
from jax._src import core as _private_core
from jax._src import linear_util as _linear_util
from jax._src import source_info_util as _private_source_info
from jax._src import traceback_util as _private_traceback
from jax._src import util as _private_util
from jax._src.interpreters import batching as _batching
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.extend.core import primitives

ClosedJaxpr = jex_core.ClosedJaxpr
Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
DropVar = jex_core.DropVar
Var = jex_core.Var
ShapedArray = jax.core.ShapedArray

WrappedFun = _linear_util.WrappedFun

# Types whose values are compared by `==`.
BY_VALUE = (jax.core.AbstractValue, jax.tree_util.PyTreeDef, np.dtype, jax.sharding.Sharding)
# Types whose values say nothing about what a function computes: stores for auxiliary results, traces and
# their tags, names for error messages.
_OPAQUE = (_linear_util.Store, _linear_util.EqualStore, _private_core.TraceTag, jax.core.Trace, jex_core.DebugInfo)

_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))

_BARRIERS_EXPAND_EARLY = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)

slice_p = primitives.slice_p


def hide_frames(directory: str) -> None:
  """Keeps `directory`'s frames out of filtered tracebacks and of source locations."""
  source_info_util.register_exclusion(directory)
  _private_traceback.register_exclusion(directory)


def under_jit() -> bool:
  """Whether a `jax.jit` is being traced around this call."""
  return jex_core.unsafe_am_i_under_a_jit_DO_NOT_USE()


def is_plain(aval) -> bool:
  """Whether `aval` is an ordinary array type: no reference, token or float0, none that JAX would narrow now."""
  if type(aval) is not ShapedArray or aval.dtype == jax.dtypes.float0:
    return False
  return aval.dtype not in _WIDE or jax.config.jax_enable_x64


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


def splice(eqn: JaxprEqn, fun) -> list[JaxprEqn]:
  """Equations that compute `fun(operands)` from the operands of `eqn`, and give its results' variables."""
  traced = jax.make_jaxpr(fun)([v.aval for v in eqn.invars]).jaxpr
  rename = {**dict(zip(traced.invars, eqn.invars)), **dict(zip(traced.outvars, eqn.outvars))}
  return [
      t.replace(invars=[a if type(a) is Literal else rename.get(a, a) for a in t.invars],
                outvars=[rename.get(v, v) for v in t.outvars], source_info=eqn.source_info, ctx=eqn.ctx)
      for t in traced.eqns]


def context(eqn: JaxprEqn):
  """The settings under which the equation was traced, as a context manager."""
  return eqn.ctx.manager


def context_key(eqn: JaxprEqn):
  """What of them decides how random bits are made."""
  return eqn.ctx.threefry_partitionable


def is_static(eqn: JaxprEqn) -> bool:
  """Whether the equation's operands and results have known sizes and no explicit sharding."""
  avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
  return all(all(isinstance(d, int) for d in a.shape) and a.sharding.mesh.empty for a in avals)


def key_impl(x) -> str | None:
  """The generator of an array of keys, such as 'threefry2x32'; None for other arrays."""
  dtype = x.dtype
  return dtype._impl.name if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else None


def threefry_function(eqn: JaxprEqn):
  """What a `random_bits`, `random_split` or `random_fold_in` of threefry keys does, as a function of raw key data.

  None for other generators' keys, and where shapes or shardings are not plain.
  """
  keys = eqn.invars[0].aval
  if key_impl(keys) != "threefry2x32" or not is_static(eqn):
    return None
  impl, params = keys.dtype._impl, eqn.params
  if eqn.primitive.name == "random_fold_in":
    message = eqn.invars[1].aval.shape
    if keys.shape and message and keys.shape != message:
      return None
    fun = impl.fold_in
    for _ in range(max(len(keys.shape), len(message))):
      fun = jax.vmap(fun, in_axes=(0 if keys.shape else None, 0 if message else None))
    return fun
  if eqn.primitive.name == "random_split":
    fun = lambda key: impl.split(key, params["shape"])
  else:
    fun = lambda key: impl.random_bits(key, params["bit_width"], params["shape"])
  for _ in keys.shape:
    fun = jax.vmap(fun)
  return fun


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
      function = frame.function_name.replace("<locals>.", "")
      return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({function})"
  return ""


def definition(fun) -> str:
  """`name at file.py:line` of a function, or as much of it as there is to know."""
  name, _, place = _api_util.fun_sourceinfo(fun).partition(" at ")
  return f"{name} at {os.path.basename(place)}" if place else name


def in_scope(eqn: JaxprEqn, name: str) -> bool:
  """Whether an equation was traced in a `jax.named_scope` of this name, or derived from one that was."""
  stack = eqn.source_info.name_stack.stack
  return bool(stack) and any([part.name == name for part in stack])


def replace_eqns(closed: ClosedJaxpr, eqns) -> ClosedJaxpr:
  """The closed jaxpr with other equations over the same variables."""
  if ClosedJaxpr is Jaxpr:
    return closed.replace(eqns=list(eqns))
  return ClosedJaxpr(closed.jaxpr.replace(eqns=list(eqns)), closed.consts)


def is_opaque(value) -> bool:
  """Whether an object in a JAX-made closure says nothing about what the function computes."""
  return isinstance(value, _OPAQUE)


def wrapper_parts(value) -> tuple | None:
  """What one of JAX's own wrappers holds, else None.

  They are an argument that was not hashable, and a `vmap`'s axis, whose name, if the
  user gave none, is an object that is new for each `vmap`.
  """
  if isinstance(value, _private_util.Unhashable):
    return (value.val,)
  if isinstance(value, _batching.AxisData):
    name = value.name if isinstance(value.name, str) else None
    return (name, value.size, value.spmd_name, value.explicit_mesh_axis)
  return None


def fence(values: list, platform: str | None) -> list:
  """The values behind a barrier that keeps XLA from fusing across it.

  XLA:CPU of jax 0.10 expands `optimization_barrier` before it fuses. There an identity
  function that is kept out of line does the same, and costs nothing: XLA fuses on
  neither side into a call, and drops the call at the very end. (Measured: the same compile
  and run time and memory as a barrier with the pass `cse_barrier_expander` disabled.)
  """
  if platform == "cpu" and _BARRIERS_EXPAND_EARLY:
    with set_xla_metadata(inlineable="false"):
      return _identity(values)
  return jax.lax.optimization_barrier(values)


@jax.jit
def _identity(values):
  return values


_identity.__wrapped__.__name__ = "fence"


def out_of_line(fun):
  """`fun`, jitted so that its calls survive XLA's inlining."""
  if hasattr(jax, "Inline"):
    return jax.jit(fun, inline=jax.Inline.XLA_LATE)
  jitted = jax.jit(fun)

  def call(*args):
    jitted.eval_shape(*args)  # traced here: only the call, not its body, is to carry the attribute
    with set_xla_metadata(inlineable="false"):
      return jitted(*args)

  return call
