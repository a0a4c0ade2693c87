"""A haiku model with state, dropout and parameters initialized under jit; an unrolled recurrence."""

import jax
import numpy as np
import pytest

hk = pytest.importorskip("haiku")
optax = pytest.importorskip("optax")

from jaxroll import roll_jit
from stacks import check_same, check_stack

LAYERS = 5
X = np.random.RandomState(0).randn(4, 6).astype(np.float32)
KEY = jax.random.PRNGKey(7)


def forward(x, is_training):
  for _ in range(LAYERS):
    h = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
    h = hk.Linear(x.shape[-1])(jax.nn.gelu(hk.Linear(8)(h)))
    x = x + hk.dropout(hk.next_rng_key(), 0.2, h)
  return x, hk.next_rng_key()


MODEL = hk.transform_with_state(forward)


def test_parameters_and_state_are_those_of_jit():
  init = lambda key, x: MODEL.init(key, x, True)
  check_same(jax.jit(init)(KEY, X), roll_jit(init)(KEY, X))


def test_forward():
  params, state = MODEL.init(KEY, X, True)
  apply = lambda params, state, key, x: MODEL.apply(params, state, key, x, False)
  check_stack(apply, params, state, KEY, X, layers=LAYERS, grad=False, vmap=False)


def test_train_step():
  params, state = MODEL.init(KEY, X, True)
  optimizer = optax.sgd(0.1, momentum=0.9)

  def step(params, state, optimizer_state, key, x):
    def loss(params):
      (out, next_key), new_state = MODEL.apply(params, state, key, x, True)
      return (out ** 2).mean(), (new_state, next_key)
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, value, aux

  check_stack(step, params, state, optimizer.init(params), KEY, X, layers=LAYERS, rolls=2, grad=False, vmap=False)


def test_unrolled_recurrence():
  steps = 10

  def run(x):
    core = hk.LSTM(3)
    outs, _ = hk.static_unroll(core, x, core.initial_state(x.shape[1]))
    return outs

  model = hk.without_apply_rng(hk.transform(run))
  x = np.random.RandomState(0).randn(steps, 2, 3).astype(np.float32)
  params = model.init(KEY, x)
  step = jax.grad(lambda params, x: (model.apply(params, x) ** 2).sum())
  check_stack(step, params, x, layers=steps, rolls=2, grad=False, vmap=False)
