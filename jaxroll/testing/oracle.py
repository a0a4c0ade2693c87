"""The oracle: a jaxpr evaluated one primitive at a time, and a comparison of bits.

No two primitives are compiled together and every loop runs in Python, so that nothing is
fused: two jaxprs that do the same arithmetic give the same bits, however they are cut
into loops and functions. Primitives that only move bits about (`slice`, `reshape`, `select_n`,
...) are done by NumPy, which spares a compilation for each static index; the rest is bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll import compat


@dataclasses.dataclass(frozen=True, eq=False)
class _Keys:
  """Typed PRNG keys as NumPy can move them: an array of opaque elements, one per key."""

  bits: np.ndarray
  impl: Any
  data_shape: tuple[int, ...]


def evaluate(closed_jaxpr, *args) -> list:
  """The results of a closed jaxpr, computed one primitive at a time.

  To be called under `jax.enable_x64` if the jaxpr was made under it.

  Args:
    closed_jaxpr: as `jax.make_jaxpr` returns it.
    *args: arrays, NumPy arrays, scalars or typed keys, one per input, of its shape and dtype.

  Returns:
    A list with an array per result, of the jaxpr's result types, weak types included.

  Raises:
    ValueError: the number of arguments, a shape or a dtype is not what the jaxpr takes.

  >>> closed = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2 + i, x))(1)
  >>> evaluate(closed, 5)
  [Array(44, dtype=int32, weak_type=True)]
  """
  avals = closed_jaxpr.in_avals
  if len(args) != len(avals):
    raise ValueError(f"the jaxpr takes {len(avals)} arguments and was given {len(args)}")
  values = [_argument(i, arg, aval) for i, (arg, aval) in enumerate(zip(args, avals))]
  results = _run(closed_jaxpr, values)
  return [_result(value, aval) for value, aval in zip(results, closed_jaxpr.out_avals)]


def bits_differ(a, b) -> str | None:
  """What differs between two arrays, or None if type and every bit are the same.

  Stricter than equality: `0.` differs from `-0.`, and NaNs are the same only if their
  bits are. Typed keys are compared by their data. Weak types count where both have one.

  Args:
    a, b: arrays, NumPy arrays, scalars or typed keys of any shape, `a` the expected one.

  Returns:
    A line of text: the types, or the first element that differs, both values and how far apart
    they are, in units in the last place (ulps) for floating-point numbers.

  >>> bits_differ(np.float32([1, 2]), np.float32([1, 2]))
  >>> bits_differ(np.float32([[1, 2]]), np.float32([[1, 2.0000005]]))
  'at [0, 1]: expected 2.0, got 2.0000005 (2 ulps apart); 1 of 2 elements differ'
  """
  types = [_type_name(x) for x in (a, b)]
  if types[0] != types[1]:
    return f"expected type {types[0]}, got {types[1]}"
  weak = [getattr(x, "weak_type", None) for x in (a, b)]
  if None not in weak and weak[0] != weak[1]:
    return f"expected weak_type={weak[0]}, got weak_type={weak[1]} ({types[0]})"
  x, y = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (a, b))
  if x.dtype == jax.dtypes.float0 or not x.size:
    return None
  elements = tuple(range(np.ndim(a), x.ndim))  # the words of a key
  unequal = (_words(x) != _words(y)).any(axis=-1).any(axis=elements)
  if not unequal.any():
    return None
  where = tuple(int(i) for i in np.argwhere(unequal)[0])
  place = f"at {list(where)}: " if where else ""
  return (f"{place}expected {_show(x[where])}, got {_show(y[where])}{_distance(x[where], y[where])}; "
          f"{int(unequal.sum())} of {unequal.size} elements differ")


def is_key(x) -> bool:
  """Whether `x` is an array of typed PRNG keys."""
  return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def ulps_apart(a, b) -> int:
  """How many floating-point numbers lie between two real scalars of one dtype, one end counted; -1 with a NaN."""
  if np.isnan(a) or np.isnan(b):
    return -1
  x, y = (int(np.asarray(v).view(f"i{np.asarray(v).dtype.itemsize}")) for v in (a, b))
  lowest = -(1 << (8 * np.asarray(a).dtype.itemsize - 1))
  return abs((x if x >= 0 else lowest - x) - (y if y >= 0 else lowest - y))


def _type_name(x) -> str:
  dtype, shape = (x.dtype, x.shape) if hasattr(x, "dtype") else (np.result_type(x), np.shape(x))
  return f"{getattr(dtype, 'name', dtype)}{list(shape)}"


def _words(x: np.ndarray) -> np.ndarray:
  """The bytes of each element, on a new last axis."""
  x = np.ascontiguousarray(x).reshape(x.shape)
  return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.dtype.itemsize)


def _show(x) -> str:
  return np.array2string(x) if x.ndim else str(x)


def _distance(x, y) -> str:
  if x.ndim or not jnp.issubdtype(x.dtype, jnp.inexact):
    return ""
  parts = [(x.real, y.real), (x.imag, y.imag)] if jnp.iscomplexobj(x) else [(x, y)]
  ulps = [ulps_apart(p, q) for p, q in parts]
  if min(ulps) >= 0:
    return f" ({max(ulps)} ulps apart)"
  bits = [_words(np.asarray(v))[::-1].tobytes().hex() for v in (x, y)]
  return f" (bits {bits[0]} and {bits[1]})"


# Values between primitives are NumPy arrays, JAX arrays and `_Keys`.


def _argument(index: int, arg, aval):
  if is_key(arg) or getattr(arg, "dtype", None) == jax.dtypes.float0:
    value = arg
  elif hasattr(arg, "dtype"):
    value = np.asarray(arg if isinstance(arg, jax.Array) else jnp.asarray(arg))  # as JAX does without x64
  else:
    value = np.asarray(arg, aval.dtype)
  if value.shape != aval.shape or value.dtype != aval.dtype:
    raise ValueError(f"argument {index} is {_type_name(value)}, the jaxpr takes {aval.str_short()}")
  return value


def _result(value, aval):
  value = _bindable(value)
  if aval.dtype == jax.dtypes.float0:
    return value
  value = jnp.asarray(value)
  return compat.as_weak(value) if getattr(aval, "weak_type", False) and not value.weak_type else value


def _bindable(value):
  """The value as `bind` takes it."""
  if not isinstance(value, _Keys):
    return value
  data = np.frombuffer(value.bits.tobytes(), np.uint32).reshape(value.bits.shape + value.data_shape)
  return jax.random.wrap_key_data(data, impl=value.impl)


def _is_traced(values) -> bool:
  """Whether JAX has to be asked for what is done with these values: inside of a `shard_map`."""
  return any(isinstance(v, jax.core.Tracer) for v in values)


def _movable(value):
  """The value as a NumPy array or `_Keys`; what is traced as it is."""
  if _is_traced([value]):
    return value
  if not is_key(value):
    return value if isinstance(value, _Keys) else np.asarray(value)
  data = np.asarray(jax.random.key_data(value))
  shape = data.shape[value.ndim:]
  bits = np.frombuffer(data.tobytes(), np.dtype((np.void, 4 * math.prod(shape)))).reshape(value.shape)
  return _Keys(bits, jax.random.key_impl(value), shape)


def _move(rule: Callable, values, params) -> list:
  """The results of a rule of `_MOVES`."""
  values = [_movable(v) for v in values]
  keys = next((v for v in values if isinstance(v, _Keys)), None)
  outs = rule(params, *[v.bits if isinstance(v, _Keys) else v for v in values])
  outs = outs if isinstance(outs, (list, tuple)) else [outs]
  return [np.asarray(o) if keys is None else dataclasses.replace(keys, bits=np.asarray(o)) for o in outs]


def _stacked(values) -> Any:
  if _is_traced(values):
    return jnp.stack([_bindable(v) for v in values])
  return _move(lambda _, *xs: np.stack(xs), values, {})[0]


def _element(value, index: int) -> Any:
  if _is_traced([value]):
    return lax.index_in_dim(value, index, keepdims=False)
  return _move(lambda _, x: x[index], [value], {})[0]


def _run(closed, values, consts=None) -> list:
  """The results of a jaxpr, open or closed, for these values."""
  jaxpr = getattr(closed, "jaxpr", closed)
  consts = getattr(closed, "consts", ()) if consts is None else consts
  env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values], strict=True))

  def read(atom):
    return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, compat.Literal) else env[atom]

  for eqn in jaxpr.eqns:
    operands = [read(a) for a in eqn.invars]
    name = eqn.primitive.name
    if name in _MOVES and _can_move(eqn) and not _is_traced(operands):
      outs = _move(_MOVES[name], operands, eqn.params)
    elif name in _CONTROL:
      outs = _CONTROL[name](eqn, operands)
    else:
      outs = _bind(eqn, [_bindable(v) for v in operands])
    env.update(zip(eqn.outvars, outs, strict=True))
  return [read(a) for a in jaxpr.outvars]


def _bind(eqn, operands) -> list:
  """The equation by itself, under the context it was traced in."""
  if any(isinstance(p, (compat.ClosedJaxpr, compat.Jaxpr)) or callable(p) for p in eqn.params.values()):
    return jax.core.eval_jaxpr(_alone(eqn), (), *[v for v, a in zip(operands, eqn.invars)
                                                  if not isinstance(a, compat.Literal)])
  impl = getattr(eqn.primitive.impl, "func", eqn.primitive.impl)
  if not getattr(impl, "__module__", "jax").startswith("jax"):  # a library's own primitive, which may ask for JAX arrays
    operands = [jnp.asarray(v) if isinstance(v, np.ndarray) else v for v in operands]
  with eqn.ctx.manager:
    outs = eqn.primitive.bind(*operands, **eqn.params)
  return outs if eqn.primitive.multiple_results else [outs]


def _alone(eqn):
  """A jaxpr of one equation that returns all its results."""
  fresh = compat.fresh_vars([v.aval for v in [*eqn.invars, *eqn.outvars]])
  invars = [a if isinstance(a, compat.Literal) else v for a, v in zip(eqn.invars, fresh)]
  outvars = fresh[len(eqn.invars):]
  shell = jax.make_jaxpr(lambda: ())().jaxpr
  arguments = [v for v in invars if not isinstance(v, compat.Literal)]
  return compat.open_jaxpr(shell, arguments, outvars, [eqn.replace(invars=invars, outvars=outvars)])


def _scan(eqn, operands) -> list:
  params = eqn.params
  length, body = params["length"], params["jaxpr"]
  if not length:  # no iteration, and so nothing to fuse
    return _bind(eqn, [_bindable(v) for v in operands])
  n_consts, n_carry = compat.scan_parts(eqn)
  consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
  xs = [_movable(x) for x in xs]
  ys: list[list] = []
  for i in reversed(range(length)) if params["reverse"] else range(length):
    outs = _run(body, [*consts, *carry, *[_element(x, i) for x in xs]])
    carry = outs[:n_carry]
    ys.append(outs[n_carry:])
  if params["reverse"]:
    ys.reverse()
  return [*carry, *[_stacked(y) for y in zip(*ys)]]


def _while(eqn, operands) -> list:
  if _is_traced(operands):  # shards may go on for different times
    return _bind(eqn, [_bindable(v) for v in operands])
  params = eqn.params
  n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
  cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
  carry = operands[n_cond + n_body :]
  while True:
    going = np.asarray(_run(params["cond_jaxpr"], [*cond_consts, *carry])[0])
    if not going.any():
      return carry
    new = _run(params["body_jaxpr"], [*body_consts, *carry])
    # Under vmap each element of the batch goes on for as long as its own condition holds.
    carry = new if not going.ndim else [_batched_select(going, a, b) for a, b in zip(carry, new)]


def _batched_select(which: np.ndarray, on_false, on_true):
  def choose(_, old, new):
    return np.where(which.reshape(which.shape + (1,) * (new.ndim - which.ndim)), new, old)
  return _move(choose, [on_false, on_true], {})[0]


def _cond(eqn, operands) -> list:
  if _is_traced(operands[:1]):
    return _bind(eqn, [_bindable(v) for v in operands])
  branches = eqn.params["branches"]
  index = int(np.asarray(operands[0]))
  return _run(branches[index if 0 <= index < len(branches) else len(branches) - 1], operands[1:])


def _shard_map(eqn, operands) -> list:
  """Without `jax.jit` around it, JAX runs a `shard_map` one primitive at a time."""
  params = eqn.params
  operands = [_bindable(v) for v in operands]
  if _is_traced(operands):
    return _bind(eqn, operands)
  run = lambda *values: tuple([_bindable(v) for v in _run(params["jaxpr"], values)])
  return list(jax.shard_map(
      run, mesh=params["mesh"], in_specs=params["in_specs"], out_specs=params["out_specs"],
      axis_names=params["newly_manual_axes"], check_vma=params["check_vma"])(*operands))


def _call(param: str) -> Callable:
  return lambda eqn, operands: _run(eqn.params[param], operands)


def _same(eqn, operands) -> list:
  return operands


_CONTROL = {
    "scan": _scan, "while": _while, "cond": _cond, "shard_map": _shard_map, "jit": _call("jaxpr"), "pjit": _call("jaxpr"),
    "remat2": _call("jaxpr"), "checkpoint": _call("jaxpr"), "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"), "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"), "copy": _same, "copy_p": _same, "optimization_barrier": _same}


def _can_move(eqn) -> bool:
  """Whether the rules of `_MOVES` cover the equation's parameters: no dynamic shapes, no permuting reshape."""
  return eqn.params.get("dimensions") is None or eqn.primitive.name != "reshape"


