"""The public functions: `roll`, `roll_jit`, `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import sys
import threading
import time
import types
import warnings
import weakref
from typing import Any, Callable

import jax

from jaxroll import compat, exempt, where
from jaxroll.options import RollOptions
from jaxroll.pipeline import roll_jaxpr
from jaxroll.report import RollReport
from jaxroll.room import roomy
from jaxroll.tracing import Traced, is_array, trace, trace_of_jit

_LONG = 1000  # equations of a program that is better called than evaluated, if nothing in it was rolled

# Called with every report, in whatever thread.
listeners_everywhere: list[Callable] = []
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
  options = checked(options)

  @functools.wraps(fun)
  @roomy
  def rolled(*args, **kwargs):
    if _is_asleep(options):
      return fun(*args, **kwargs)
    traced = trace(fun, args, kwargs, lambda leaf: isinstance(leaf, jax.core.Tracer))
    return _run_rolled(fun, traced, options, _Target())

  return rolled


class _Unset:
  """No function given."""

  def __repr__(self):
    return "<unset>"


def roll_jit(fun: Callable = _Unset(), /, *, roll: RollOptions | None = None, **jit_options) -> Any:
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
  options = checked(roll)
  misplaced = [name for name in jit_options if name in _OPTION_NAMES]
  if misplaced:
    raise TypeError(f"roll_jit got {misplaced[0]!r}, an option of the pass: give roll=RollOptions({misplaced[0]}=...)")
  if isinstance(fun, _Unset):
    jax.jit(**jit_options)  # for its TypeErrors
    return functools.partial(roll_jit, roll=options, **jit_options)
  if not callable(fun) or isinstance(fun, staticmethod) or inspect.isgeneratorfunction(fun):
    return jax.jit(fun, **jit_options)  # for its TypeErrors
  with _warnings_of_the_caller() if jit_options.keys() & {"backend", "device"} else contextlib.nullcontext():
    jitted = jax.jit(_rolled(fun, options, _target(jit_options)), **jit_options)
  jitted.__dict__.update(getattr(fun, "__dict__", {}))
  jitted.__wrapped__ = fun
  jitted.__jaxroll__ = _Origin(fun, options, jit_options, weakref.ref(jitted))
  return jitted


@dataclasses.dataclass(frozen=True)
class _Origin:
  """What a `roll_jit`ted function, `owner`, was made of."""

  fun: Callable
  options: RollOptions
  jit_options: dict
  owner: weakref.ref


@dataclasses.dataclass(frozen=True)
class _Target:
  """What `jax.jit`'s options say of where a program runs; None and False where they leave it open."""

  platform: str | None = None
  several_devices: bool = False


def _target(jit_options: dict) -> _Target:
  return _Target(where.asked_platform(jit_options), where.asks_for_several_devices(jit_options))


class _Rolled:
  """What `roll_jit` gives to `jax.jit` in a function's place: calls it, rolled, and else looks like it.

  JAX's caches go by this object, and forget it when it dies. So it lives as long as the function does, which it must
  not keep alive.
  """

  __slots__ = ("_fun", "_options", "_target", "__weakref__")

  def __init__(self, fun: Callable, options: RollOptions, target: _Target, weak: bool):
    self._fun = weakref.ref(fun) if weak else lambda: fun
    self._options, self._target = options, target

  @roomy
  def __call__(self, *args, **kwargs):
    fun = self._fun()
    if _is_asleep(self._options):
      return fun(*args, **kwargs)
    traced = trace_of_jit(fun, args, kwargs)
    return _run_rolled(fun, traced, self._options, self._target)

  def __getattr__(self, name):
    return getattr(self._fun(), name)

  @property
  def __wrapped__(self):
    return _innermost(self._fun())

  @property
  def __name__(self):
    fun = self._fun()
    while isinstance(fun, functools.partial) and not hasattr(fun, "__name__"):
      fun = fun.func
    return fun.__name__

  @property
  def __signature__(self):
    return inspect.signature(self._fun())

  @property
  def __module__(self):
    return self._fun().__module__

  @property
  def __doc__(self):
    return self._fun().__doc__

  def __repr__(self):
    return repr(self._fun())

  def __hash__(self):
    weakref.ref(self._fun())  # for its TypeError, which `jax.jit` raises when the function is called
    return hash(self._fun())

  def __eq__(self, other):
    if self is other or not isinstance(other, _Rolled):
      return self is other
    return (self._options, self._target) == (other._options, other._target) and self._fun() == other._fun()

  def __reduce__(self):
    return _rolled, (self._fun(), self._options, self._target)


