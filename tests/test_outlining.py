"""Equal subgraphs with other code between them become calls of one function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, explain, order, roll_jit
from jaxroll.pipeline import roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

BETWEEN = [jnp.tanh, jnp.sin, jax.nn.relu, lambda x: x[::-1], lambda x: jnp.cumsum(x, 0), lambda x: jnp.sort(x, -1)]
APART = "other code stands between"
AUTO = RollOptions(strict=True)
VALUES = dict(options=AUTO, grad=False, vmap=False, compiled=False)


def block(w, x, scale=1.0):
  """Some 50 equations, in which nothing repeats."""
  y = jnp.tanh((x - x.mean(-1, keepdims=True)) @ w) * scale
  y = jnp.exp(-y * y) @ w + jnp.cos(y).sum(0) * jnp.log1p(jnp.abs(x))
  z = jnp.where(y > 0.1, jax.nn.softmax(y @ w.T, -1), jnp.minimum(y, x) - jnp.arctan(x))
  z = z / (1 + jnp.sqrt(jnp.square(z).sum(-1, keepdims=True))) + jnp.maximum(x.max(0), z) * scale
  z = jax.nn.sigmoid(z - jnp.expm1(-jnp.abs(y))) @ (w * 0.5) + jnp.sign(z) * jnp.floor(x * 3)
  return x + z - jnp.roll(y, 1, 0) * jnp.clip(z, -0.5, 0.5)


def blocks(ws, x):
  for w, f in zip(ws, BETWEEN):
    x = f(block(w, x))
  return x


def args(n=len(BETWEEN)):
  return weights(n, 4, 4), np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def apart(report):
  """Trip counts of what stands apart."""
  return [r.trip_count for r in report.rolls if r.reason == APART]


def test_forward_and_gradient():
  report = check_roll(blocks, *args(), options=AUTO)
  assert apart(report) == [6]
  gradient = explain(jax.grad(lambda *a: (blocks(*a) ** 2).sum()), AUTO)(*args())
  assert len(apart(gradient)) >= 2 and min(apart(gradient)) >= 5  # the first block has no gradient to hand on
  assert gradient.eqns_after < 0.4 * gradient.eqns_before


def test_blocks_are_outlined_though_the_search_for_what_can_be_together_was_cut_off(monkeypatch):
  monkeypatch.setattr(order, "effort", lambda program: 1)
  report = check_roll(blocks, *args(), options=AUTO)
  assert apart(report) == [6]
  assert any("bound on work" in refusal.reason for refusal in report.refusals)


def test_gradient_of_a_linear_loss():
  """The last block's forward and backward are one piece, those of the others are two."""
  gradient = explain(jax.grad(lambda *a: blocks(*a).sum()), AUTO)(*args())
  assert min(apart(gradient), default=0) >= 5
  check_roll(jax.grad(lambda *a: blocks(*a).sum()), *args(), **VALUES)


def test_residuals_that_xla_may_make_anew_are_not_fenced():
  """Backward blocks read what the forward pass made between its blocks; only the cotangent stands between them."""
  rolled, report = roll_jaxpr(jax.make_jaxpr(jax.grad(lambda *a: (blocks(*a) ** 2).sum()))(*args()), AUTO)
  assert len(apart(report)) >= 2
  calls = [e.params["jaxpr"].jaxpr for e in rolled.jaxpr.eqns if e.primitive.name == "jit" and e.params["name"] == "fence_body"]
  backward = calls[-1]
  fences = [e for e in backward.eqns if e.params.get("name") in ("fence", "_identity") or e.primitive.name == "optimization_barrier"]
  fenced = [v for e in fences for v in e.invars if v in backward.invars]
  assert len(fenced) == 1 and len(backward.invars) > 2


@pytest.mark.parametrize("strategy", ["fence", "call"])
def test_a_strategy_that_was_asked_for(strategy):
  report = check_roll(blocks, *args(), options=RollOptions(strategy=strategy, strict=True), vmap=False)
  assert {r.strategy for r in report.rolls} == {strategy}
  assert any(n == 6 for n in apart(report))


