"""Loops that accumulate, look back, and collect what their iterations make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, explain, roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)
FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)


def left_over(f, *args, options=FORCED):
  """The primitives at top level of the rolled program, but for loops and for what stacks the weights."""
  rolled, _ = roll_jaxpr(jax.make_jaxpr(f)(*args), options)
  return [e.primitive.name for e in rolled.jaxpr.eqns
          if e.primitive.name != "scan" and e.params.get("name") != "stack"]


def layers(ws, x, each=lambda x: x):
  """What `each` makes of the layers' results."""
  seen = []
  for w in ws:
    x = jnp.tanh(x @ w)
    seen.append(each(x))
  return seen


def test_running_sums_and_products():
  def f(ws, x):
    total, product, top = jnp.zeros(()), 1., jnp.float32(-1)
    for y in layers(ws, x):
      total, product, top = total + y.sum(), product * (y * y).mean(), jnp.maximum(top, y.max())
    return total, product, top
  def of_one_sum(ws, x):
    total, product = jnp.zeros(()), 1.
    for y in layers(ws, x):
      total, product = total + y.sum(), product * y.mean()
    return total, product
  def at_once(ws, x):
    total, product = jnp.zeros(()), jnp.ones(())
    for w in ws:
      x = jnp.tanh(x @ w)
      total, product = total + x.sum(), product * x.mean()
    return x, total, product
  roll, = check_roll(at_once, WS, X, rolls=[6]).rolls
  assert roll.carries == 3 and left_over(at_once, WS, X) == []
  report = check_roll(f, WS, X, rolls=2)
  assert report.rolls[1].feeds == ("ys",)
  roll, = check_roll(of_one_sum, WS, X, rolls=[6]).rolls
  assert roll.carries == 3 and left_over(of_one_sum, WS, X) == []


def test_sum_of_the_layers_losses():
  def f(ws, x):
    return sum(layers(ws, x, lambda y: (y ** 2).mean()))
  check_roll(f, WS, X, rolls=[(6, 6)])  # one loop does the layers and sums their losses, which are traced after them
  assert left_over(f, WS, X) == []
  check_roll(jax.grad(f), WS, X)


COLLECTED = {
    "stack": (lambda ws, x: jnp.stack(layers(ws, x)), []),
    "stack on another axis": (lambda ws, x: jnp.stack(layers(ws, x), 1), ["transpose"]),
    "stack on the last axis": (lambda ws, x: jnp.stack(layers(ws, x), -1), ["transpose"]),
    "stack, reversed": (lambda ws, x: jnp.stack(layers(ws, x)[::-1]), ["rev"]),
    "array of scalars": (lambda ws, x: jnp.array(layers(ws, x, jnp.sum)), []),
    "stack of scalars": (lambda ws, x: jnp.stack(layers(ws, x, jnp.sum)), []),
    "concatenate": (lambda ws, x: jnp.concatenate(layers(ws, x)), ["reshape"]),
    "concatenate on the last axis": (lambda ws, x: jnp.concatenate(layers(ws, x), -1), ["transpose", "reshape"]),
    "concatenate rows": (lambda ws, x: jnp.concatenate([y[None] for y in layers(ws, x)]), []),
    "concatenate rows made in the loop": (
        lambda ws, x: jnp.concatenate(layers(ws, x, lambda y: y[None]), 1), ["reshape", "transpose", "reshape"]),
    "vstack": (lambda ws, x: jnp.vstack(layers(ws, x[0])), ["slice", "squeeze", "reshape"]),
    "part": (lambda ws, x: jnp.stack(layers(ws, x)[1:]), ["slice"]),
    "with the first": (lambda ws, x: jnp.concatenate([x, *layers(ws, x)]), ["reshape", "concatenate"]),
    "with others around": (
        lambda ws, x: jnp.concatenate([x[:1], x, *layers(ws, x), x]), ["slice", "reshape", "concatenate"]),
}


@pytest.mark.parametrize("name", COLLECTED)
def test_results_put_together_are_the_loops_ys(name):
  f, rest = COLLECTED[name]
  report = check_roll(f, WS, X, options=FORCED, vmap=False, compiled=name in ("stack", "with the first"))
  assert report.rolls[0].trip_count == 6 and sum(r.unstacked_bytes for r in report.rolls) == 0
  assert left_over(f, WS, X) == rest


def test_two_lists_at_once_and_one_in_turn():
  def f(ws, x):
    keys, values = [], []
    for w in ws:
      keys.append(jnp.sin(x))
      x = jnp.tanh(x @ w)
      values.append(x)
    return jnp.stack(keys), jnp.concatenate(values), jnp.stack([y for pair in zip(keys, values) for y in pair])
  report = check_roll(f, WS, X, rolls=[6], vmap=False)
  assert report.rolls[0].ys == 2


def test_many_results_are_collected_without_any_copy():
  def f(w, x):
    return jnp.array(layers([w] * 50, x, jnp.sum)), jnp.stack(layers([w] * 50, x), 1)
  report = check_roll(f, WS[0], X, vmap=False, grad=False)
  assert {r.trip_count for r in report.rolls if r.depth == 0} == {50}
  assert report.eqns_after < 20 and sum(r.unstacked_bytes for r in report.rolls) == 0


