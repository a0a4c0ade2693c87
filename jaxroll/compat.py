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
from jax._src import config as _private_config
from jax._src import core as _private_core
from jax._src import linear_util as _linear_util
from jax._src import mesh as _private_mesh
from jax._src import shard_map as _private_shard_map
from jax._src import source_info_util as _private_source_info
from jax._src import traceback_util as _private_traceback
from jax._src import util as _private_util
from jax._src.interpreters import batching as _batching
from jax._src.sharding_impls import UNSPECIFIED as _UNSPECIFIED
with contextlib.suppress(ImportError):  # since jax 0.11 or 0.12
  from jax._src import flattree as _private_flattree
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

# Whether XLA compiles a function that is called out of line once, and not once per call.
CALLS_ARE_SHARED = not _BARRIERS_EXPAND_EARLY

slice_p = primitives.slice_p
pad_p = primitives.pad_p


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


def is_rewritable(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
  """Whether a jaxpr can be traced anew: no high-level types, no references, no types that JAX would narrow now."""
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  avals = [v.aval for v in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)]
  return not getattr(jaxpr, "is_high", False) and all(
      [is_plain(a) or getattr(a, "dtype", None) == jax.dtypes.float0 for a in avals])


def as_constant(value) -> np.ndarray | None:
  """The value as a NumPy array; None if it is an array that has a place, or a type, of its own."""
  if isinstance(value, int):
    return np.asarray(value, np.int32)
  if not isinstance(value, jax.Array):
    return np.asarray(value)
  if isinstance(value, jax.core.Tracer) or getattr(value, "committed", True) or jax.dtypes.issubdtype(
      value.dtype, jax.dtypes.extended):
    return None
  return np.asarray(value)


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
  with eqn.ctx.manager:  # and not its context in place of theirs, which may mark a fence
    traced = jax.make_jaxpr(fun)([v.aval for v in eqn.invars]).jaxpr
  rename = {**dict(zip(traced.invars, eqn.invars)), **dict(zip(traced.outvars, eqn.outvars))}
  return [
      t.replace(invars=[a if type(a) is Literal else rename.get(a, a) for a in t.invars],
                outvars=[rename.get(v, v) for v in t.outvars], source_info=eqn.source_info)
      for t in traced.eqns]


def context(eqn: JaxprEqn):
  """The settings under which the equation was traced, as a context manager."""
  return eqn.ctx.manager


def mesh_context(eqn: JaxprEqn):
  """The mesh under which the equation was traced, as a context manager."""
  return _private_mesh.use_abstract_mesh(eqn.ctx.cur_abstract_mesh)


def on_one_mesh(eqns, *, contexts_only: bool = False) -> bool:
  """Whether equations, operands and results are all on one mesh; around `jax.sharding.auto_axes` they are not."""
  first = eqns[0].ctx.cur_abstract_mesh
  return all([e.ctx.cur_abstract_mesh == first for e in eqns]) and (
      contexts_only or first.empty or fits_mesh(eqns[0], [v.aval for e in eqns for v in (*e.invars, *e.outvars)]))


def fits_mesh(eqn: JaxprEqn, avals) -> bool:
  """Whether arrays of these types may be used under the equation's mesh, by JAX's own rule."""
  mesh = eqn.ctx.cur_abstract_mesh
  others = {a.sharding.mesh for a in avals if isinstance(a, ShapedArray)} - {mesh}
  return mesh.empty or all([m.empty or m.are_all_axes_auto and mesh.are_all_axes_auto for m in others])


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


def takes_more_operands(eqn: JaxprEqn) -> bool:
  """Whether an equation calls a jaxpr that may take more arguments: a `checkpoint`, a `jit` without options."""
  params = eqn.params
  if eqn.primitive.name in ("remat2", "checkpoint"):
    return True
  if eqn.primitive.name != "jit" or any(params["donated_invars"]) or params["compiler_options_kvs"]:
    return False
  return all([type(v) is type(default) for name, default in _PER_OPERAND.items() for v in params[name]])


