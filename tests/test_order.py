"""Equations that stand elsewhere in trace order than where they are needed hide no repeat."""

import random

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll import RollOptions, explain, roll_jit
from jaxroll.testing import check_roll
from programs import weights

LAYERS = 6


def shuffled(things, seed=0):
  things = list(things)
  random.Random(seed).shuffle(things)
  return things


def top(report):
  return sorted((r.trip_count, r.body_eqns) for r in report.rolls if r.depth == 0)


def params(layers=LAYERS, d=3):
  return {f"{k}{i}": w for k, seed in (("a", 0), ("b", 1)) for i, w in enumerate(weights(layers, d, d, seed=seed))}


X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def test_parameters_cast_up_front_in_any_order():
  def fun(params, x):
    cast = {k: params[k].astype(jnp.bfloat16) for k in shuffled(params)}
    x = x.astype(jnp.bfloat16)
    for i in range(LAYERS):
      x = jnp.tanh(x @ cast[f"a{i}"]) @ cast[f"b{i}"] + x
    return x

  report = check_roll(fun, params(), X, compiled=False, vmap=False, grad=False)
  assert top(report) == [(LAYERS, 6)]
  assert report.eqns_after <= 6


def test_parameters_of_two_shapes_cast_up_front_by_default():
  """What is cast for one layer alone is cast in it: nothing of the layers is left at top level."""
  layers = 10
  def fun(ws, us, x):
    ws, us = [w.astype(jnp.bfloat16) for w in ws], [u.astype(jnp.bfloat16) for u in shuffled(us)]
    us = [u for _, u in sorted(zip(shuffled(range(layers)), us), key=lambda p: p[0])]
    x = x.astype(jnp.bfloat16)
    for w, u in zip(ws, us):
      x = jnp.tanh(jnp.tanh(x @ w) @ u + jnp.sin(x)) * jnp.cos(x)
    return x

  report = check_roll(fun, weights(layers, 3, 4), weights(layers, 4, 3), X, options=RollOptions(strict=True),
                      compiled=False, vmap=False, grad=False)
  assert top(report) == [(layers, 10)]


def test_keys_derived_up_front_in_any_order():
  def fun(ws, x, key):
    keys = {i: jax.random.fold_in(key, 7 * i + 3) for i in shuffled(range(LAYERS))}
    for i, w in enumerate(ws):
      x = x + jnp.where(jax.random.bernoulli(keys[i], 0.8, x.shape), jnp.tanh(x @ w), 0.)
    return x

  report = check_roll(fun, weights(LAYERS, 3, 3), X, jax.random.key(0), compiled=False, vmap=False)
  (trips, _), = top(report)
  assert trips == LAYERS and report.eqns_after <= 3


def test_masks_made_up_front_in_any_order():
  def fun(ws, x):
    at = jnp.arange(len(x))
    masks = {i: jnp.abs(at[:, None] - at[None, :]) < 1 + i % 3 for i in shuffled(range(LAYERS))}
    for i, w in enumerate(ws):
      x = jnp.where(masks[i], jnp.tanh(x @ w) @ x.T, 0.) @ x
    return x

  report = check_roll(fun, weights(LAYERS, 3, 3), X, compiled=False, vmap=False)
  assert max(top(report))[0] == LAYERS
  assert report.eqns_after <= 0.3 * report.eqns_before


def test_stopped_gradients_of_scaled_weights_up_front():
  def fun(params, x):
    scaled = {k: jax.lax.stop_gradient(jnp.sin(params[k]) * 0.5) for k in shuffled(params)}
    for i in range(LAYERS):
      x = jnp.tanh(x @ params[f"a{i}"]) + x @ scaled[f"b{i}"]
    return x

  report = check_roll(fun, params(), X, compiled=False, vmap=False)
  (trips, body), = [r for r in top(report) if r[1] > 2]
  assert trips == LAYERS and body >= 6


def test_results_converted_at_the_end_in_any_order():
  def fun(ws, x):
    out = []
    for w in ws:
      x = jnp.tanh(x @ w) + x
      out.append(x)
    return {str(i): jnp.exp(out[i] * 0.5) for i in shuffled(range(len(ws)))}

  report = check_roll(fun, weights(LAYERS, 3, 3), X, compiled=False, vmap=False)
  assert top(report) == [(LAYERS, 5)]


def test_chains_interleaved_without_a_pattern():
  def fun(ws, us, x):
    x, y = x, x * 2
    ws, us = iter(ws), iter(us)
    for turn in "xyxxyyxyxxxy":
      if turn == "x":
        x = jnp.tanh(x @ next(ws)) + jnp.sin(x)
      else:
        y = jnp.cos(y @ next(us)) * y + 1
    return x, y

  report = check_roll(fun, weights(7, 3, 3), weights(5, 3, 3, seed=1), X, compiled=False, vmap=False)
  assert top(report) == [(5, 4), (7, 4)]


def test_gradient_of_weights_shared_here_and_there():
  """Cotangents of shared weights are summed wherever the layers that share them stand."""
  def loss(ws, us, x):
    for i in (0, 1, 0, 2, 1, 3, 0, 4, 2, 5, 4, 6, 7, 0):
      x = jnp.tanh(jnp.tanh(x @ ws[i]) @ us[i]) + x
    return (x * x).sum()

  gradient = jax.grad(loss, (0, 1))
  report = check_roll(gradient, weights(8, 3, 3), weights(8, 3, 3, seed=1), X, compiled=False, vmap=False, grad=False)
  assert [trips for trips, body in top(report) if body > 1] == [13, 14], "all layers, backward and forward"


def test_remat_with_something_else_between():
  @jax.checkpoint
  def layer(w, x):
    return jnp.tanh(jnp.sin(x @ w)) + x

  def loss(ws, x):
    norms = []
    for i, w in enumerate(ws):
      x = layer(w, x)
      if i in (1, 4):
        norms.append(jnp.log1p(jnp.abs(w).sum()))
    return (x * x).sum() + sum(norms)

  report = check_roll(jax.grad(loss), weights(LAYERS, 3, 3), X, compiled=False, vmap=False, grad=False)
  assert sum(r.trip_count >= LAYERS - 1 for r in report.rolls if r.depth == 0) >= 2


def test_effects_keep_their_order():
  seen = []

  def fun(ws, x):
    for i, w in enumerate(ws):
      x = jnp.tanh(x @ w) + jnp.sin(x) * 0.5
      jax.debug.callback(lambda v, i=i: seen.append((i, float(v))), x.sum(), ordered=True)
    return x

  ws = weights(LAYERS, 3, 3)
  expected = []
  fun(ws, X)
  jax.effects_barrier()
  expected, seen[:] = list(seen), []
  options = RollOptions(strategy="scan", min_body_eqns=1, strict=True)
  jitted = roll_jit(fun, roll=options)
  jitted(ws, X)
  jax.effects_barrier()
  assert [i for i, _ in seen] == list(range(LAYERS))
  np.testing.assert_allclose([v for _, v in seen], [v for _, v in expected], rtol=1e-5)
  assert top(explain(fun, options)(ws, X)) == [(LAYERS, 6)] or top(explain(fun, roll=options)(ws, X)) == [(LAYERS, 5)]
