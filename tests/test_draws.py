"""Equal draws, wherever they stand, are made together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, explain
from jaxroll.testing import check_roll
from programs import dropout_chain, weights

AUTO = RollOptions(strict=True)
COUNT = 9


def dropout(key, x):
  return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.)


def arrays(shapes):
  return [jnp.linspace(-1, 1, int(np.prod(s))).reshape(s) for s in shapes]


def split_up_front(key):
  keys = jax.random.split(key, COUNT)
  return [keys[i] for i in range(COUNT)]


def split_in_a_chain(key):
  out = []
  for _ in range(COUNT):
    key, sub = jax.random.split(key)
    out.append(sub)
  return out


def folded_in(key):
  return [jax.random.fold_in(key, i) for i in range(COUNT)]


def folded_paths(key):
  """As flax does: constants without a pattern."""
  return [jax.random.fold_in(key, (i * 7919 + 13) % 1000) for i in range(COUNT)]


def split_twice(key):
  """As haiku does: some at a time."""
  out = []
  while len(out) < COUNT:
    key, *subs = jax.random.split(key, 4)
    out += subs
  return out


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("keys", [split_up_front, split_in_a_chain, folded_in, folded_paths, split_twice])
def test_scattered_draws_of_two_shapes(keys, make):
  def fun(a, b, key):
    total = 0.
    for i, k in enumerate(keys(key)):
      x = a if i % 3 else b
      total += jnp.sin(dropout(k, x * i)).sum() if i % 2 else jnp.cos(dropout(k, x) @ x.T).sum()
    return total

  report = check_roll(fun, *arrays([(30, 40), (20, 50)]), make(0), options=AUTO, grad=False, vmap=False, compiled=keys is split_up_front)
  batches = [(r.trip_count, r.body_eqns) for r in report.rolls if r.strategy == "batch" and "random" in r.reason]
  assert {(6, 1), (3, 1)} <= set(batches)


def test_layers_whose_weights_are_not_stacked():
  ws, x, key = weights(12, 64, 64), np.ones((8, 64), np.float32), jax.random.key(0)
  report = check_roll(dropout_chain, ws, x, key, options=AUTO, compiled=False)
  assert sorted(r.strategy for r in report.rolls) == ["batch", "inline"] or "fence" in [r.strategy for r in report.rolls]
  batch = next(r for r in report.rolls if r.strategy == "batch")
  assert batch.trip_count == 12


def test_time_steps_draw_within_their_loop():
  def fun(w, xs, key):
    h = jnp.zeros(8)
    for t, k in enumerate(jax.random.split(key, 24)):
      h = dropout(k, jnp.tanh(h @ w + xs[t]))
    return h

  report = check_roll(fun, np.eye(8, dtype=np.float32), np.ones((24, 8), np.float32), jax.random.key(0), options=AUTO,
                      compiled=False)
  assert [r.strategy for r in report.rolls] == ["scan"], "a scan holds one step's mask at a time"


def test_arithmetic_on_the_bits_goes_along():
  def fun(x, key):
    for k, f in zip(jax.random.split(key, 5), (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.square)):
      x = f(x) @ x + (jax.random.bits(k, x.shape, "uint16") < np.uint16(1000)) * 0.1
    return x

  report = check_roll(fun, jnp.eye(5), jax.random.key(0), options=AUTO, compiled=False)
  batch, = [r for r in report.rolls if r.unstacked_bytes]
  assert (batch.strategy, batch.trip_count, batch.body_eqns) == ("batch", 5, 2)
  assert batch.unstacked_bytes == 5 * 5 * 5, "booleans wait, not the bits"


def test_keys_that_depend_on_the_data_stay():
  def fun(x, key):
    for _ in range(5):
      key = jax.random.fold_in(key, jnp.argmax(x @ x))
      x = dropout(key, x)
    return x

  report = check_roll(fun, jnp.eye(4) + 0.1, jax.random.key(0), options=AUTO, grad=False, compiled=False)
  assert "batch" not in [r.strategy for r in report.rolls]


def test_few_bytes_wait_at_a_time():
  """A forward pass reads each mask at once, so that not all of them are made first."""
  def fun(ws, x, key):
    for w, k in zip(ws, jax.random.split(key, len(ws))):
      x = dropout(k, x @ w)
    return x

  args = weights(12, 256, 256), np.ones((512, 256), np.float32), jax.random.key(0)
  masks, = [r for r in explain(fun)(*args).rolls if r.unstacked_bytes]
  assert masks.strategy == "batch" and masks.reason.endswith("in 4 parts")
  gradient = explain(jax.grad(lambda *args: fun(*args).sum()))(*args)
  assert all("parts" not in r.reason for r in gradient.rolls), "there they wait anyway"
  check_roll(fun, *args, options=AUTO, grad=False, vmap=False, compiled=False)


def test_draws_in_programs_within():
  def fun(x, key):
    @jax.jit
    def inner(x, key):
      for k in jax.random.split(key, 5):
        x = dropout(k, x @ x)
      return x
    return jax.checkpoint(inner)(inner(x, key), jax.random.fold_in(key, 1))

  check_roll(fun, jnp.eye(4), jax.random.key(0), options=AUTO, compiled=False)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("make", [split_up_front, split_in_a_chain, folded_in, list])
def test_other_generators_give_other_bits_for_many_keys_at_once(make, impl):
  def fun(key):
    return [jax.random.bits(k, (3,)) for k in make(key)]

  key = jax.random.key(1, impl=impl)
  report = check_roll(fun, jax.random.split(key, COUNT) if make is list else key, options=AUTO, vmap=False)
  assert not any(r.strategy == "batch" for r in report.rolls)
