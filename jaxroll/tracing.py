"""Calls of functions, traced to jaxprs, with what it takes to make the call's result of the jaxpr's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from typing import Any, Callable

import jax


@dataclasses.dataclass(frozen=True)
class Traced:
  """A traced call.

  Attributes:
    closed: the jaxpr.
    values: its inputs.
    unflatten: makes the function's result of the jaxpr's results.
    call_jitted: gives the function's result, through a `jax.jit` of it.
    seconds: that it took to trace.
  """

  closed: Any
  values: list
  unflatten: Callable[[list], Any]
  call_jitted: Callable[[], Any]
  seconds: float


def trace_of_jit(fun: Callable, args: tuple, kwargs: dict) -> Traced:
  """Traces `fun(*args, **kwargs)` as a `jax.jit` around this call does: arguments are either tracers or static.

  JAX's own trace of the function itself, cached as such.
  """
  start = time.perf_counter()
  static = tuple([i for i, arg in enumerate(args) if not _all_traced(arg)])
  traced = tuple([arg for i, arg in enumerate(args) if i not in static])
  dynamic = {k: arg for k, arg in kwargs.items() if _all_traced(arg)}
  if len(dynamic) < len(kwargs):
    fun = functools.partial(fun, **{k: arg for k, arg in kwargs.items() if k not in dynamic})
  if not all([_equals_itself(args[i]) for i in static]):  # traces are looked up by ==, calls by identity first
    fun, args, static = _bound(fun, args, static), traced, ()
  quiet = contextlib.nullcontext()
  if jax.config.jax_explain_cache_misses:  # JAX has explained this miss: of the `jax.jit` around
    fun, quiet = _explaining(fun), jax.explain_cache_misses(False)
  with quiet:
    closed, shapes = jax.make_jaxpr(fun, static_argnums=static, return_shape=True)(*args, **dynamic)
  values = jax.tree.leaves((traced, dynamic))
  return Traced(
      closed, values, functools.partial(jax.tree.unflatten, jax.tree.structure(shapes)),
      lambda: jax.jit(fun, static_argnums=static)(*args, **dynamic), time.perf_counter() - start)


def _explaining(fun: Callable) -> Callable:
  @functools.wraps(fun)
  def explaining(*args, **kwargs):
    with jax.explain_cache_misses(True):
      return fun(*args, **kwargs)

  return explaining


def _bound(fun: Callable, args: tuple, static: tuple[int, ...]) -> Callable:
  """`fun` as a function of what is not static among its positional arguments."""
  statics = [(i, args[i]) for i in static]

  def bound(*dynamic, **kwargs):
    args = list(dynamic)
    for i, arg in statics:
      args.insert(i, arg)
    return fun(*args, **kwargs)

  bound.__name__ = getattr(fun, "__name__", "bound")
  return bound


def _equals_itself(arg) -> bool:
  try:
    return bool(arg == arg)
  except Exception:
    return False


def _all_traced(tree) -> bool:
  return all([isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)])


def trace(fun: Callable, args: tuple, kwargs: dict, is_dynamic: Callable[[Any], bool]) -> Traced:
  """Traces `fun` on the dynamic ones of its argument leaves; all others, and results that are no arrays, are static.

  A Python number is no array here: it comes back as it is, and not as a number of JAX's.
  """
  start = time.perf_counter()
  leaves, tree = jax.tree.flatten((args, kwargs))
  values = [leaf for leaf in leaves if is_dynamic(leaf)]
  out_tree, static_outs = None, {}

  def split(result):
    nonlocal out_tree, static_outs
    outs, out_tree = jax.tree.flatten(result)
    static_outs = {i: out for i, out in enumerate(outs) if not (hasattr(out, "dtype") and hasattr(out, "shape"))}
    return [out for i, out in enumerate(outs) if i not in static_outs]

  def unflatten(arrays):
    arrays = iter(arrays)
    return jax.tree.unflatten(
        out_tree, [static_outs[i] if i in static_outs else next(arrays) for i in range(out_tree.num_leaves)])

  if len(values) == len(leaves):
    @functools.wraps(fun)  # error messages name the user's function and its arguments
    def traced(*args, **kwargs):
      return split(fun(*args, **kwargs))
  else:
    args, kwargs = tuple(values), {}

    def traced(*values):
      values = iter(values)
      args, kwargs = jax.tree.unflatten(tree, [next(values) if is_dynamic(leaf) else leaf for leaf in leaves])
      return split(fun(*args, **kwargs))

    traced.__name__ = getattr(fun, "__name__", "traced")
  closed = jax.make_jaxpr(traced)(*args, **kwargs)
  return Traced(closed, values, unflatten, lambda: unflatten(jax.jit(traced)(*args, **kwargs)),
                time.perf_counter() - start)


def is_array(leaf) -> bool:
  """Whether `jax.jit` takes the leaf for an array."""
  return hasattr(leaf, "dtype") and hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float, complex))