def test_blocks_that_differ_in_a_literal():
  def fun(ws, x):
    for k, (w, f) in enumerate(zip(ws, BETWEEN)):
      x = f(block(w, x, scale=1 + k / 8))
    return x

  assert apart(check_roll(fun, *args(), **VALUES)) == [6]


def test_one_block_that_differs():
  def fun(ws, x):
    for k, (w, f) in enumerate(zip(ws, BETWEEN)):
      x = f(block(w, x) if k != 3 else jnp.cos(x @ w))
    return x

  assert apart(check_roll(fun, *args(), **VALUES)) == [5]


def test_shared_weights_and_results_that_are_all_read():
  def fun(w, x):
    seen = []
    for f in BETWEEN:
      x = f(block(w, x))
      seen.append(x)
    return seen, x

  ws, x = args()
  assert apart(check_roll(fun, ws[0], x, **VALUES)) == [6]


def test_a_block_reads_its_own_slice():
  def fun(stacked, x):
    for k, f in enumerate(BETWEEN):
      x = f(block(stacked[k], x))
    return x

  ws, x = args()
  assert apart(check_roll(fun, jnp.stack(ws), x, **VALUES)) == [6]


def test_random_bits_within_blocks():
  def fun(ws, x, key):
    for k, (w, f) in enumerate(zip(ws, BETWEEN)):
      keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.5, x.shape)
      x = f(jnp.where(keep, block(w, x), 0.0))
    return x

  assert apart(check_roll(fun, *args(), jax.random.key(0), **VALUES)) == [6]


def test_within_a_loop_of_the_user():
  def fun(ws, x):
    return jax.lax.scan(lambda x, _: (blocks(ws, x), x.sum()), x, None, length=2)

  report = check_roll(fun, *args(), **VALUES)
  assert [(r.trip_count, r.depth) for r in report.rolls if r.reason == APART] == [(6, 1)]


def test_effects_between_keep_their_order(capfd):
  def fun(ws, x):
    for k, (w, f) in enumerate(zip(ws, BETWEEN)):
      x = f(block(w, x))
      jax.debug.print(f"after {k}", ordered=True)
    return x

  with_report = explain(fun, AUTO)(*args())
  assert apart(with_report) == [6]
  jax.block_until_ready(roll_jit(fun, roll=AUTO)(*args()))
  jax.effects_barrier()
  assert capfd.readouterr().out.split("\n")[:-1] == [f"after {k}" for k in range(6)]


def test_a_path_between_members_that_makes_a_cycle():
  """Halves of a block that exchange values with the next one's half: contraction of both would make a cycle."""
  def fun(ws, x):
    y = x
    for w, f in zip(ws, BETWEEN):
      a, b = block(w, x), block(w, y)
      x, y = f(a) + jnp.sin(b), f(b) * jnp.cos(a)
    return x, y

  report = check_roll(fun, *args(), **VALUES)
  assert report.rolls


def test_weak_types():
  def fun(ws, x):
    scale = 1.0
    for w, f in zip(ws, BETWEEN):
      x = f(block(w, x, scale))
      scale = jnp.asarray(scale) * 0.5  # weakly typed, and from outside
    return x

  assert apart(check_roll(fun, *args(), **VALUES)) == [6]


def test_other_strategies_leave_them():
  assert not apart(explain(blocks, RollOptions(strategy="scan"))(*args()))


def test_what_fuses_with_its_neighbours_is_left_alone():
  def elementwise(x):
    for k, f in enumerate([jnp.sin, jnp.tanh, jnp.cos, jnp.arctan, jnp.abs, jnp.square, jnp.floor, jnp.sign]):
      odd = f(x * (k + 0.5)) - jnp.exp(-jnp.abs(x)) * x
      x = odd if k % 2 else jnp.where(x > k, f(x), jnp.maximum(x, k) / (1 + x * x))
    return x

  def fun(x):
    for f in BETWEEN:
      x = f(elementwise(x))
    return x

  x = args()[1]
  assert not apart(explain(fun, AUTO)(x))
  assert apart(explain(fun, RollOptions(strategy="fence", strict=True))(x))
