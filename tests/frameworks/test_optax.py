"""Optax chains over the gradient of a stack of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

optax = pytest.importorskip("optax")

from programs import weights
from stacks import check_same, check_stack

LAYERS = 8
PARAMS = [{"w": w, "b": jnp.zeros(4), "scale": jnp.ones(4)} for w in weights(LAYERS, 4, 4)]
X = np.random.RandomState(0).randn(3, 4).astype(np.float32)


def loss(params, x):
  for p in params:
    h = (x - x.mean(-1, keepdims=True)) * p["scale"]
    x = x + jnp.tanh(h @ p["w"] + p["b"])
  return (x ** 2).mean()


CHAINS = {
    "clipped adamw, scheduled": lambda: optax.chain(
        optax.clip_by_global_norm(1.), optax.adamw(optax.warmup_cosine_decay_schedule(0., 1e-2, 2, 10))),
    "accumulating momentum": lambda: optax.MultiSteps(optax.chain(
        optax.add_decayed_weights(1e-3), optax.sgd(1e-2, momentum=0.9, nesterov=True)), 2).gradient_transformation(),
    "lamb, masked": lambda: optax.masked(
        optax.lamb(1e-2), jax.tree.map(lambda leaf: leaf.ndim > 1, PARAMS)),
    "noisy sgd": lambda: optax.chain(optax.add_noise(1e-2, 0.5, jax.random.key(3)), optax.sgd(1e-2)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_train_step(name):
  optimizer = CHAINS[name]()

  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  state = optimizer.init(PARAMS)
  check_same(state, jax.jit(optimizer.init)(PARAMS))
  check_stack(step, PARAMS, state, X, layers=LAYERS, rolls=2, grad=False, vmap=False)
