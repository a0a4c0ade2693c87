import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll.work import draws_random_bits, jaxpr_work


def work(fun, *args):
  return jaxpr_work(jax.make_jaxpr(fun)(*args))


X = np.ones((4, 8), np.float32)


def test_products_count_two_operations_per_multiplication():
  assert work(lambda x: x @ x.T, X).flops >= 2 * 4 * 4 * 8
  batched = work(lambda x: jnp.einsum("bij,bjk->bik", x, x.swapaxes(1, 2)), np.ones((3, 4, 8), np.float32))
  assert batched.flops >= 2 * 3 * 4 * 4 * 8


def test_convolutions():
  conv = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
  found = work(conv, np.ones((2, 5, 5, 4), np.float32), np.ones((3, 3, 4, 6), np.float32))
  assert found.flops == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 4) and found.convolutions == 1
  grouped = lambda x, k: lax.conv_general_dilated(
      x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4)
  found = work(grouped, np.ones((2, 5, 5, 4), np.float32), np.ones((3, 3, 1, 4), np.float32))
  assert found.flops == 2 * (2 * 5 * 5 * 4) * (3 * 3)


def test_nested_jaxprs_count_and_a_scan_counts_its_iterations():
  once = work(lambda x: jnp.sin(x @ x.T), X)
  assert work(jax.jit(lambda x: jnp.sin(x @ x.T)), X) == once
  looped = work(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=7)[0], X)
  assert looped.flops == 7 * X.size


def test_updates_in_place_write_what_they_update():
  big, row = np.ones((1000, 8), np.float32), np.ones((1, 8), np.float32)
  for update in (lambda a, r: lax.dynamic_update_slice(a, r, (3, 0)), lambda a, r: a.at[jnp.arange(1)].set(r),
                 lambda a, r: a.at[jnp.arange(1)].add(r), lambda a, r: a.at[jnp.arange(1)].max(r)):
    assert 32 <= work(update, big, row).bytes < 200


def test_what_ends_a_fusion():
  assert work(lambda x: jnp.tanh(x) * 2 + x.T.reshape(4, 8), X).kernels == 0
  assert work(lambda x: x.sum() + x.max(), X).kernels == 2


def test_random_bits_are_found_however_deep():
  def eqns(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns
  assert any(map(draws_random_bits, eqns(lambda k: jax.random.normal(k, (3,)), jax.random.key(0))))
  assert not any(map(draws_random_bits, eqns(jnp.sin, X)))
