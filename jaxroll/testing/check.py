"""`check_roll`: everything that is to hold of a rolled function, checked at once."""

from __future__ import annotations

import dataclasses
from typing import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.api import roll, roll_jit
from jaxroll.options import RollOptions
from jaxroll.pipeline import roll_jaxpr
from jaxroll.report import RollReport
from jaxroll.testing.oracle import bits_differ, evaluate, is_key

ROLL_ALL = RollOptions(strategy="scan", min_trip_count=3, min_body_eqns=1, strict=True)
_BATCH = 2


class RollMismatch(AssertionError):
  """A rolled program is not what it should be; the message says which result, where, by how much."""


def check_roll(fun: Callable, *args, rolls: int | Sequence | None = None, options: RollOptions | None = None,
               grad: bool = True, vmap: bool = True, compiled: bool = True, ulps: float = 64, **kwargs) -> RollReport:
  """Asserts that `fun` and its rolled form are the same function.

  Three programs are rolled and compared with the original **bit for bit**, evaluated one
  primitive at a time: `fun`, the reverse-mode gradient of `fun`, and `fun` under `jax.vmap`.
  Two more are compared *within a tolerance*, as the order of summation changes: the gradient and
  the vmap *of* the rolled function.

  With `compiled`, so are `roll_jit(fun)` and `jax.jit(fun)`. XLA fuses the two programs differently,
  and what it fuses it rounds differently, so that they agree to some ulps and no more. The tolerance is
  `ulps` units in the last place of the result's largest magnitude, plus 4 times what `jax.jit(fun)` itself is
  off the one-primitive-at-a-time result. Integers, booleans and keys must be the same.

  Args:
    fun: a function of pytrees. Leaves that are no arrays or numbers are static.
    *args, **kwargs: its arguments.
    rolls: what must be rolled at top level: how many rolls, or for each, in program order, its trip
      count or a pair (trip count, equations in the body). `None`: anything or nothing.
    options: of the pass. By default every repeat of 3 iterations is rolled into a scan, and
      an error inside the pass is raised.
    grad: check gradients, if there are floating-point arguments and results.
    vmap: check under `jax.vmap`, over all array arguments.
    compiled: compile and run, too.
    ulps: see above.

  Returns:
    The `RollReport` of `fun`'s own roll.

  Raises:
    RollMismatch: an `AssertionError` that says what differs.

  >>> def fun(ws, x):
  ...   for w in ws:
  ...     x = jnp.tanh(x @ w)
  ...   return x
  >>> report = check_roll(fun, [np.eye(3, dtype=np.float32)] * 4, np.ones(3, np.float32), rolls=[(4, 2)])
  >>> report.rolls[0].strategy
  'scan'
  """
  options = _strict(options)
  flat, leaves, names = flat_function(fun, *args, **kwargs)
  report, results = check_bits("values", flat, leaves, options, names)
  if rolls is not None:
    _check_rolls(report, rolls)
  rolled = roll(flat, options)
  if compiled:
    got = roll_jit(flat, roll=options)(*leaves)
    _check_close("compiled values", jax.jit(flat)(*leaves), got, names, ulps, results)
  run = jax.jit if compiled else _by_oracle
  gradient = gradient_of(flat, leaves) if grad else None
  if gradient is not None:
    program, inputs = gradient(flat)
    _, results = check_bits("gradient program", program, inputs, options)
    how = "gradient of the rolled function" + ", compiled" * compiled
    expected = run(program)(*inputs) if compiled else results
    _check_close(how, expected, run(gradient(rolled)[0])(*inputs), None, ulps, results)
  if vmap and leaves:
    batch = [_batched(leaf) for leaf in leaves]
    _, results = check_bits("vmapped program", jax.vmap(flat), batch, options, names)
    how = "vmap of the rolled function" + ", compiled" * compiled
    expected = run(jax.vmap(flat))(*batch) if compiled else results
    _check_close(how, expected, run(jax.vmap(rolled))(*batch), names, ulps, results)
  return report


def flat_function(fun: Callable, *args, **kwargs):
  """`fun` as a function from its array leaves to a flat list, the leaves, and a function that names the results."""
  leaves, tree = jax.tree.flatten((args, kwargs))
  dynamic = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))]
  result_tree = None

  def flat(*values):
    nonlocal result_tree
    filled = list(leaves)
    for i, value in zip(dynamic, values):
      filled[i] = value
    args, kwargs = jax.tree.unflatten(tree, filled)
    results, result_tree = jax.tree.flatten(fun(*args, **kwargs))
    return results

  def names() -> list[str]:
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(result_tree, range(result_tree.num_leaves)))[0]
    return [jax.tree_util.keystr(path) for path, _ in paths]

  flat.__name__ = getattr(fun, "__name__", "flat")
  return flat, [leaves[i] for i in dynamic], names


def check_bits(what: str, fun: Callable, leaves, options: RollOptions, names: Callable | None = None):
  """Rolls a flat function's jaxpr and asserts that its results are the same bits; the report and the results."""
  closed = jax.make_jaxpr(fun)(*leaves)
  rolled, report = roll_jaxpr(closed, options)
  expected = evaluate(closed, *leaves)
  if rolled is not closed:
    for k, (a, b) in enumerate(zip(expected, evaluate(rolled, *leaves), strict=True)):
      difference = bits_differ(a, b)
      if difference:
        raise RollMismatch(f"{what}: {_name(k, names)} {difference}\n{report}")
  return report, expected


