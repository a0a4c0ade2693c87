"""Equinox modules, with functions among their leaves, and its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")

from jaxroll import collect_reports, roll, roll_jit
from stacks import check_same, check_stack

LAYERS = 5
X = np.random.RandomState(0).randn(3, 4).astype(np.float32)
KEY = jax.random.key(7)


class Block(eqx.Module):
  norm: eqx.nn.LayerNorm
  mlp: eqx.nn.MLP
  dropout: eqx.nn.Dropout

  def __init__(self, width, key):
    self.norm = eqx.nn.LayerNorm(width)
    self.mlp = eqx.nn.MLP(width, width, 8, 1, activation=jax.nn.gelu, key=key)
    self.dropout = eqx.nn.Dropout(0.2)

  def __call__(self, x, key):
    return x + self.dropout(self.mlp(self.norm(x)), key=key)


class Model(eqx.Module):
  blocks: list
  activation: object

  def __init__(self, key):
    self.blocks = [Block(X.shape[-1], key) for key in jax.random.split(key, LAYERS)]
    self.activation = jnp.tanh

  def __call__(self, x, key):
    for i, block in enumerate(self.blocks):
      x = block(x, jax.random.fold_in(key, i))
    return self.activation(x)


def loss(model, x, key):
  return (jax.vmap(model)(x, jax.random.split(key, len(x))) ** 2).mean()


def step(model, optimizer_state, x, key):
  value, grads = eqx.filter_value_and_grad(loss)(model, x, key)
  updates, optimizer_state = optax.sgd(0.1, momentum=0.9).update(grads, optimizer_state)
  return eqx.apply_updates(model, updates), optimizer_state, value, (model, key)


def test_parameters_are_those_of_jit():
  init = lambda key: eqx.filter(Model(key), eqx.is_array)
  check_same(jax.jit(init)(KEY), roll_jit(init)(KEY))


def test_filter_jit_of_a_rolled_step():
  model = Model(KEY)
  state = optax.sgd(0.1, momentum=0.9).init(eqx.filter(model, eqx.is_array))
  expected = eqx.filter_jit(step)(model, state, X, KEY)
  with collect_reports() as reports:
    got = eqx.filter_jit(roll(step))(model, state, X, KEY)
  assert jax.tree.structure(expected) == jax.tree.structure(got)
  assert [r.trip_count >= LAYERS - 2 for r in reports[0].rolls].count(True) >= 2, str(reports[0])
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got)):
    if not eqx.is_array(a):
      assert a is b
    elif jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
      assert (a == b).all()
    else:
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_forward():
  check_stack(Model(KEY), X[0], KEY, layers=LAYERS, grad=False, vmap=False)


def test_train_step():
  params, static = eqx.partition(Model(KEY), eqx.is_array)
  state = optax.sgd(0.1, momentum=0.9).init(params)

  def arrays(params, state, x, key):
    return eqx.filter(step(eqx.combine(params, static), state, x, key), eqx.is_array)

  check_stack(arrays, params, state, X, KEY, layers=LAYERS, rolls=2, grad=False, vmap=False)


def test_state():
  class Counting(eqx.Module):
    norms: list
    linears: list

    def __init__(self, key):
      self.norms = [eqx.nn.BatchNorm(4, axis_name="batch", mode="ema") for _ in range(LAYERS)]
      self.linears = [eqx.nn.Linear(4, 4, key=key) for key in jax.random.split(key, LAYERS)]

    def __call__(self, x, state):
      for norm, linear in zip(self.norms, self.linears):
        h, state = norm(linear(x), state)
        x = x + jnp.tanh(h)
      return x, state

  model, state = eqx.nn.make_with_state(Counting)(KEY)
  params, static = eqx.partition(model, eqx.is_array)

  def apply(params, state, x):
    return jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

  expected, state_of_jit = eqx.filter_jit(apply)(params, state, X)
  with collect_reports() as reports:
    got, state_of_roll = eqx.filter_jit(roll(apply))(params, state, X)
  assert any(r.trip_count >= LAYERS - 2 for r in reports[0].rolls), str(reports[0])
  for a, b in zip(jax.tree.leaves((expected, state_of_jit)), jax.tree.leaves((got, state_of_roll)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
