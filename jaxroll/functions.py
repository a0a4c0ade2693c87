"""Keys of Python functions: equal only for functions that do the same.

The rules of `custom_jvp` and `custom_vjp` are Python functions among an equation's
parameters. Two layers share a body only if their rules are the same: the same
code over equal closures. What is neither a plain value nor made of such is
compared by identity, so that the answer errs towards "different". Rules are
never traced: they may be recursive (that of `jax.nn.relu` calls `relu`), and
tracing them costs more than all the rest of the pass.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Hashable

import jax
import numpy as np

from jaxroll import compat

_PLAIN = frozenset({int, str, bool, type(None), bytes})
_ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
_MEMO_CELLS = frozenset({"cells", "sentinel"})  # what JAX's memoized thunks keep beside the function


def function_key(value: Any, jaxpr_key) -> Hashable:
  """The key of a function, or of anything that a function closes over.

  `jaxpr_key` gives the key of a jaxpr.
  """
  return _Keys(jaxpr_key).key(value)


class _Keys:
  def __init__(self, jaxpr_key):
    self.jaxpr_key = jaxpr_key
    self.entered: dict[int, int] = {}  # functions on the way here: a recursive one refers back

  def key(self, value: Any) -> Hashable:
    kind = type(value)
    if kind is Same:
      return value
    if kind in _PLAIN:
      return (kind, value)
    if kind is float or kind is complex:
      return (kind, repr(value))  # tells the zeros apart, and a NaN equals itself
    if kind is tuple or kind is list or isinstance(value, tuple) and not compat.is_opaque(value):
      return (kind, *[self.key(v) for v in value])
    if compat.is_opaque(value):
      return ("opaque", kind)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
      return array_key(value)
    if kind is compat.Jaxpr or kind is compat.ClosedJaxpr:
      return ("jaxpr", self.jaxpr_key(value))
    if isinstance(value, compat.BY_VALUE):
      return (kind, value)
    try:
      parts = self.parts(value)
    except (TypeError, ValueError):  # attributes that can't be sorted, a cell that is still empty
      parts = None
    if parts is None:
      return Same(value)
    if id(value) in self.entered:
      return ("recursion", self.entered[id(value)])
    self.entered[id(value)] = len(self.entered)
    try:
      return (kind, *[self.key(p) for p in parts])
    finally:
      del self.entered[id(value)]

  def parts(self, value: Any) -> tuple | None:
    """What a function-like object is made of; None for other objects."""
    if isinstance(value, types.FunctionType):
      code = value.__code__
      is_memo = code.co_name == "memoized" and (value.__module__ or "").startswith("jax.")
      cells = [] if not value.__closure__ else [
          c.cell_contents for name, c in zip(code.co_freevars, value.__closure__)
          if not (is_memo and name in _MEMO_CELLS)]
      attributes = tuple(sorted((k, v) for k, v in value.__dict__.items() if k != "__wrapped__"))
      return (Same(code), Same(value.__globals__), tuple(cells), value.__defaults__,
              tuple(sorted((value.__kwdefaults__ or {}).items())), attributes)
    if isinstance(value, types.MethodType):
      return (value.__func__, Same(value.__self__))
    if isinstance(value, functools.partial):
      return (value.func, value.args, tuple(sorted(value.keywords.items())))
    if isinstance(value, compat.WrappedFun):
      return (value.f, value.transforms, value.params)
    return compat.wrapper_parts(value)


class Same:
  """Equal to another only if both hold the same object, which it keeps alive."""

  __slots__ = ("value",)

  def __init__(self, value):
    self.value = value

  def __hash__(self):
    return id(self.value)

  def __eq__(self, other):
    return isinstance(other, Same) and self.value is other.value


def array_key(value) -> Hashable:
  """A key of an array's bits and dtype; of its identity where it has no bits yet, or many."""
  if isinstance(value, np.ndarray) and not value.ndim and not value.dtype.hasobject:  # most literals, quickly
    return ("array", value.dtype, (), value.tobytes(), bool(getattr(value, "weak_type", False)), None)
  if not isinstance(value, _ARRAYS) or isinstance(value, jax.core.Tracer) or getattr(value, "nbytes", 0) > 1 << 20:
    return Same(value)  # a reference, for one, is no value
  if isinstance(value, jax.Array) and (
      not value.is_fully_addressable or jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)):
    return Same(value)
  array = np.asarray(value)
  if array.dtype.hasobject:
    return Same(value)
  sharding = getattr(value, "sharding", None)
  return ("array", array.dtype, array.shape, array.tobytes(), bool(getattr(value, "weak_type", False)), sharding)
