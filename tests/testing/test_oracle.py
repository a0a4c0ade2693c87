"""The oracle against plain JAX: control flow, calls, moves of bits, and what `bits_differ` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jaxroll.testing.oracle import bits_differ, evaluate

X = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)


def check(fun, *args):
  """The oracle gives what JAX gives operation by operation, types included."""
  leaves = jax.tree.leaves(args)
  want = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(fun(*args))]
  got = evaluate(jax.make_jaxpr(fun)(*args), *leaves)
  assert len(want) == len(got)
  for a, b in zip(want, got):
    assert a.dtype == b.dtype and a.shape == b.shape
    if jnp.issubdtype(a.dtype, jnp.inexact):
      np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=1e-5, atol=1e-6)
    else:
      assert bits_differ(a, b) is None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_scan(reverse, length):
  def fun(c, x, w):
    return lax.scan(lambda c, x: ((c[0] @ w + x, c[1] + 1), (c[0] * 2, x)), (c, 0), x, reverse=reverse)
  check(fun, jnp.ones(4), jnp.asarray(np.random.RandomState(0).randn(length, 4), jnp.float32), jnp.eye(4) * 0.5)


def test_scan_without_xs_and_with_keys():
  def fun(key):
    def step(key, _):
      key, sub = jax.random.split(key)
      return key, (sub, jax.random.normal(sub, (3,)))
    return lax.scan(step, key, length=4)
  check(fun, jax.random.key(3))
  check(lambda keys: lax.scan(lambda c, k: (c, (k, jax.random.bits(k))), 0, keys, reverse=True),
        jax.random.split(jax.random.key(1), 3))


@pytest.mark.parametrize("n", [0, 4])
def test_while(n):
  check(lambda x, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x), (0, x)), X, n)


def test_while_with_a_condition_per_batch_element():
  def fun(x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))
  check(jax.vmap(fun), X, np.array([0, 3, 1]))


def test_a_primitive_of_a_library_is_given_jax_arrays():
  first = Primitive("first_doubled")
  first.def_impl(lambda x: x.at[0].multiply(2))
  first.def_abstract_eval(lambda x: x)
  check(lambda x: first.bind(jnp.sin(x).reshape(-1)) + 1, X)


def sharded(fun):
  """`fun` by each of two devices on a half of its last argument."""
  mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
  return lambda w, x: jax.shard_map(fun, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P("i"))(w, x)


def test_shard_map():
  def fun(key, x):
    def step(c, y):
      y = lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y) + jax.random.normal(key, y.shape)
      return c + lax.psum(y, "i"), (jax.jit(jnp.tanh)(y), jax.random.split(key, 2))
    total, (ys, keys) = lax.scan(step, jnp.zeros(4), x, reverse=True)
    doubled = lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, jnp.abs(ys) + 1)
    return ys + lax.axis_index("i"), doubled + total, jax.random.key_data(keys)
  check(sharded(fun), jax.random.key(0), np.concatenate([X, -X[:, ::-1], X * 2, X]))


def test_shard_map_is_not_fused():
  """What XLA rounds differently when it compiles a whole loop comes out as it does without the `shard_map`."""
  def fun(w, x):
    return lax.scan(lambda c, y: (jnp.tanh(c @ w) + y * 0.7, c * y + 0.3), x[0], x)[1]
  x = np.random.RandomState(0).randn(32, 4).astype(np.float32)
  w = x[:4] * 0.5
  got, = evaluate(jax.make_jaxpr(sharded(fun))(w, x), w, x)
  halves = [evaluate(jax.make_jaxpr(fun)(w, half), w, half)[0] for half in (x[:16], x[16:])]
  assert bits_differ(np.concatenate(halves), got) is None


@pytest.mark.parametrize("flag", [False, True])
def test_cond(flag):
  check(lambda p, x: lax.cond(p, lambda x: (x, 1), lambda x: (x * 2, 2), x), flag, X)


@pytest.mark.parametrize("index", [-3, 0, 1, 2, 9])
def test_switch(index):
  check(lambda i, x: lax.switch(i, [lambda x: x, jnp.sin, jnp.cos], x), index, X)


def test_calls():
  check(jax.jit(lambda x: jax.jit(jnp.sin)(x) + 1), X)
  check(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), X)
  check(lambda x: (jax.nn.relu(x), jax.nn.silu(x), jax.nn.logsumexp(x)), X)
  check(lambda x: lax.map(jnp.sin, x), X)
  f = jax.custom_vjp(lambda x: x * 2)
  f.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 3,))
  check(lambda x: f(x) + 1, X)
  check(jax.grad(lambda x: f(jax.checkpoint(jnp.tanh)(x)).sum()), X)


def test_linear_solve_and_other_primitives_with_jaxprs():
  check(lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda mv, b: b / 2, symmetric=True), X)
  check(lambda x: lax.reduce(x, np.float32(1), lambda a, b: a * b, (0,)), X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "complex64", "key"])
def test_moves(dtype):
  x = jax.random.split(jax.random.key(0), (3, 4)) if dtype == "key" else jnp.asarray(X * 3).astype(dtype)
  check(lambda x: (x[1], x[:, 2], x[::-1], x[2, 1:3], x.T, x.reshape(2, 6), x[None], lax.rev(x, (0, 1))), x)
  check(lambda x: (jnp.broadcast_to(x[0], (2, 4)), jnp.concatenate([x, x[1:]]), jnp.stack([x, x], 1)), x)
  check(lambda x, i: (lax.dynamic_slice(x, (i, 2), (2, 2)), lax.dynamic_update_slice(x, x[:1, :2], (i, 9))), x, 1)
  check(lambda x, i: lax.dynamic_slice(x, (i, -1), (2, 2)), x, 7)
  check(lambda x, p: jnp.where(p, x, x[::-1]), x, X > 0)
  check(lambda x, i: lax.select_n(i, x, x[::-1], x[:, ::-1]), x, np.arange(12, dtype=np.int32).reshape(3, 4) % 3)
  check(lambda x: lax.slice(x, (0, 1), (3, 4), (2, 2)), x)
  check(lambda x: lax.split(x, (1, 3), 1), x)
  check(lambda x: jnp.unstack(x, axis=1), x)
  check(lambda x, y: lax.optimization_barrier((x, x[0], y)), x, X)


@pytest.mark.parametrize("config", [((1, 2, 0), (0, 0, 0)), ((-1, 1, 1), (2, -2, 0)), ((0, 0, 2), (-1, -1, 1))])
def test_pad(config):
  check(lambda x: lax.pad(x, np.float32(7), config), X)
  check(lambda x: lax.pad(x, np.int32(7), ((1, 1, 1),)), np.zeros(0, np.int32))


def test_zero_size_arrays_and_results_that_are_inputs_or_literals():
  check(lambda x: (x + 1, x, 3, x.sum(), x, 2.5), np.zeros((0, 4), np.float32))


def test_float0():
  grads = jax.make_jaxpr(lambda x, i: jax.vjp(lambda x, i: x * 2, x, i)[1](x))(X, 3)
  out = evaluate(grads, X, 3)
  assert out[1].dtype == jax.dtypes.float0
  assert bits_differ(out[1], np.zeros((), jax.dtypes.float0)) is None


def test_x64():
  with jax.enable_x64(True):
    check(lambda x: (x[0] * 2, lax.scan(lambda c, x: (c + x, c), 0.0, x)), np.arange(3) / 7)
    closed = jax.make_jaxpr(lambda x: x * 2 + 1)(np.arange(3) / 7)
    assert evaluate(closed, np.arange(3) / 7)[0].dtype == np.float64


def test_captured_constants():
  w = np.arange(4, dtype=np.float32)
  check(lambda x: lax.fori_loop(0, 3, lambda i, y: y * w, x) + jax.jit(lambda y: y + w)(x), X)


def test_wrong_arguments():
  closed = jax.make_jaxpr(lambda x: x + 1)(X)
  with pytest.raises(ValueError, match="takes 1 arguments and was given 2"):
    evaluate(closed, X, X)
  with pytest.raises(ValueError, match=r"argument 0 is float32\[4\], the jaxpr takes float32\[3,4\]"):
    evaluate(closed, X[0])
  with pytest.raises(ValueError, match="argument 0 is int32"):
    evaluate(closed, X.astype(np.int32))


def test_bits_differ_in_type():
  assert bits_differ(X, X) is None
  assert bits_differ(X, X[0]) == "expected type float32[3, 4], got float32[4]"
  assert bits_differ(np.int32(1), np.int16(1)) == "expected type int32[], got int16[]"
  assert "weak_type=True" in bits_differ(jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32))


def test_bits_differ_in_value():
  assert bits_differ(np.float32(0.0), np.float32(-0.0)) == (
      "expected 0.0, got -0.0 (0 ulps apart); 1 of 1 elements differ")
  assert bits_differ(np.array([1, 2, 4]), np.array([1, 3, 5])) == "at [1]: expected 2, got 3; 2 of 3 elements differ"
  assert "(2 ulps apart)" in bits_differ(np.float32(-1e-45), np.float32(1e-45))
  assert "(1 ulps apart)" in bits_differ(jnp.bfloat16(1), jnp.bfloat16(1.0078125))
  assert "(1 ulps apart)" in bits_differ(np.complex64(1j), np.complex64(1.0000001j))


def test_bits_differ_in_nans():
  a, b = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
  assert bits_differ(a, a) is None
  assert "bits 7fc00000 and 7fc00001" in bits_differ(a, b)


def test_bits_differ_in_keys():
  a = jax.random.split(jax.random.key(0), 3)
  assert bits_differ(a, a) is None
  assert bits_differ(a, a[:2]).startswith("expected type key<fry>[3], got key<fry>[2]")
  assert bits_differ(a, a.at[1].set(a[0])).startswith("at [1]: expected [")
  assert "at [2]" in bits_differ(a, jnp.stack([a[0], a[1], a[1]]))
