"""A flax linen model with dropout, sown intermediates and rematerialized blocks."""

import jax
import numpy as np
import pytest

nn = pytest.importorskip("flax.linen")

from jaxroll import roll_jit
from stacks import check_same, check_stack

LAYERS = 5
X = np.random.RandomState(0).randn(2, 4).astype(np.float32)
KEY = jax.random.key(7)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    h = nn.gelu(nn.Dense(8)(nn.LayerNorm()(x)))
    return x + nn.Dropout(0.2, deterministic=not train)(nn.Dense(x.shape[-1])(h))


class Model(nn.Module):
  remat: bool = False

  @nn.compact
  def __call__(self, x, train=False):
    block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
    for i in range(LAYERS):
      x = block(name=f"block_{i}")(x, train)
      self.sow("intermediates", "features", x.mean())
    return x


def test_parameters_are_those_of_jit():
  init = Model().init
  check_same(jax.jit(init)(KEY, X), roll_jit(init)(KEY, X))


def test_forward():
  check_stack(Model().apply, Model().init(KEY, X), X, layers=LAYERS, grad=False)


@pytest.mark.parametrize("remat", [False, True])
def test_train_step(remat):
  model = Model(remat)

  def step(params, x, key):
    def loss(params):
      out, state = model.apply(params, x, True, rngs={"dropout": key}, mutable=["intermediates"])
      return (out ** 2).mean(), (state, model.apply(params, x, True, rngs={"dropout": key}) == x)
    (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, aux

  check_stack(step, model.init(KEY, X), X, KEY, layers=LAYERS, rolls=2, grad=False, vmap=False)
