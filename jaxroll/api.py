"""The public functions: `roll`, `roll_jit`, `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import time
from typing import Any, Callable

import jax

from jaxroll import compat, where
from jaxroll.options import RollOptions
from jaxroll.pipeline import roll_jaxpr
from jaxroll.report import RollReport

_LONG = 1000  # equations of a program that is better called than evaluated, if nothing in it was rolled

_listeners: contextvars.ContextVar[tuple[Callable, ...]] = contextvars.ContextVar("jaxroll_listeners", default=())


@contextlib.contextmanager
def collect_reports():
  """A list of the `RollReport`s of all passes that run in this context.

  >>> import jax.numpy as jnp
  >>> with collect_reports() as reports:
  ...   _ = roll_jit(lambda x: x + 1)(jnp.ones(3))
  >>> len(reports)
  1
  """
  reports: list[RollReport] = []
  token = _listeners.set((*_listeners.get(), reports.append))
  try:
    yield reports
  finally:
    _listeners.reset(token)


def roll(fun: Callable, options: RollOptions | None = None) -> Callable:
  """`fun` with its repeated code rolled into loops wherever it is traced under `jax.jit`.

  Called without a `jax.jit` around it, `fun` itself is called. Otherwise `fun` is
  traced once on the tracers among its arguments (all else is static), the pass
  runs, and the rolled program is evaluated. Composes with `jax.grad`, `jax.vmap`,
  `jax.jit` and the others from outside and inside.

  Args:
    fun: a function of pytrees.
    options: a `RollOptions`.

  Returns:
    A function with `fun`'s signature and results.

  >>> import jax, jax.numpy as jnp
  >>> def f(x):
  ...   for i in range(20):
  ...     x = jnp.sin(x) * 2 + jnp.cos(x)
  ...   return x
  >>> bool(jnp.allclose(jax.jit(jax.grad(roll(f)))(1.), jax.grad(f)(1.), rtol=1e-4))
  True
  """
  return _rolled(fun, _checked(options), {})


def _rolled(fun: Callable, options: RollOptions, jit_options: dict) -> Callable:
  @functools.wraps(fun)
  def rolled(*args, **kwargs):
    if options.is_off or not compat.under_jit():
      return fun(*args, **kwargs)
    return _trace_and_roll(fun, options, jit_options, args, kwargs)

  return rolled


def roll_jit(fun: Callable | None = None, /, *, roll: RollOptions | None = None, **jit_options) -> Any:
  """`jax.jit` with repeated code rolled into loops, so that it compiles faster.

  A drop-in replacement: what it returns is `jax.jit`'s own object, and
  ``roll_jit(f)(x)`` equals ``jax.jit(f)(x)``.

  Args:
    fun: the function to compile. Without it, a decorator is returned.
    roll: the options of the pass, a `RollOptions`.
    **jit_options: `jax.jit`'s options, handed on untouched.

  >>> import jax.numpy as jnp
  >>> @roll_jit
  ... def f(ws, x):
  ...   for w in ws:
  ...     x = jnp.tanh(x @ w)
  ...   return x
  >>> f([jnp.eye(3)] * 12, jnp.zeros(3))
  Array([0., 0., 0.], dtype=float32)
  """
  options = _checked(roll)
  if fun is None:
    return functools.partial(roll_jit, roll=options, **jit_options)
  jitted = jax.jit(_rolled(fun, options, jit_options), **jit_options)
  jitted.__wrapped__ = fun
  jitted.__jaxroll__ = _Origin(fun, options, jit_options)
  return jitted


@dataclasses.dataclass(frozen=True)
class _Origin:
  """What a `roll_jit`ted function was made of."""

  fun: Callable
  options: RollOptions
  jit_options: dict


def explain(fun: Callable, options: RollOptions | None = None) -> Callable[..., RollReport]:
  """What the pass would do: traces and plans, compiles nothing.

  Args:
    fun: a function, plain, jitted or `roll_jit`ted (then its own options count, unless others are given).
    options: a `RollOptions`.

  Returns:
    A function of `fun`'s arguments that returns a `RollReport`.

  >>> import jax.numpy as jnp
  >>> def f(x):
  ...   for i in range(20):
  ...     x = jnp.sin(x) * 2 + jnp.cos(x)
  ...   return x
  >>> explain(f)(1.).rolls[0].trip_count
  20
  """
  origin = getattr(fun, "__jaxroll__", None)
  if origin is not None:
    options = origin.options if options is None else options
    tracer = jax.jit(functools.wraps(origin.fun)(lambda *a, **k: origin.fun(*a, **k)), **origin.jit_options)
  else:
    tracer = fun if hasattr(fun, "trace") else None
  options = _checked(options)

  def explained(*args, **kwargs) -> RollReport:
    start = time.perf_counter()
    if tracer is not None:
      closed = tracer.trace(*args, **kwargs).jaxpr
    else:
      leaves, tree = jax.tree.flatten((args, kwargs))
      dynamic = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
      _, closed, _ = _trace(fun, tree, leaves, dynamic)
    seconds = time.perf_counter() - start
    platform = where.platform_of(origin.jit_options if origin else {})
    return _timed(roll_jaxpr(closed, options, platform=platform)[1], seconds)

  return explained


def _trace_and_roll(fun, options, jit_options, args, kwargs):
  leaves, tree = jax.tree.flatten((args, kwargs))
  dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
  start = time.perf_counter()
  flat, closed, out_tree = _trace(fun, tree, leaves, dynamic)
  seconds = time.perf_counter() - start
  rolled, report = roll_jaxpr(closed, options, platform=where.platform_of(jit_options))
  for listen in _listeners.get():
    listen(_timed(report, seconds))
  values = [leaves[i] for i in dynamic]
  if rolled is closed and len(closed.jaxpr.eqns) >= _LONG:
    outs = jax.jit(flat)(*values)  # traced already: one equation instead of all of them anew
  else:
    outs = jax.core.eval_jaxpr(rolled.jaxpr, rolled.consts, *values)
  return jax.tree.unflatten(out_tree, outs)


def _trace(fun, tree, leaves, dynamic):
  """`fun` as a flat function of its dynamic leaves, its closed jaxpr, and the structure of its result."""
  out_tree = None

  def flat(*values):
    nonlocal out_tree
    filled = list(leaves)
    for i, value in zip(dynamic, values):
      filled[i] = value
    args, kwargs = jax.tree.unflatten(tree, filled)
    outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
    return outs

  flat.__name__ = getattr(fun, "__name__", "flat")
  closed = jax.make_jaxpr(flat)(*[leaves[i] for i in dynamic])
  return flat, closed, out_tree


def _timed(report: RollReport, trace_seconds: float) -> RollReport:
  return dataclasses.replace(report, seconds={"trace": trace_seconds, **report.seconds})


def _is_array(leaf) -> bool:
  return hasattr(leaf, "dtype") and hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float, complex))


def _checked(options) -> RollOptions:
  if options is None:
    return RollOptions()
  if not isinstance(options, RollOptions):
    raise TypeError(f"roll options are {options!r} of type {type(options).__name__}; give a jaxroll.RollOptions")
  return options
