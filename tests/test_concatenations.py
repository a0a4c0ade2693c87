"""Short concatenations in bodies become choices: the same bits, and differentiable still."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions
from jaxroll.bodies import for_cpu
from jaxroll.testing import check_roll
from jaxroll.testing.oracle import bits_differ, evaluate

ODD = np.float32([[0., -0., np.inf], [np.nan, -np.nan, 1e-45]])  # bits that arithmetic would not keep
CASES = {
    "floats": (lambda a: jnp.concatenate([a, -a, a[:, :1]], 1), ODD),
    "leading axis": (lambda a: jnp.concatenate([a[:1], a, a]), ODD),
    "stack": (lambda a: jnp.stack([a, a.T.reshape(a.shape)], 1), ODD),
    "scalars": (lambda a: jnp.stack([a[0, 0], a[1, 0], a[1, 1]]), ODD),
    "booleans": (lambda a: jnp.concatenate([a > 0, a < 0]), ODD),
    "bfloat16": (lambda a: jnp.concatenate([a, a], -1), ODD.astype(jnp.bfloat16)),
    "complex": (lambda a: jnp.concatenate([a, a.conj()], 1), (ODD.view(np.int32) % 7 + 1j * np.float32([[0.], [-0.]])).astype(np.complex64)),
    "small integers": (lambda a: jnp.concatenate([a, a[:, :2]], 1), np.int8([[1, -2, 3]])),
    "an empty part": (lambda a: jnp.concatenate([a[:, :0], a], 1), ODD),
}


def primitives(closed):
  return [e.primitive.name for e in closed.jaxpr.eqns]


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name):
  fun, x = CASES[name]
  closed = jax.make_jaxpr(fun)(x)
  chosen = for_cpu(closed, inlined=True)
  assert not {"concatenate", "stack"} & set(primitives(chosen))
  assert list(chosen.out_avals) == list(closed.out_avals)
  for a, b in zip(evaluate(closed, x), evaluate(chosen, x), strict=True):
    assert bits_differ(a, b) is None


@pytest.mark.parametrize("fun", [
    lambda x: jnp.concatenate([x] * 9),
    lambda x: jnp.concatenate([jnp.tile(x, (1, 1 << 17))] * 2),
    lambda x: jnp.concatenate([x[:, :0], x[:, :0]], 1),
])
def test_long_large_and_empty_ones_stay(fun):
  closed = jax.make_jaxpr(fun)(ODD)
  assert for_cpu(closed, inlined=True) is closed


@pytest.mark.parametrize("fun", [
    lambda x, i: jnp.concatenate([x[i], x], 1),
    lambda x, i: jnp.concatenate([x, jnp.sin(jnp.take(x, i, axis=0)) * 2], 1),
])
def test_those_of_elements_looked_up_stay(fun):
  closed = jax.make_jaxpr(fun)(ODD, np.int32([1, 0]))
  assert for_cpu(closed, inlined=True) is closed


def test_products_of_elements_looked_up_are_chosen_among():
  closed = jax.make_jaxpr(lambda x, i: jnp.concatenate([x[i] @ x.T, x], 1))(ODD, np.int32([1, 0]))
  assert "concatenate" not in primitives(for_cpu(closed, inlined=True))


JOIN = lambda x: jnp.concatenate([x, -x], 1)


@pytest.mark.parametrize("fun", [
    lambda x: jnp.sin(JOIN(x)),
    lambda x: (JOIN(x).T * 2).sum(0),
    lambda x: JOIN(x).reshape(3, -1).max(1),
    lambda x: jax.jit(lambda y: jnp.cos(y) + 1)(JOIN(x)),
    lambda x: jax.jit(JOIN)(x) * 2,
])
def test_those_that_fuse_with_all_that_reads_them_stay(fun):
  closed = jax.make_jaxpr(fun)(ODD)
  assert for_cpu(closed, inlined=True) is closed


@pytest.mark.parametrize("fun", [
    lambda x: JOIN(x) @ jnp.ones((6, 2)),
    lambda x: (lambda y: jnp.sin(y) + y.T.reshape(2, 6) @ jnp.ones((6, 6)))(JOIN(x)),
    lambda x: jax.jit(lambda y: jnp.cos(y) + y @ jnp.ones((6, 6)))(JOIN(x)),
    lambda x: jax.jit(JOIN)(x) @ jnp.ones((6, 2)),
    lambda x: jax.checkpoint(jax.jit(JOIN))(x).T @ x,
    lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c * 2, JOIN(x)) * 2,
])
def test_those_that_something_reads_as_they_lie_are_chosen(fun):
  closed = jax.make_jaxpr(fun)(ODD)
  chosen = for_cpu(closed, inlined=True)
  assert "concatenate" in str(closed) and "concatenate" not in str(chosen)
  for a, b in zip(evaluate(closed, ODD), evaluate(chosen, ODD), strict=True):
    assert bits_differ(a, b) is None


def test_typed_keys_stay():
  closed = jax.make_jaxpr(lambda k: jnp.concatenate([k, k]))(jax.random.split(jax.random.key(0)))
  assert for_cpu(closed, inlined=True) is closed


def test_gradients_of_the_rolled_program_pass_through():
  def loss(ws, x):
    for w in ws:
      a, b = jnp.split(x @ w, 2, -1)
      x = jnp.concatenate([jnp.tanh(b), a * 0.5], -1)
    return (x ** 2).sum()

  ws = [np.random.RandomState(i).randn(4, 4).astype(np.float32) for i in range(4)]
  for strategy in ("fence", "scan"):
    options = RollOptions(strategy=strategy, min_body_eqns=1, strict=True)
    report = check_roll(loss, ws, np.ones((2, 4), np.float32), options=options, vmap=False, compiled=False)
    assert report.rolls[0].trip_count == 4