@pytest.mark.parametrize("collect", [jnp.stack, jnp.concatenate, lambda ys: jnp.stack(ys, 1)])
def test_gradients_of_collected_results_are_read_where_they_lie(collect):
  def f(ws, x):
    return (collect(layers(ws, x)) ** 2).sum()
  _, report = roll_jaxpr(jax.make_jaxpr(jax.grad(f))(WS, X), FORCED)
  backward = report.rolls[-1]
  assert backward.trip_count >= 5 and "slice" in backward.feeds
  check_roll(jax.grad(f), WS, X, options=FORCED, grad=False, compiled=False)


def test_lists_of_intermediates():
  report = check_roll(layers, WS, X, rolls=[6])
  assert report.rolls[0].ys == 1
  nested = lambda ws, x: {"all": [{"x": y, "s": y.sum()} for y in layers(ws, x)]}
  assert check_roll(nested, WS, X).rolls[0].trip_count == 6


@pytest.mark.parametrize("kind", ["set", "dynamic_update_slice", "per layer, stacked", "per layer, a list"])
def test_caches(kind):
  def step(ws, x, cache, position):
    new = []
    for i, w in enumerate(ws):
      key = x @ w
      if kind == "set":
        cache = cache.at[i, :, 0].set(key)
        layer = cache[i]
      elif kind == "dynamic_update_slice":
        cache = lax.dynamic_update_slice(cache, key[None, :, None], (i, 0, position, 0))
        layer = cache[i]
      else:
        layer = lax.dynamic_update_slice(cache[i], key[:, None], (0, position, 0))
        new.append(layer)
      x = jnp.tanh(x + layer.sum(1))
    return x, (jnp.stack(new) if kind.endswith("stacked") else new or cache)
  cache = np.zeros((6, 3, 5, 4), np.float32)
  cache = list(cache) if kind.endswith("list") else cache
  report = check_roll(step, WS, X, cache, np.int32(2), rolls=[6], options=FORCED)
  roll, = report.rolls
  assert roll.unstacked_bytes == 0 or kind.endswith("list")
  assert roll.carries == (2 if kind in ("set", "dynamic_update_slice") else 1)


def multistep(f, coefficients, collect=lambda ys: ys[-1]):
  def solve(x):
    order = len(coefficients)
    ys = [x * (1 - 0.1 * i) for i in range(order)]
    for _ in range(14):
      ys.append(sum(c * f(y) for c, y in zip(coefficients, ys[: -order - 1 : -1])))
    return collect(ys)
  return solve


@pytest.mark.parametrize("order", [2, 3, 4, 5])
@pytest.mark.parametrize("collect", [lambda ys: ys[-1], jnp.stack])
def test_multistep_integrators(order, collect):
  solve = multistep(jnp.sin, [0.9, -0.3, 0.2, -0.15, 0.1][:order], collect)
  roll = [r for r in check_roll(solve, X, options=FORCED, vmap=False, compiled=False).rolls if r.depth == 0][-1]
  assert roll.trip_count >= 14 - order and roll.carries >= order and roll.unstacked_bytes == 0


def test_adams_bashforth_keeps_the_last_slope():
  def f(x):
    slope = jnp.sin(x)
    x = x + 0.1 * slope
    for _ in range(10):
      new = jnp.sin(x)
      x, slope = x + 0.1 * (1.5 * new - 0.5 * slope), new
    return x
  roll, = check_roll(f, X, rolls=[10]).rolls
  assert roll.carries == 2


@pytest.mark.parametrize("merged", [False, True])
def test_leapfrog(merged):
  def f(x, v):
    force = lambda x: -jnp.sin(x)
    if merged:
      v = v + 0.05 * force(x)
      for i in range(10):
        x = x + 0.1 * v
        v = v + (0.1 if i < 9 else 0.05) * force(x)
    else:
      for _ in range(10):
        v = v + 0.05 * force(x)
        x = x + 0.1 * v
        v = v + 0.05 * force(x)
    return x, v
  assert check_roll(f, X, X + 1).rolls[0].trip_count >= 9


def test_fibonacci_of_any_lag():
  def f(x):
    seen = [x, x + 1, x + 2, x + 3]
    for _ in range(20):
      seen.append(seen[-1] * 0.3 + seen[-4])
    return seen[-1]
  roll = check_roll(f, X).rolls[-1]
  assert roll.trip_count >= 17 and roll.carries == 4


def test_a_value_of_the_first_iteration_everywhere():
  def f(ws, x):
    first = jnp.tanh(x @ ws[0])
    x = first
    for w in ws[1:]:
      x = jnp.tanh(x @ w) + first
    return x
  roll, = check_roll(f, WS, X, rolls=[5]).rolls
  assert roll.consts == 1


def test_a_scan_of_many_steps_is_what_auto_chooses_for_collected_results():
  def f(w, x):
    scores = layers([w] * 40, x, lambda y: (y ** 2).mean())
    return jnp.array(scores), jnp.stack(layers([w] * 40, x + 1, jnp.cumsum), 1)
  report = explain(f)(WS[0], X)
  assert [(r.strategy, r.trip_count) for r in report.rolls] == [("scan", 40)] * 2
  assert report.eqns_after < 12