def gradient_of(flat: Callable, leaves):
  """A function from a flat function to its gradient program and that one's inputs; None if it has no gradient.

  The program returns the results of floating-point type and the cotangents of the arguments of such type.
  """
  inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
  shapes = jax.eval_shape(flat, *leaves)
  wanted = [k for k, out in enumerate(shapes) if jnp.issubdtype(out.dtype, jnp.inexact)]
  if not inexact or not wanted:
    return None
  random = np.random.RandomState(0)
  cotangents = [_as(random.randn(*out.shape) + 1j * random.randn(*out.shape), out.dtype)
                for out in (shapes[k] for k in wanted)]

  def gradient(flat):
    def program(values, cotangents):
      def of_inexact(*some):
        filled = list(values)
        for i, value in zip(inexact, some):
          filled[i] = value
        results = flat(*filled)
        return [results[k] for k in wanted]
      results, pull = jax.vjp(of_inexact, *[values[i] for i in inexact])
      return results, pull(cotangents)

    flattened = lambda *inputs: jax.tree.leaves(program(list(inputs[: len(leaves)]), list(inputs[len(leaves) :])))
    return flattened, [*leaves, *cotangents]

  return gradient


def far_apart(expected, got, ulps: float, slack: float = 0.0) -> str | None:
  """What differs by more than the tolerance, or None.

  Numbers of floating-point type may differ by `ulps` units in the last place of the largest
  finite magnitude among the expected ones, plus `slack`; all else must be the same.

  >>> far_apart(np.float32([1, 100]), np.float32([1.00001, 100]), ulps=4)
  >>> far_apart(np.float32([1, 100]), np.float32([1.0001, 100]), ulps=4)
  'at [0]: expected 1.0, got 1.0001: 8.39 ulps of the largest magnitude 100, allowed 4'
  """
  dtype = getattr(expected, "dtype", None)
  if not jnp.issubdtype(dtype, jnp.inexact) or (dtype, expected.shape) != (got.dtype, got.shape):
    return bits_differ(expected, got)
  a, b = _wide(expected), _wide(got)
  if not a.size:
    return None
  finite = np.isfinite(a) & np.isfinite(b)
  with np.errstate(invalid="ignore"):
    error = np.where(finite, np.abs(np.where(finite, a - b, 0)), np.where(_same_nonfinite(a, b), 0, np.inf))
  largest = float(np.abs(a[np.isfinite(a)]).max(initial=0))
  unit = float(jnp.finfo(dtype).eps) * largest
  if error.max() <= ulps * unit + slack:
    return None
  where = np.unravel_index(int(error.argmax()), a.shape)
  place = f"at {[int(i) for i in where]}: " if where else ""
  worst = float(error.max())
  off = f"{worst / unit:.3g} ulps of the largest magnitude {largest:.6g}" if unit else f"off by {worst:.3g}"
  allowed = f"{ulps + slack / unit:.3g}" if unit else f"{slack:.3g}"
  return f"{place}expected {np.asarray(expected)[where]!s}, got {np.asarray(got)[where]!s}: {off}, allowed {allowed}"


def _check_close(what: str, original, rolled, names, ulps: float, exact) -> None:
  """Asserts that two lists of results agree; `exact` has the original's, one primitive at a time."""
  for k, (a, b, c) in enumerate(zip(original, rolled, exact, strict=True)):
    slack = 0.0
    if jnp.issubdtype(a.dtype, jnp.inexact) and a.size:
      with np.errstate(invalid="ignore"):
        noise = np.abs(_wide(a) - _wide(c))
      slack = 4 * float(noise[np.isfinite(noise)].max(initial=0))
    difference = far_apart(a, b, ulps, slack)
    if difference:
      raise RollMismatch(f"{what}: {_name(k, names)} {difference}")


def _check_rolls(report: RollReport, rolls) -> None:
  made = [(r.trip_count, r.body_eqns) for r in report.rolls if r.depth == 0]
  if isinstance(rolls, int):
    right, expected = len(made) == rolls, f"{rolls} rolls"
  else:
    expected = [tuple(r) if isinstance(r, Sequence) else r for r in rolls]
    right = len(made) == len(expected) and all(
        e in (trips, (trips, body)) for e, (trips, body) in zip(expected, made))
  if not right:
    raise RollMismatch(f"rolls (trip count, body equations): expected {expected}, got {made}\n{report}")


def _by_oracle(fun: Callable) -> Callable:
  """`fun` as it is under `jax.jit`, evaluated one primitive at a time."""
  return lambda *leaves: evaluate(jax.make_jaxpr(jax.jit(fun))(*leaves), *leaves)


def _strict(options: RollOptions | None) -> RollOptions:
  options = options or ROLL_ALL
  return dataclasses.replace(options, strict=True) if options.strict is None else options


def _name(k: int, names: Callable | None) -> str:
  return f"result {names()[k]}".rstrip() if names else f"result {k}"


def _batched(leaf):
  """A batch whose first element is `leaf`; the others are a little off if floating-point, the same if not."""
  if is_key(leaf):
    return jnp.stack([leaf] * _BATCH)
  x = np.asarray(leaf, jnp.result_type(leaf))
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return np.stack([x] * _BATCH)
  return np.stack([_as(_wide(x) + i / 16, x.dtype) for i in range(_BATCH)])


def _as(x: np.ndarray, dtype) -> np.ndarray:
  return np.asarray(x if jnp.issubdtype(dtype, jnp.complexfloating) else np.real(x)).astype(dtype)


def _wide(x) -> np.ndarray:
  return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _same_nonfinite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return (np.isnan(a) & np.isnan(b)) | (a == b)
