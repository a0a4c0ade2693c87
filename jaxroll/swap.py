"""`jax.jit` replaced by `roll_jit` for a whole program: `enable`, `disable`, `enabled`.

The attribute `jax.jit` is exchanged, once and for as long as anything asks for it.
JAX's own modules look it up there too, so the replacement decides by its caller's
module, and hands them the original.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from typing import Any

import jax

from jaxroll import api
from jaxroll.options import RollOptions

_OWN = frozenset({"jax", "jaxlib", "jaxroll"})  # packages whose use of `jax.jit` is not the program's

_lock = threading.Lock()
_users = 0  # contexts in any thread, and `enable`: the attribute is exchanged while there are any
_everywhere: RollOptions | None = None
_here: contextvars.ContextVar[RollOptions | None] = contextvars.ContextVar("jaxroll_enabled", default=None)
_original: Any = jax.jit


def enable(options: RollOptions | None = None) -> None:
  """Makes `jax.jit` mean `roll_jit` from now on, in all threads, until `disable`.

  Affected are the program and its libraries, not JAX's own use of `jax.jit`. What was decorated or imported (``from
  jax import jit``) before keeps the plain `jax.jit`: enable before importing the program's modules. Called again,
  only the options change.

  Args:
    options: a `RollOptions`.

  >>> import jax
  >>> plain = jax.jit
  >>> enable()
  >>> jax.jit is plain
  False
  >>> disable()
  >>> jax.jit is plain
  True
  """
  global _everywhere
  options = api.checked(options)
  with _lock:
    if _everywhere is None:
      _acquire()
    _everywhere = options


def disable() -> None:
  """Undoes `enable`. Functions that were jitted meanwhile stay rolled."""
  global _everywhere
  with _lock:
    if _everywhere is not None:
      _everywhere = None
      _release()


@contextlib.contextmanager
def enabled(options: RollOptions | None = None):
  """A context in which `jax.jit` means `roll_jit`, in this thread only. May be nested; the innermost options count.

  >>> import jax
  >>> plain = jax.jit
  >>> with enabled():
  ...   jax.jit is plain
  False
  >>> jax.jit is plain
  True
  """
  token = _here.set(api.checked(options))
  with _lock:
    _acquire()
  try:
    yield
  finally:
    with _lock:
      _release()
    _here.reset(token)


def _acquire() -> None:
  global _users, _original
  if not _users and jax.jit is not _jit:
    _original = jax.jit
    functools.update_wrapper(_jit, _original)
    jax.jit = _jit
  _users += 1


def _release() -> None:
  global _users
  _users -= 1
  if not _users and jax.jit is _jit:  # else somebody has wrapped it: what they hold then means the original
    jax.jit = _original


def _jit(*args, **kwargs):
  options = _here.get() or _everywhere
  if options is None or sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in _OWN:
    return _original(*args, **kwargs)
  return api.roll_jit(*args, roll=options, **kwargs)
