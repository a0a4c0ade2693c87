"""Which strategy the cost model takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, explain, roll_jaxpr, roll_jit
from jaxroll.testing import check_roll
from programs import chain, dropout_chain, loss, stacked_loss, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def strategies(fun, *args, **options):
  return [r.strategy for r in explain(fun, RollOptions(**options))(*args).rolls if r.depth == 0]


def recurrent(w, xs):
  h = jnp.zeros(4)
  for t in range(24):
    h = jnp.tanh(h @ w + xs[:, t])
  return h


def test_time_steps_over_shared_weights_are_scanned():
  assert strategies(recurrent, np.eye(4, dtype=np.float32), np.ones((4, 24), np.float32)) == ["scan"]


def test_backward_steps_whose_products_read_what_fuses_through_all_of_them_are_fenced():
  def lstm(steps, gated):
    def loss(w, xs):
      h = c = jnp.zeros((4, 16))
      for t in range(steps):
        i, f, o, u = jnp.split(jnp.concatenate([xs[t], h], -1) @ w, 4, -1)
        c = (jax.nn.sigmoid(f) * c if gated else 0) + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
      return h.sum()
    return jax.grad(loss), np.ones((24, 64), np.float32), np.ones((steps, 4, 8), np.float32)
  assert strategies(*lstm(24, True)) == ["inline", "fence"]
  assert strategies(*lstm(10, True)) == ["inline", "inline"], "few steps compile quickly"
  assert strategies(*lstm(24, False)) == ["inline", "inline"], "nothing fuses from step to step"


def test_an_array_updated_in_place_is_not_written_anew():
  def f(cache, ws, x):
    for k, w in enumerate(ws):
      x = jnp.tanh(x @ w)
      cache = lax.dynamic_update_slice(cache, x[None] + 1, (k, 0))
    return cache, x
  assert strategies(f, np.zeros((1 << 20, 8), np.float32), weights(16, 8, 8), np.ones(8, np.float32)) == ["inline"]


def test_a_residual_stream_is_cheap_to_make_anew():
  def f(ws, x):
    for w in ws:
      h = x @ w
      for k in range(8):
        h = jnp.tanh(h) * k + jnp.sin(h)
      x = x + h
    return x
  assert strategies(f, weights(12, 128, 128), np.ones((4, 128), np.float32)) == ["inline"]


def test_loops_that_read_one_anothers_results_are_weighed_together():
  stacked = {k: np.ones((24, 64, 64), np.float32) for k in "ab"}
  assert strategies(jax.grad(stacked_loss), stacked, np.ones((8, 64), np.float32)) == ["scan", "scan"]


def test_layers_with_weights_of_their_own_are_fenced():
  ws = weights(24, 256, 256)
  x = np.ones((64, 256), np.float32)
  report = explain(jax.grad(loss, argnums=(0, 1)), RollOptions())(ws, x)
  assert [r.strategy for r in report.rolls] == ["fence", "fence"]
  assert "would copy" in report.rolls[0].reason and sum(report.rolls[0].copied_bytes) == 0


def test_elementwise_bodies_are_inlined():
  def f(x):
    for i in range(40):
      x = jnp.sin(x) * (i + 1) + x.reshape(-1).reshape(x.shape)
    return x
  assert strategies(f, X) == ["inline"]
  assert strategies(f, X, optimize_for="compile") == ["scan"]


@pytest.mark.parametrize("move", [lambda x: jnp.roll(x, 1, 0), lambda x: x.T.reshape(x.shape), lambda x: x[::-1],
                                  lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1]])
def test_steps_that_read_what_they_carry_at_several_places_are_scanned(move):
  def steps(count, x, moved=True):
    other = x
    for i in range(count):
      x = jnp.sin(x) * 0.5 + move(x if moved else other) * 0.25 + jnp.cos(x * 0.1) + jnp.tanh(x + 0.3) * 0.1
    return x
  assert strategies(lambda x: steps(20, x), X) == ["scan"]
  assert "a step" not in explain(lambda x: steps(20, x))(X).rolls[0].reason, "unrolled, it would be computed twice again"
  assert strategies(lambda x: steps(7, x), X) == ["inline"], "few steps fuse well"
  assert strategies(lambda x: steps(20, x, moved=False), X) == ["inline"], "what is not carried is not computed anew"


def controlled(u, x):
  """A gradient by `u` reduces what each step made."""
  for t in range(len(u)):
    x = x + 0.01 * (jnp.sin(x) * u[t] - x)
  return (x ** 2).sum()


def test_steps_that_kernels_elsewhere_read_are_not_fused():
  u = np.linspace(-1, 1, 60, dtype=np.float32)
  assert strategies(jax.grad(controlled), u, X) == ["scan", "scan"]
  assert "a step" not in str(explain(jax.grad(controlled))(u, X)), "unrolled, reductions would make the steps before anew"
  assert strategies(jax.grad(controlled, argnums=1), u, X) == ["inline", "inline"], "nothing but the last step is reduced"
  assert strategies(controlled, u, X) == ["inline"]
  assert set(strategies(jax.grad(controlled), u[:6], X)) <= {"inline"}, "few steps fuse well"


def test_steps_that_their_own_reductions_read_are_not_fused():
  def fit(k, x):
    for _ in range(39):
      x = x + 0.05 * (jnp.tanh(x) * k - k * x)
    return (x ** 2).sum()
  assert set(strategies(jax.grad(fit), np.float32(0.3), X)) <= {"scan", "fence"}


def test_a_normalization_of_what_it_leads_to_keeps_steps_from_being_made_anew():
  def normalized(ws, x):
    for w in ws:
      x = x + jnp.tanh(x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) @ w)
    return x
  assert strategies(normalized, weights(24, 32, 32), np.ones((4, 32), np.float32)) == ["inline"]
  assert strategies(normalized, weights(80, 32, 32), np.ones((4, 32), np.float32)) == ["inline"], "many, but quick"
  assert strategies(normalized, weights(80, 128, 128), np.ones((4, 128), np.float32)) == ["fence"], "many, and not so quick"
  def cell(p, xs):
    h = c = jnp.zeros((4, 32))
    for x in xs:
      i, f, o, g = jnp.split(jnp.concatenate([x, h], -1) @ p[0] + p[1], 4, -1)
      c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
      h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h.sum()
  found = strategies(jax.grad(cell), (weights(1, 64, 128)[0], np.zeros(128, np.float32)), weights(12, 4, 32))
  assert found == ["inline", "fence"], "the gradient of the bias leads to no step"


def test_small_and_quick_bodies_are_not_fenced():
  assert strategies(chain, weights(24, 16, 16), np.ones((4, 16), np.float32)) == ["inline"]
  assert strategies(chain, weights(24, 256, 256), np.ones((64, 256), np.float32)) == ["fence"]


def test_few_equations_are_left_alone():
  ws = weights(6, 4, 4)
  report = explain(chain, RollOptions())(ws, X)
  assert not report.rolls and "saves only 20 equations" in report.refusals[0].reason


def test_max_copy_bytes_bounds_what_a_scan_copies():
  ws = weights(24, 4, 4)
  x = np.ones((20_000, 4), np.float32)  # so that the weights are small beside what is computed
  def deep(ws, x):
    for w in ws:
      x = jnp.tanh(jnp.sin(x @ w) + jnp.cos(x @ w.T)) + x
    return x
  assert strategies(deep, ws, x) == ["scan"]
  assert strategies(deep, ws, x, max_copy_bytes=24 * 64) == ["scan"]
  assert strategies(deep, ws, x, max_copy_bytes=24 * 64 - 1) == ["fence"]
  assert strategies(deep, ws, x, optimize_for="run") == ["fence"]


def convolve(ws, x):
  for w in ws:
    x = jnp.tanh(lax.conv(x, w, (1, 1), "SAME")).sum(0, keepdims=True) + x
  return x


def test_convolutions_of_gradients_and_of_layers_stay_outside_loops_on_cpu():
  x, shared, own = np.ones((1, 4, 128, 128), np.float32), np.ones((4, 4, 3, 3), np.float32), weights(24, 4, 4, 3, 3)
  assert strategies(lambda w, x: convolve([w] * 24, x), shared, x) == ["scan"], "reads and writes nothing but what it carries"
  assert strategies(convolve, own, x) == ["fence"]
  for argument in (0, 1):
    gradient = jax.grad(lambda w, x: convolve([w] * 24, x).sum(), argument)
    assert set(strategies(gradient, shared, x)) == {"fence"}


def test_sums_of_what_convolutions_make_are_not_fenced():
  gradient = jax.grad(lambda w, x: convolve([w] * 24, x).sum())
  w, x = np.ones((4, 4, 3, 3), np.float32), np.ones((1, 4, 64, 64), np.float32)
  def fenced(options):
    rolled, _ = roll_jaxpr(jax.make_jaxpr(gradient)(w, x), options, platform="cpu")
    is_fence = lambda e: e.params.get("name") == "fence" or e.primitive.name == "optimization_barrier"
    return [v.aval.shape for e in rolled.jaxpr.eqns if is_fence(e) for v in e.outvars]
  assert x.shape in fenced(RollOptions(strict=True)) and w.shape not in fenced(RollOptions(strict=True))
  assert w.shape in fenced(RollOptions(strategy="fence", strict=True)), "as asked: each iteration by itself"


def test_random_bits_of_a_fenced_roll_are_drawn_together():
  ws, x, key = weights(24, 256, 256), np.ones((64, 256), np.float32), jax.random.key(0)
  gradient = jax.grad(lambda ws, x, key: (dropout_chain(ws, x, key) ** 2).sum(), argnums=(0, 1))
  found = strategies(gradient, ws, x, key)
  assert found[0] == "batch" and set(found[1:]) == {"fence"}
  out, expected = (jit(gradient)(ws, x, key) for jit in (roll_jit, jax.jit))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out, expected)


def test_a_fence_copies_no_weights():
  ws, x = weights(24, 256, 256), np.ones((64, 256), np.float32)
  temp = [jit(jax.grad(loss)).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
          for jit in (jax.jit, roll_jit, lambda f: roll_jit(f, roll=RollOptions(strategy="scan")))]
  stacked = 24 * ws[0].nbytes
  assert temp[1] < temp[0] + stacked / 4 and temp[2] > temp[1] + stacked / 2


def test_rows_of_xs_that_much_is_made_from_are_copied_on_cpu():
  def f(ws, bs, small, x):
    for w, b, s in zip(ws, bs, small):
      x = jnp.tanh(x @ w + b) + jnp.pad(jax.nn.relu(s), (0, 31)).sum()
    return x
  args = weights(12, 32, 32), weights(12, 32), weights(12, 1), np.ones((128, 32), np.float32)
  def copied(platform):
    rolled, _ = roll_jaxpr(jax.make_jaxpr(f)(*args), RollOptions(strategy="scan", strict=True), platform=platform)
    scan, = [e for e in rolled.jaxpr.eqns if e.primitive.name == "scan"]
    is_fence = lambda e: e.params.get("name") == "fence" or e.primitive.name == "optimization_barrier"
    return [v.aval.shape for e in scan.params["jaxpr"].jaxpr.eqns if is_fence(e) for v in e.outvars]
  assert copied("cpu") == [(32,)], "the bias, and neither what a product alone reads nor what few elements are made from"
  assert copied("gpu") == []
  check_roll(f, *args, options=RollOptions(strategy="scan", strict=True))


def test_iterations_share_a_step_after_which_lagged_carries_lie_where_they_lay():
  def f(ws, x, lag):
    seen = [x] * lag
    for w in ws:
      y = jnp.concatenate(seen[-lag:], -1)
      seen.append(jax.nn.silu((y - y.mean(-1, keepdims=True)) @ w[: y.shape[-1]]))
    return seen[-1]
  x, w = np.ones((128, 16), np.float32), weights(1, 9 * 16, 16)[0]
  def unrolled(lag, trips, options=RollOptions(strict=True)):
    fun = lambda w, x: f([w] * trips, x, lag)
    rolled, _ = roll_jaxpr(jax.make_jaxpr(fun)(w, x), options, platform="cpu")
    return [e.params["unroll"] for e in rolled.jaxpr.eqns if e.primitive.name == "scan"]
  assert unrolled(1, 24) == [1] and unrolled(2, 24) == [2] and unrolled(4, 24) == [4]
  assert unrolled(9, 40) == [1], "too many equations for what it gains"
  assert unrolled(4, 24, RollOptions(optimize_for="compile", strict=True)) == [1]
  check_roll(lambda w, x: f([w] * 11, x, 3), w, x, grad=True)