_all_rolled: weakref.WeakKeyDictionary[Callable, dict] = weakref.WeakKeyDictionary()
_all_rolled_lock = threading.Lock()


def _rolled(fun: Callable, options: RollOptions, target: _Target) -> _Rolled:
  """The one `_Rolled` for these, for as long as the function lives."""
  key = options, target
  with contextlib.suppress(TypeError), _all_rolled_lock:  # a function that can't be hashed, or has no weak references
    of_fun = _all_rolled.setdefault(fun, {})
    if key not in of_fun:
      of_fun[key] = _Rolled(fun, options, target, weak=True)
    if of_fun[key]._fun() is fun:  # and not an equal one
      return of_fun[key]
  return _Rolled(fun, options, target, weak=False)


def _innermost(fun: Callable) -> Callable:
  while isinstance(fun, functools.partial):
    fun = fun.func
  return fun


@contextlib.contextmanager
def _warnings_of_the_caller():
  """Warnings raised within appear at the first frame outside of this package, as if this were not there."""
  caught: list = []
  try:
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      yield
  finally:
    depth, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("jaxroll", "contextlib"):
      depth, frame = depth + 1, frame.f_back
    for warning in caught:
      warnings.warn(warning.message, warning.category, stacklevel=depth)


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
  if origin is not None and origin.owner() is not fun:
    origin = None  # copied from another function by `functools.wraps`
  if origin is not None:
    options = origin.options if options is None else options
    tracer = jax.jit(functools.wraps(origin.fun)(lambda *a, **k: origin.fun(*a, **k)), **origin.jit_options)
  else:
    tracer = fun if hasattr(fun, "trace") else None
  options = checked(options)

  @roomy
  def explained(*args, **kwargs) -> RollReport:
    start = time.perf_counter()
    if tracer is not None:
      closed = tracer.trace(*args, **kwargs).jaxpr
    else:
      closed = trace(fun, args, kwargs, is_array).closed
    seconds = time.perf_counter() - start
    target = _target(origin.jit_options if origin else {})
    report = roll_jaxpr(closed, options, platform=target.platform, several_devices=target.several_devices)[1]
    return _told(report, seconds, origin.fun if origin else fun)

  return explained


def _is_asleep(options: RollOptions) -> bool:
  """Whether a function is to be called as it is."""
  # JAX's checker of keys takes what a fence passes on, or a body draws anew from a key, for a second use.
  return (options.is_off or not compat.under_jit() or exempt.is_active() or jax.config.jax_disable_jit
          or jax.config.jax_debug_key_reuse)


def _run_rolled(fun: Callable, traced: Traced, options: RollOptions, target: _Target):
  """The result of a traced function, of the tracers that it was traced with."""
  rolled, report = roll_jaxpr(
      traced.closed, options, platform=target.platform, several_devices=target.several_devices)
  for listen in (*_listeners.get(), *listeners_everywhere):
    listen(_told(report, traced.seconds, fun))
  if rolled is traced.closed and len(rolled.jaxpr.eqns) >= _LONG:
    return traced.call_jitted()  # one equation, not all anew
  try:
    return traced.unflatten(jax.core.eval_jaxpr(rolled.jaxpr, rolled.consts, *traced.values))
  except (KeyError, NotImplementedError):
    if rolled is traced.closed:
      raise
    # A transformation around this call that has no rule for loops or barriers, such as `jet`.
    return traced.unflatten(jax.core.eval_jaxpr(traced.closed.jaxpr, traced.closed.consts, *traced.values))


_OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(RollOptions))


def _check_callable(fun) -> None:
  if not callable(fun):
    raise TypeError(f"Expected a callable value, got {fun}")


def _told(report: RollReport, trace_seconds: float, fun: Callable) -> RollReport:
  """The report with what only the caller of the pass knows."""
  return dataclasses.replace(
      report, seconds={"trace": trace_seconds, **report.seconds}, function=compat.definition(fun))


def checked(options) -> RollOptions:
  if options is None:
    return RollOptions()
  if not isinstance(options, RollOptions):
    raise TypeError(f"roll options are {options!r} of type {type(options).__name__}; give a jaxroll.RollOptions")
  return options