def _slice(p, x):
  steps = p["strides"] or (1,) * x.ndim
  return x[tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _broadcast_in_dim(p, x, *_):
  shape = [1] * len(p["shape"])
  for size, axis in zip(x.shape, p["broadcast_dimensions"]):
    shape[axis] = size
  return np.broadcast_to(x.reshape(shape), p["shape"])


def _window(shape, sizes, starts) -> tuple[slice, ...]:
  """Where a window lies, moved so as to lie within the array."""
  starts = [min(max(int(i), 0), n - size) for i, n, size in zip(starts, shape, sizes)]
  return tuple(slice(i, i + size) for i, size in zip(starts, sizes))


def _update(_, x, update, *starts):
  out = x.copy()
  out[_window(x.shape, update.shape, starts)] = update
  return out


def _pad(p, x, fill):
  spread = [max(n + (n - 1) * gap, 0) for n, (_, _, gap) in zip(x.shape, p["padding_config"])]
  inner = np.full(spread, fill, x.dtype)
  inner[tuple(slice(None, None, gap + 1) for _, _, gap in p["padding_config"])] = x
  out = np.full([max(low, 0) + n + max(high, 0) for n, (low, high, _) in zip(spread, p["padding_config"])],
                fill, x.dtype)
  out[tuple(slice(max(low, 0), max(low, 0) + n) for n, (low, _, _) in zip(spread, p["padding_config"]))] = inner
  return out[tuple(slice(max(-low, 0), n - max(-high, 0))
                   for n, (low, high, _) in zip(out.shape, p["padding_config"]))]


def _select_n(_, which, *cases):
  out = cases[0]
  for i, case in enumerate(cases[1:], 1):
    out = np.where(np.asarray(which) == i, case, out)
  return out


def _split(p, x):
  return np.split(x, np.cumsum(p["sizes"])[:-1].tolist(), p["axis"])


_MOVES = {
    "slice": _slice,
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "reshape": lambda p, x, *_: x.reshape(p["new_sizes"]),
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "rev": lambda p, x: np.flip(x, tuple(p["dimensions"])),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "unstack": lambda p, x: list(np.moveaxis(x, p["axis"], 0)),
    "split": _split,
    "pad": _pad,
    "dynamic_slice": lambda p, x, *starts: x[_window(x.shape, p["slice_sizes"], starts)],
    "dynamic_update_slice": _update,
    "select_n": _select_n}