def opened_params(eqn: JaxprEqn) -> tuple[str, ...]:
  """The parameters that hold the jaxprs which may take more arguments, for `with_more_operands`."""
  name = eqn.primitive.name
  if name == "while" and eqn.params["cond_jaxpr"].out_avals[0].shape:
    return ()  # under `vmap`, with a condition for each element
  if name in ("while", "cond") and eqn.ctx.cur_abstract_mesh.manual_axes:
    return ()  # JAX can't `vmap` those within a `shard_map` if an operand is the same on all devices
  return _OPENED.get(name) or (("jaxpr",) if takes_more_operands(eqn) else ())


def opened_jaxprs(eqn: JaxprEqn) -> list:
  """These jaxprs, closed or open."""
  held = [eqn.params[name] for name in opened_params(eqn)]
  return [j for value in held for j in (value if isinstance(value, tuple) else (value,))]


def scan_parts(eqn: JaxprEqn) -> tuple[int, int]:
  """How many operands of a `scan` are constants, and how many carries."""
  if "num_consts" in eqn.params:
    return eqn.params["num_consts"], eqn.params["num_carry"]
  consts, carry, _ = eqn.params["ft_in"].unpack()
  return len(consts), len(carry)


def may_inline(eqn: JaxprEqn) -> bool:
  """Whether a `jit` equation may be written out: it has no options, and is not to be kept out of line."""
  return takes_more_operands(eqn) and str(getattr(eqn.params["inline"], "value", "")) not in ("xla_late", "xla_early")


def called_from(call: JaxprEqn, eqn: JaxprEqn) -> JaxprEqn:
  """An equation of what `call` calls, under the scopes in which the call stands."""
  stack = call.source_info.name_stack + eqn.source_info.name_stack
  return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def with_more_operands(eqn: JaxprEqn, jaxprs, extras) -> JaxprEqn:
  """The equation with others for its `opened_jaxprs`, of which each takes some operands more.

  `extras` has these per jaxpr, which takes them as its last arguments.
  """
  name, params, operands = eqn.primitive.name, dict(eqn.params), list(eqn.invars)
  extra = [v for some in extras for v in some]
  if name == "cond":  # all branches take the same
    count = len(operands) - 1
    rest = [fresh_vars([v.aval for v in extra]) for _ in jaxprs]
    at = 0
    for own, jaxpr, some in zip(rest, jaxprs, extras):
      own[at : at + len(some)] = _inputs(jaxpr)[count:]
      at += len(some)
    params["branches"] = tuple([_with_inputs(j, [*_inputs(j)[:count], *own]) for j, own in zip(jaxprs, rest)])
    return eqn.replace(invars=[*operands, *extra], params=params)
  if name == "while":
    at = 0
    for kind, jaxpr, some in zip(("cond", "body"), jaxprs, extras):
      count = params[f"{kind}_nconsts"]
      params[f"{kind}_jaxpr"] = _moved_to(count, jaxpr, len(some))
      params[f"{kind}_nconsts"] = count + len(some)
      at += count
      operands[at:at] = some
      at += len(some)
    return eqn.replace(invars=operands, params=params)
  params["jaxpr"], = jaxprs
  if name == "scan":
    count, _ = scan_parts(eqn)
    params["jaxpr"] = _moved_to(count, params["jaxpr"], len(extra))
    operands[count:count] = extra
    if "num_consts" in params:
      params["num_consts"] = count + len(extra)
    else:
      _, carry, xs = params["ft_in"].unpack()
      params["ft_in"] = _private_flattree.pack((_private_flattree.nones(count + len(extra)), carry, xs))
    return eqn.replace(invars=operands, params=params)
  if name == "jit":
    for key, default in _PER_OPERAND.items():
      if key.startswith("in_") or key == "donated_invars":
        params[key] = (*params[key], *[default] * len(extra))
  return eqn.replace(invars=[*operands, *extra], params=params)


