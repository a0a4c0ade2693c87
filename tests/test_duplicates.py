"""What a program computes twice is computed once, where that leaves iterations alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, explain, no_roll, roll, roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def acceleration(x):
  d = x[None] - x[:, None]
  return (d / ((d ** 2).sum(-1) + .1)[..., None] ** 1.5).sum(1)


def verlet(x, v, steps=8):
  """Starts each step with the acceleration that ended the one before."""
  for _ in range(steps):
    v = v + .005 * acceleration(x)
    x = x + .01 * v
    v = v + .005 * acceleration(x)
  return x, v


def count(jaxpr, name):
  """How often a primitive stands in a jaxpr and those within it."""
  total = 0
  for eqn in jaxpr.eqns:
    total += eqn.primitive.name == name
    for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
      inner = getattr(inner, "jaxpr", inner)
      total += count(inner, name) if hasattr(inner, "eqns") else 0
  return total


def rolled(f, *args, options=FORCED):
  closed = jax.make_jaxpr(f)(*args)
  new, report = roll_jaxpr(closed, options)
  return closed, new, report


def test_a_step_that_starts_with_what_ended_the_one_before():
  check_roll(verlet, X, X, options=FORCED, rolls=[8])
  _, new, _ = rolled(verlet, X, X)
  assert count(new.jaxpr, "reduce_sum") == 4, "two of an acceleration, in the loop and before it"


def test_its_gradient():
  gradient = jax.grad(lambda x, v: (verlet(x, v)[0] ** 2).sum())
  check_roll(gradient, X, X, options=FORCED, grad=False, rolls=[7, 7])
  closed, new, _ = rolled(gradient, X, X)
  assert count(new.jaxpr, "pow") < count(closed.jaxpr, "pow") / 4


def test_four_readers_of_the_same_in_two_steps():
  def f(x, v):
    energies = []
    for _ in range(12):
      v = v + .005 * acceleration(x)
      energies.append((acceleration(x) ** 2).sum())
      x = x + .01 * v
      energies.append((acceleration(x) * v).sum())
      v = v + .005 * acceleration(x)
    return x, v, energies
  assert max(r.trip_count for r in check_roll(f, X, X, options=FORCED).rolls) >= 11
  _, new, _ = rolled(f, X, X)
  assert count(new.jaxpr, "pow") <= 2


def test_a_loss_beside_its_gradient():
  def loss(ws, x):
    for w in ws:
      x = jnp.tanh(x @ w) + x
    return (x ** 2).mean()
  ws, x = weights(12, 4, 4), np.ones((3, 4), np.float32)
  both = lambda ws, x: (loss(ws, x), jax.grad(loss)(ws, x))
  check_roll(both, ws, x, options=FORCED, grad=False)
  _, new, report = rolled(both, ws, x)
  assert count(new.jaxpr, "dot_general") == 4, "one forward, two backward, and the first layer's, which takes one"
  assert sorted(r.trip_count for r in report.rolls) == [11, 12]


def test_what_all_layers_compute_alike_stays_in_each():
  def f(ws, x, lengths):
    for w in ws:
      mask = jnp.arange(3) < lengths.sum()
      x = jnp.where(mask[:, None], jnp.tanh(x @ w), x)
    return x
  ws, x = weights(8, 4, 4), np.ones((3, 4), np.float32)
  check_roll(f, ws, x, np.ones(3, np.int32), options=FORCED, rolls=[8])


@pytest.mark.parametrize("hide", [lax.optimization_barrier, jax.checkpoint(lambda x: x * 1.)])
def test_what_a_barrier_keeps_apart_stays_apart(hide):
  def f(ws, x):
    for w in ws:
      x = jnp.sin(x @ w)
      x = jnp.cos(hide(x) @ w) + (hide(x) @ w) ** 2
    return x
  ws, x = weights(6, 4, 4), np.ones((3, 4), np.float32)
  check_roll(f, ws, x, options=FORCED, rolls=[6])
  _, new, _ = rolled(f, ws, x)
  assert count(new.jaxpr, "dot_general") == 3


def test_random_draws_are_left_to_what_gathers_them():
  def f(key, x):
    for i in range(6):
      key, own = jax.random.split(key)
      x = x * jax.random.uniform(own, x.shape) + jax.random.uniform(own, x.shape).sum()
    return x
  check_roll(f, jax.random.key(0), X, options=FORCED)


def test_what_is_exempt_is_computed_again():
  f = lambda x, v: no_roll(verlet)(x, v)
  closed = jax.make_jaxpr(f)(X, X)
  assert roll_jaxpr(closed, FORCED)[0] is closed


def test_a_program_without_repeats_comes_back_as_it_is():
  f = lambda w, x: (jnp.sin(x @ w).sum(), jnp.cos(x @ w))
  closed = jax.make_jaxpr(f)(np.eye(3, dtype=np.float32), X)
  assert roll_jaxpr(closed, RollOptions(strict=True))[0] is closed


def test_results_that_are_merged_and_results_of_which_one_is_dropped():
  def two(x):
    return lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(3), x)
  def f(x):
    sums = []
    for _ in range(8):
      carry, _ = two(x)
      x = x + carry
      _, ys = two(x)
      sums += [ys.sum(), two(x)[0]]
    return x, sums, two(x), two(x)
  check_roll(f, X, options=FORCED)
  assert explain(f, FORCED)(X).rolls


@jax.custom_vjp
def clipped(y):
  """Itself; its gradient clipped, which is not linear in the cotangent."""
  return y


clipped.defvjp(lambda y: (y, None), lambda _, g: (jnp.clip(g, -.1, .1),))


def twice(ws, b, x):
  for w in ws:
    x = clipped(jnp.tanh(x @ w)) + 2 * clipped(jnp.tanh(x @ w))
  return x


def read_by_equal_products(ws, b, x):
  for w in ws:
    x = jnp.tanh(clipped(x) @ w) + jnp.sin(clipped(x) @ w)
  return x


def within_a_function(ws, b, x):
  layer = jax.jit(lambda x, w: clipped(jnp.tanh(x @ w)))
  for w in ws:
    x = layer(x, w) + 2 * layer(x, w)
  return x


def alike_in_every_iteration(ws, b, x):
  for w in ws:
    x = jnp.tanh(x @ w + clipped(b))
  return x


@pytest.mark.parametrize("f", [twice, read_by_equal_products, within_a_function, alike_in_every_iteration])
@pytest.mark.parametrize("options", [FORCED, RollOptions(strategy="fence", min_body_eqns=1, strict=True), RollOptions(strict=True)],
                         ids=["scan", "fence", "auto"])
def test_each_call_has_its_own_rule(f, options):
  """A rule that clips would see the sum of the cotangents, if one call stood for several."""
  args = weights(12, 4, 4), np.full(4, .1, np.float32), np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
  loss = lambda f: lambda *args: (5 * f(*args)).sum() + args[1].sum()
  expected = jax.grad(loss(f), (0, 1, 2))(*args)
  for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(jax.grad(loss(roll(f, options)), (0, 1, 2))(*args))):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
  check_roll(f, *args, options=options)
