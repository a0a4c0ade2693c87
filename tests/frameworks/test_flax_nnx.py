"""A flax nnx model: its state mutated under `nnx.jit`, and split off for `roll_jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

import jaxroll
from stacks import check_same, check_stack

LAYERS = 5
X = np.random.RandomState(0).randn(2, 4).astype(np.float32)


class Block(nnx.Module):
  def __init__(self, width, rngs):
    self.up = nnx.Linear(width, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.down = nnx.Linear(8, width, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)

  def __call__(self, x):
    return x + self.dropout(self.down(nnx.gelu(self.norm(self.up(x)))))


class Model(nnx.Module):
  def __init__(self, rngs):
    self.blocks = nnx.List([Block(X.shape[-1], rngs) for _ in range(LAYERS)])

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return x


def model():
  return Model(nnx.Rngs(params=0, dropout=1))


def train_step(model, optimizer, x):
  value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
  optimizer.update(model, grads)
  return value


def test_mutated_state_under_nnx_jit():
  def trained(steps=2):
    trainee = model()
    optimizer = nnx.Optimizer(trainee, optax.sgd(0.1), wrt=nnx.Param)
    step = nnx.jit(train_step)
    values = [step(trainee, optimizer, X) for _ in range(steps)]
    return values, nnx.to_pure_dict(nnx.state(trainee)), nnx.to_pure_dict(nnx.state(optimizer))

  expected = trained()
  with jaxroll.enabled(), jaxroll.collect_reports() as reports:
    got = trained()
  assert [r.trip_count >= LAYERS - 2 for r in reports[-1].rolls].count(True) >= 2, str(reports[-1])
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
  rest = lambda tree: [x for x in jax.tree.leaves(tree) if not is_float(x)]  # the random streams' keys and counts
  assert len(rest(expected)) > LAYERS
  check_same(rest(expected), rest(got))
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
    if is_float(a):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_parameters_are_those_of_jit():
  init = lambda: nnx.to_pure_dict(nnx.state(model()))
  check_same(jax.jit(init)(), jaxroll.roll_jit(init)())


def test_train_step_of_the_state():
  graph, params, rest = nnx.split(model(), nnx.Param, ...)

  def step(params, rest, x):
    def loss(params):
      net = nnx.merge(graph, params, rest, copy=True)
      return (net(x) ** 2).mean(), nnx.state(net, nnx.Not(nnx.Param))
    (value, state), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state, value

  check_stack(step, params, rest, X, layers=LAYERS, rolls=2, grad=False, vmap=False)
