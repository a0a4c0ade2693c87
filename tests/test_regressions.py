"""Programs that an earlier version of the pass got wrong, one a test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, explain, roll, roll_jaxpr, roll_jit
from jaxroll.fingerprint import Fingerprinter
from jaxroll.testing import check_roll
from jaxroll.testing.oracle import evaluate

STRATEGIES = ("scan", "fence", "call", "inline", "auto")


def forced(strategy):
  return RollOptions(strategy=strategy, min_body_eqns=1, strict=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slice_that_one_loop_takes_and_another_reads_as_an_equal_value(strategy):
  def f(ws, x, y, d):
    for i in range(24):
      x = (jnp.sin(x) * lax.slice(ws, (i, 0), (i + 1, 4))) * d
    y = y * 2
    for _ in range(24):  # the first loop's slice of its third iteration
      y = jnp.sin(y) * lax.slice(ws, (2, 0), (3, 4)) + y.max()
    return x, y
  args = np.arange(96, dtype=np.float32).reshape(24, 4) / 10, *(np.ones(s, np.float32) for s in ((24, 4), (1, 4), (24, 4)))
  check_roll(f, *args, options=forced(strategy), grad=False, vmap=False)


def test_closing_over_a_reference():
  counter = jax.new_ref(jnp.zeros(3))
  @roll_jit
  def f(x):
    counter[...] += x
    return x * 2
  f(jnp.ones(3)), f(jnp.ones(3))
  np.testing.assert_array_equal(counter[...], 2 * np.ones(3))


def by_attribute(scale):
  def bwd(res, g):
    return (g * bwd.scale,)
  bwd.scale = scale
  return bwd


def by_cell_named_like_jaxs_own(cells):
  def memoized(res, g):
    return (g * cells,)
  return memoized


@pytest.mark.parametrize("make_rule", [by_attribute, by_cell_named_like_jaxs_own])
def test_rules_that_differ_in_what_is_easily_overlooked(make_rule):
  def layer(scale):
    f = jax.custom_vjp(lambda x: jnp.tanh(jnp.cumsum(x)))
    f.defvjp(lambda x: (jnp.tanh(jnp.cumsum(x)), ()), make_rule(scale))
    return f
  layers = [layer(1 + 0.1 * i) for i in range(12)]
  def model(x):
    for f in layers:
      x = jnp.sin(f(x)) * jnp.cumsum(x) - x
    return x.sum()
  x = np.ones(3, np.float32) * 0.1
  for strategy in STRATEGIES:
    rolled, plain = (jax.make_jaxpr(jax.grad(f))(x) for f in (roll(model, forced(strategy)), model))
    np.testing.assert_array_equal(evaluate(rolled, x), evaluate(plain, x))


def test_one_iterations_value_does_not_make_a_scan_keep_all():
  def f(w, x):
    for t in range(100):
      x = jnp.tanh(x @ w) * 0.5 + x
      if t == 50:
        middle = x
    return x, middle
  w, x = np.ones((16, 16), np.float32) * 0.01, np.ones((2000, 16), np.float32)
  memory = [jit(f).lower(w, x).compile().memory_analysis().temp_size_in_bytes for jit in (jax.jit, roll_jit)]
  assert memory[1] <= 2 * memory[0]
  assert any("nothing reads" in r.reason for r in explain(f)(w, x).rolls)


@pytest.mark.parametrize("aim", ["balanced", "run"])
def test_draws_that_depend_on_the_layers_do_not_drag_the_layers_into_a_scan(aim):
  def f(ws, x, key):
    ys = []
    for w in ws:
      x = jnp.tanh(x @ w)
      k = jax.random.fold_in(key, lax.bitcast_convert_type(x[0, 0], jnp.int32))
      x = x + jax.random.uniform(k, x.shape) * 0.1
      ys.append(jnp.cumsum(x.sum(0) * 2.))
    return x, ys
  args = [np.ones((64, 64), np.float32) * 0.001] * 24, np.ones((1, 64), np.float32), jax.random.PRNGKey(0)
  assert all(r.strategy != "scan" for r in explain(f, RollOptions(optimize_for=aim))(*args).rolls)


def test_jaxprs_that_cannot_be_compared_are_walked_once(monkeypatch):
  @jax.jit
  def inner(x):
    for _ in range(50):
      x = jnp.sin(x)
    jax.debug.callback(lambda: None)
    return x
  def f(x):
    for _ in range(50):
      x = inner(x)
    return x
  walked = []
  original = Fingerprinter._jaxpr_key
  def counted(self, *args):
    walked.append(args)
    return original(self, *args)
  monkeypatch.setattr(Fingerprinter, "_jaxpr_key", counted)
  roll_jaxpr(jax.make_jaxpr(f)(1.))
  assert len(walked) <= 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hoisted_equation_equal_to_a_carried_invariant(strategy):
  def f(x, p, c):
    for _ in range(20):
      a = jnp.sin(c)
      x = x * p + jnp.sin(c) * jnp.cumsum(x)
      p = a
    return x
  check_roll(f, *(np.ones(3, np.float32) * v for v in (0.1, 0.2, 0.3)), options=forced(strategy), compiled=False)


def test_slices_with_symbolic_starts():
  def f(x, w):
    y = lax.slice_in_dim(x, x.shape[0] - 1, x.shape[0])
    for _ in range(6):
      y = jnp.tanh(y @ w)
    return y
  a, = jax.export.symbolic_shape("a")
  shapes = jax.ShapeDtypeStruct((a + 7, 4), np.float32), jax.ShapeDtypeStruct((4, 4), np.float32)
  jax.export.export(roll_jit(f, roll=forced("scan")))(*shapes)


def padded(x):
  total = 0
  for i in range(4):
    total = total + jnp.sin(jnp.pad(x, ((i, 4 - i), (0, 0))))
  return total


def scanned(x):
  for i in range(6):
    c, ys = jax.lax.scan(lambda c, t: (jnp.tanh(c @ jnp.ones((4, 4))) + t * i, c * t), x[0], x)
    x = jnp.cumsum(ys, 0) + c
  return x


@pytest.mark.parametrize("strategy", ["auto", "scan", "fence"])
@pytest.mark.parametrize("f", [padded, scanned])
def test_symbolic_sizes_are_never_compared(f, strategy):
  scope = jax.export.SymbolicScope(["b>=4"])
  shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4", scope=scope), np.float32)
  exported = jax.export.export(roll_jit(f, roll=forced(strategy)))(shape)
  x = np.linspace(0.1, 1, 24, dtype=np.float32).reshape(6, 4)
  np.testing.assert_allclose(exported.call(x), jax.jit(f)(x), rtol=1e-4)


def test_64_bits_within_the_function():
  def f(x):
    with jax.enable_x64(True):
      y = x.astype(jnp.float64)
      for i in range(6):
        y = jnp.sin(y) * 2.5 + jnp.cos(y) * (i + 1.1)
      return y.astype(jnp.float32)
  x = np.linspace(0, 1, 5, dtype=np.float32)
  np.testing.assert_array_equal(roll_jit(f, roll=forced("scan"))(x), jax.jit(f)(x))


def test_transformations_without_rules_for_loops_get_the_original():
  from jax.experimental import jet
  def f(x):
    for _ in range(6):
      x = jnp.sin(x) * 2
    return x
  for strategy in ("scan", "fence"):
    rolled = jax.jit(lambda x: jet.jet(roll(f, forced(strategy)), (x,), ((1., 0.),)))
    expected = jax.jit(lambda x: jet.jet(f, (x,), ((1., 0.),)))
    np.testing.assert_allclose(rolled(0.3)[0], expected(0.3)[0], rtol=1e-6)