def _inputs(jaxpr) -> list:
  return list(getattr(jaxpr, "jaxpr", jaxpr).invars)


def _moved_to(place: int, jaxpr, count: int):
  """The jaxpr with its last `count` inputs moved to `place`."""
  inputs = _inputs(jaxpr)
  first = len(inputs) - count
  return _with_inputs(jaxpr, [*inputs[:place], *inputs[first:], *inputs[place:first]])


def _with_inputs(jaxpr, inputs):
  """The jaxpr, closed or open, with these variables as its inputs."""
  return _replaced(jaxpr, getattr(jaxpr, "consts", ()), invars=list(inputs))


def with_more_inputs(jaxpr, consts, extra, outvars, eqns):
  """A jaxpr, closed or open, with other constants, as pairs of variable and value, and with inputs more."""
  return _replaced(jaxpr, [c for _, c in consts], constvars=[v for v, _ in consts],
                   invars=[*_inputs(jaxpr), *extra], outvars=list(outvars), eqns=list(eqns))


def _replaced(jaxpr, consts, **changes):
  """The jaxpr, closed or open, with these constants and changes."""
  inner = getattr(jaxpr, "jaxpr", jaxpr)
  held = {"consts": list(consts)} if ClosedJaxpr is Jaxpr else {}
  new = inner.replace(**changes, **held, debug_info=inner.debug_info.with_unknown_names())
  return new if held or type(jaxpr) is Jaxpr else ClosedJaxpr(new, list(consts))


_OPENED = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr"), "cond": ("branches",)}
_PER_OPERAND = {
    "in_shardings": _UNSPECIFIED, "out_shardings": _UNSPECIFIED, "in_layouts": None, "out_layouts": None,
    "donated_invars": False}


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


def replace_eqns(closed: ClosedJaxpr, eqns, outvars=None) -> ClosedJaxpr:
  """The closed jaxpr with other equations over the same variables, and with other results if any are given."""
  changes = {"eqns": list(eqns)} if outvars is None else {"eqns": list(eqns), "outvars": list(outvars)}
  if ClosedJaxpr is Jaxpr:
    return closed.replace(**changes)
  return ClosedJaxpr(closed.jaxpr.replace(**changes), closed.consts)


def with_effects_of(old: ClosedJaxpr, new: ClosedJaxpr) -> ClosedJaxpr:
  """`new`, which does what `old` does, with the effects that `old` declares.

  A branch of a `cond` declares those of all branches, and its equations have only some of them.
  """
  if new.effects == old.effects or new.effects != set().union(*(e.effects for e in old.jaxpr.eqns)):
    return new
  if ClosedJaxpr is Jaxpr:
    return new.replace(effects=old.effects)
  return ClosedJaxpr(new.jaxpr.replace(effects=old.effects), new.consts)


def as_closed(jaxpr) -> ClosedJaxpr:
  """A jaxpr, closed or without constants, as a closed one."""
  return jaxpr if type(jaxpr) is ClosedJaxpr else close(jaxpr)


def as_function(closed: ClosedJaxpr):
  return jex_core.jaxpr_as_fun(closed)


def in_place_of(old, new: ClosedJaxpr):
  """The closed jaxpr `new` as the kind of jaxpr that `old` is, and under its names."""
  named = new.jaxpr.replace(debug_info=getattr(old, "jaxpr", old).debug_info)
  if ClosedJaxpr is Jaxpr or type(old) is Jaxpr:
    return named
  return ClosedJaxpr(named, new.consts)


@contextlib.contextmanager
def nested_context(eqn: JaxprEqn):
  """Where the jaxprs that an equation holds may be traced: within a `shard_map`, under its mesh and axes."""
  if eqn.primitive.name != "shard_map":
    with mesh_context(eqn):
      yield
    return
  mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
  with (_private_shard_map._extend_axis_env(mesh, axes),
        _private_mesh.use_abstract_mesh(_private_shard_map._as_manual_mesh(mesh, axes)),
        _private_config._check_vma(eqn.params["check_vma"])):
    yield


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
