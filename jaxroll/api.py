"""The public functions: `roll`, `roll_jit`, `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import time
import types
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
    A function with `fun`'s signature and results. As under `jax.jit`, `fun` works on copies of its pytree
    arguments: what it writes into them (a `flax.nnx` module's state) is lost.

  >>> import jax, jax.numpy as jnp
  >>> def f(x):
  ...   for i in range(20):
  ...     x = jnp.sin(x) * 2 + jnp.cos(x)
  ...   return x
  >>> bool(jnp.allclose(jax.jit(jax.grad(roll(f)))(1.), jax.grad(f)(1.), rtol=1e-4))
  True
  """
  _check_callable(fun)
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
  misplaced = [name for name in jit_options if name in _OPTION_NAMES]
  if misplaced:
    raise TypeError(f"roll_jit got {misplaced[0]!r}, an option of the pass: give roll=RollOptions({misplaced[0]}=...)")
  if fun is None:
    return functools.partial(roll_jit, roll=options, **jit_options)
  _check_callable(fun)
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
  _check_callable(fun)
  if isinstance(fun, types.MethodType):
    return functools.partial(explain(fun.__func__, options), fun.__self__)
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
      closed = _trace(fun, args, kwargs, _is_array).closed
    seconds = time.perf_counter() - start
    platform = where.platform_of(origin.jit_options if origin else {})
    return _timed(roll_jaxpr(closed, options, platform=platform)[1], seconds)

  return explained


def _trace_and_roll(fun, options, jit_options, args, kwargs):
  start = time.perf_counter()
  traced = _trace(fun, args, kwargs, lambda leaf: isinstance(leaf, jax.core.Tracer))
  seconds = time.perf_counter() - start
  rolled, report = roll_jaxpr(traced.closed, options, platform=where.platform_of(jit_options))
  for listen in _listeners.get():
    listen(_timed(report, seconds))
  if rolled is traced.closed and len(rolled.jaxpr.eqns) >= _LONG:
    outs = jax.tree.leaves(jax.jit(traced.fun)(*traced.args, **traced.kwargs))  # one equation, not all anew
  else:
    values = jax.tree.leaves((traced.args, traced.kwargs))
    try:
      outs = jax.core.eval_jaxpr(rolled.jaxpr, rolled.consts, *values)
    except (KeyError, NotImplementedError):
      if rolled is traced.closed:
        raise
      # A transformation around this call that has no rule for loops or barriers, such as `jet`.
      outs = jax.core.eval_jaxpr(traced.closed.jaxpr, traced.closed.consts, *values)
  return traced.unflatten(outs)


@dataclasses.dataclass(frozen=True)
class _Traced:
  """A traced call: `fun(*args, **kwargs)` gives the list of its array results, as does `closed` for their leaves.

  `unflatten` makes the user's function's result of them.
  """

  fun: Callable
  args: tuple
  kwargs: dict
  closed: Any
  unflatten: Callable


def _trace(fun, args, kwargs, is_dynamic) -> _Traced:
  """Traces `fun` on the dynamic ones of its argument leaves; all others, and results that are no arrays, are static."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  out_tree, static_outs = None, {}

  def split(result):
    nonlocal out_tree, static_outs
    outs, out_tree = jax.tree.flatten(result)
    static_outs = {i: out for i, out in enumerate(outs) if not _is_array(out)}
    return [out for i, out in enumerate(outs) if i not in static_outs]

  def unflatten(arrays):
    arrays = iter(arrays)
    return jax.tree.unflatten(
        out_tree, [static_outs[i] if i in static_outs else next(arrays) for i in range(out_tree.num_leaves)])

  if all(map(is_dynamic, leaves)):
    @functools.wraps(fun)  # error messages name the user's function and its arguments
    def traced(*args, **kwargs):
      return split(fun(*args, **kwargs))
  else:
    dynamic = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    args, kwargs = tuple(leaves[i] for i in dynamic), {}

    def traced(*values):
      filled = list(leaves)
      for i, value in zip(dynamic, values):
        filled[i] = value
      args, kwargs = jax.tree.unflatten(tree, filled)
      return split(fun(*args, **kwargs))

    traced.__name__ = getattr(fun, "__name__", "traced")
  return _Traced(traced, args, kwargs, jax.make_jaxpr(traced)(*args, **kwargs), unflatten)


_OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(RollOptions))


def _check_callable(fun) -> None:
  if not callable(fun):
    raise TypeError(f"Expected a callable value, got {fun}")


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
