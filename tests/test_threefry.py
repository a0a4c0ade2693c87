"""Random bits are those of `jax.random`, whatever makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, compat, explain, roll_jit
from jaxroll.fingerprint import nested_jaxprs
from jaxroll.testing import check_roll
from jaxroll.testing.oracle import evaluate
from jaxroll.threefry import spell_out

SHAPES = [(), (7,), (2, 1, 9), (0, 3), (33, 5)]
KEYS = 100


def spelled(fun, *args, mode="auto", platform="cpu"):
  closed, count = spell_out(jax.make_jaxpr(fun)(*args), mode, platform)
  return (lambda *args: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args)), count


def primitives(closed):
  for eqn in closed.jaxpr.eqns:
    yield eqn.primitive.name
    for inner in nested_jaxprs(eqn.params):
      yield from primitives(inner if isinstance(inner, compat.ClosedJaxpr) else compat.close(inner))


@pytest.mark.parametrize("partitionable", [True, False])
def test_bits_of_every_shape_and_width(partitionable):
  """2000 samples of (shape, width, key), and some keys alone: no differing bit."""
  with jax.threefry_partitionable(partitionable), jax.enable_x64(True):
    keys = jax.random.split(jax.random.key(1), KEYS)

    def bits(keys):
      drawn = [jax.vmap(lambda k: jax.random.bits(k, shape, f"uint{width}"))(keys)
               for shape in SHAPES for width in (8, 16, 32, 64)]
      return [*drawn, jax.random.bits(keys[3]), jax.random.bits(keys[4], (5,), "uint16")]

    fun, count = spelled(bits, keys)
    assert count == 4 * len(SHAPES) + 2
    for ours, theirs in zip(jax.jit(fun)(keys), bits(keys), strict=True):
      assert ours.dtype == theirs.dtype
      np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_derived(make, partitionable):
  def derive(key):
    a, b = jax.random.split(key)
    many = jax.random.split(key, (3, 5))
    folded = [jax.random.fold_in(key, i) for i in (0, 1, 2**31 - 1)]
    in_turn = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(4))
    pairs = jax.vmap(jax.random.fold_in)(many[0], jnp.arange(5))
    each = jax.vmap(jax.random.fold_in, (0, None))(many[1], 9)
    return a, b, many, folded, in_turn, pairs, each

  with jax.threefry_partitionable(partitionable):
    key = make(7)
    fun, count = spelled(derive, key)
    assert count >= 7
    as_data = lambda k: np.asarray(jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k)
    for ours, theirs in zip(jax.jit(fun)(key), jax.tree.leaves(derive(key)), strict=True):
      assert ours.dtype == theirs.dtype
      np.testing.assert_array_equal(as_data(ours), as_data(theirs))


SAMPLERS = {
    "uniform": lambda k: jax.random.uniform(k, (5, 3)),
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (50,)),
    "normal": lambda k: jax.random.normal(k, (17,)),
    "bfloat16": lambda k: jax.random.normal(k, (17,), jnp.bfloat16),
    "truncated_normal": lambda k: jax.random.truncated_normal(k, -1., 2., (9,)),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(6.), shape=(8,)),
    "randint": lambda k: jax.random.randint(k, (8,), -5, 1000),
    "permutation": lambda k: jax.random.permutation(k, 11),
    "choice": lambda k: jax.random.choice(k, 10, (4,), replace=False),
    "gamma": lambda k: jax.random.gamma(k, 2.5, (3,)),
    "poisson": lambda k: jax.random.poisson(k, 3., (4,)),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_bit_for_bit(name):
  keys = jax.random.split(jax.random.key(3), 2)
  closed = jax.make_jaxpr(jax.vmap(SAMPLERS[name]))(keys)
  ours, count = spell_out(closed, "auto", "cpu")
  assert count or name == "gamma", "that one draws inside a primitive of its own"
  for a, b in zip(evaluate(ours, keys), evaluate(closed, keys), strict=True):
    np.testing.assert_array_equal(a, b)


def test_raw_hashes_and_nested_programs():
  def step(key, _):
    key, sub = jax.random.split(key)
    return key, lax.cond(jax.random.bits(sub)[()] % 2 == 0, lambda: jax.random.uniform(sub, (3,)), lambda: jnp.ones(3))

  fun, count = spelled(lambda key: lax.scan(step, key, None, length=5), jax.random.PRNGKey(0))
  assert count >= 3
  ours, theirs = jax.jit(fun)(jax.random.PRNGKey(0)), lax.scan(step, jax.random.PRNGKey(0), None, length=5)
  for a, b in zip(ours, jax.tree.leaves(theirs), strict=True):
    np.testing.assert_array_equal(a, b)


def test_more_than_32_bits_of_counts():
  closed = jax.make_jaxpr(lambda k: jax.random.bits(k, (1 << 17, 1 << 16)))(jax.random.key(0))
  ours, count = spell_out(closed, "auto", "cpu")
  assert count == 1 and ours.out_avals == closed.out_avals
  assert "iota_2x32_shape" in set(primitives(ours)), "counts of 64 bits are left to JAX"


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_generators_are_left_alone(impl):
  key = jax.random.key(0, impl=impl)
  closed = jax.make_jaxpr(lambda k: jax.random.normal(jax.random.split(k)[0], (3,)))(key)
  assert spell_out(closed, "auto", "cpu") == (closed, 0)
  assert spell_out(closed, "rbg", "cpu") == (closed, 0)


def test_where_and_what_is_rewritten():
  closed = jax.make_jaxpr(lambda k: jax.random.bits(k, (3,)))(jax.random.key(0))
  assert spell_out(closed, "keep", "cpu") == (closed, 0)
  assert spell_out(closed, "auto", "gpu") == (closed, 0), "where JAX has a kernel of its own"
  assert spell_out(closed, "auto", None) == (closed, 0)
  assert spell_out(closed, "rbg", "gpu")[1] == 1


def test_a_derivation_keeps_its_fence_in_the_lowered_program():
  closed, _ = spell_out(jax.make_jaxpr(jax.random.split)(jax.random.key(0)), "auto", "cpu", fenced=False)
  keys = lambda key: jax.random.key_data(*jax.core.eval_jaxpr(closed.jaxpr, closed.consts, key))
  text = jax.jit(keys).lower(jax.random.key(0)).as_text()
  assert text.count('inlineable = "false"') + text.count("stablehlo.optimization_barrier") == 1


def test_rbg_draws_another_stream():
  def draw(key):
    return jax.random.uniform(key, (20_000,)), jax.random.uniform(jax.random.split(key)[0], (20_000,))

  key = jax.random.key(0)
  a, b = roll_jit(draw, roll=RollOptions(random_bits="rbg"))(key)
  again, _ = roll_jit(draw, roll=RollOptions(random_bits="rbg"))(key)
  np.testing.assert_array_equal(a, again)
  assert abs(float(a.mean()) - 0.5) < 0.02 and abs(float(np.corrcoef(a, b)[0, 1])) < 0.05
  assert (np.asarray(a) != np.asarray(draw(key)[0])).mean() > 0.99


def test_the_report_counts_generators():
  fun = lambda key: jax.random.normal(key, (3,)) + jax.random.uniform(jax.random.fold_in(key, 1), (3,))
  report = explain(fun)(jax.random.key(0))
  assert report.draws == 3 and not report.rolls
  assert "3 generators" in str(report)
  assert explain(fun, RollOptions(random_bits="keep"))(jax.random.key(0)).draws == 0


def test_gradients_and_batches_of_a_program_with_draws():
  def fun(x, key):
    for k in jax.random.split(key, 3):
      x = jnp.where(jax.random.bernoulli(k, 0.5, x.shape), jnp.sin(x), x)
    return x

  check_roll(fun, jnp.linspace(0, 1, 6), jax.random.key(0), options=RollOptions(strict=True))
