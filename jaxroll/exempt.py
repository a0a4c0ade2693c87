"""Parts of a program that must stay as they are: `no_roll`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import jax

from jaxroll import compat

# Marks the equations. Name stacks go with equations through autodiff, batching and rematerialization.
_SCOPE = "jaxroll.no_roll"
# What is jitted within is traced anew there, and by itself not rolled either: a part of jit's cache key.
_active = jax.make_user_context(False)
_was_used = False  # Until then there is nothing to look for.


def no_roll(fun: Callable | None = None) -> Any:
  """Keeps what is traced in it out of every roll, as a decorator or as a context.

  Its equations, and those of their derivatives, stay as they are written, at top level and in nested functions,
  and no roll contains one. `RollReport.exempt` counts them. Under a `jax.jit` that does not roll it changes nothing.

  Args:
    fun: a function. Without it, a context manager is returned.

  >>> import jax, jax.numpy as jnp
  >>> from jaxroll import explain
  >>> def f(x):
  ...   for _ in range(20):
  ...     x = jnp.sin(x) * 2 + jnp.cos(x)
  ...   return x
  >>> def g(x):
  ...   with no_roll():
  ...     x = f(x)
  ...   return f(x)
  >>> len(explain(f)(1.).rolls), len(explain(no_roll(f))(1.).rolls), len(explain(g)(1.).rolls)
  (1, 0, 1)
  """
  if fun is None:
    return _context()
  if not callable(fun):
    raise TypeError(f"Expected a callable value, got {fun}")

  @functools.wraps(fun)
  def exempt(*args, **kwargs):
    with _context():
      return fun(*args, **kwargs)

  return exempt


@contextlib.contextmanager
def _context():
  global _was_used
  _was_used = True
  with _active(True), jax.named_scope(_SCOPE):
    yield


def is_active() -> bool:
  """Whether this is called within `no_roll`."""
  return _active.value


def is_exempt(eqn) -> bool:
  """Whether an equation was traced within `no_roll`, or comes of one that was."""
  return _was_used and compat.in_scope(eqn, _SCOPE)
