"""What is rolled and how: one behaviour a test, each through the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, roll_jaxpr
from jaxroll.testing import check_roll
from programs import chain, dropout_chain, loss, stacked_loss, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)
STRATEGIES = ("scan", "fence", "call", "inline")


def forced(strategy="scan", **options):
  return RollOptions(strategy=strategy, min_body_eqns=1, strict=True, **options)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chain(strategy):
  report = check_roll(chain, WS, X, rolls=[(6, 4)], options=forced(strategy))
  roll, = report.rolls
  assert roll.strategy == strategy and (roll.carries, roll.consts, roll.xs, roll.ys) == (1, 0, 1, 0 if strategy == "scan" else 1)
  assert roll.location.startswith("programs.py")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradient_feeds_the_backward_loop_from_the_forward_one(strategy):
  closed = jax.make_jaxpr(jax.grad(loss))(WS, X)
  _, report = roll_jaxpr(closed, forced(strategy))
  forward, backward = report.rolls
  assert (forward.trip_count, backward.trip_count) == (6, 5)  # the first layer has no cotangent to pass on
  if strategy == "scan":
    assert backward.reverse and not forward.reverse
    assert set(backward.feeds) == {"indexed ys", "stack"}
  check_roll(jax.grad(loss), WS, X, rolls=[6, 5], options=forced(strategy))


def test_residuals_go_from_loop_to_loop_as_they_are():
  closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(WS, X)
  forward, backward = roll_jaxpr(closed, forced())[1].rolls
  assert backward.reverse and not forward.reverse
  # One of them is each layer's input: what the carry was when the iteration started.
  assert set(backward.feeds) == {"stack", "ys"} and forward.unstacked_bytes == 0


def test_what_a_later_iteration_starts_from_is_stacked_once():
  options = RollOptions(strategy="scan", min_body_eqns=8, strict=True)
  forward, backward = check_roll(
      jax.grad(stacked_loss), {"a": np.stack(WS), "b": -np.stack(WS)}, X, options=options, rolls=[5, 4], compiled=False).rolls
  # Each iteration's x, which the others' backward pass reads, too, is what the next one starts from.
  assert "indexed ys" in backward.feeds and forward.ys == 2 and forward.unstacked_bytes > 0


@pytest.mark.parametrize("strategy", STRATEGIES + ("auto",))
def test_dropout_keys_come_from_one_array(strategy):
  key = jax.random.key(0) if strategy in ("scan", "auto") else jax.random.PRNGKey(0)
  report = check_roll(dropout_chain, WS, X, key, options=forced(strategy), vmap=False, compiled=strategy == "scan")
  assert report.rolls[0].trip_count == 6
  if strategy == "scan":
    assert "slice" in report.rolls[0].feeds


def test_shared_weights_are_constants():
  def shared(w, x):
    for _ in range(5):
      x = jnp.tanh(x @ w)
    return x
  roll, = check_roll(shared, WS[0], X, rolls=[5]).rolls
  assert (roll.consts, roll.xs) == (1, 0)


def test_results_of_every_iteration_are_ys_and_of_the_last_a_carry():
  def f(ws, x):
    seen = []
    for w in ws:
      y = jnp.sin(x)
      x = y @ w
      seen.append(y)
    return seen, x
  roll, = check_roll(f, WS, X, rolls=[6]).rolls
  assert roll.ys == 1
  def g(ws, x):
    for w in ws:
      y = jnp.sin(x)
      x = y @ w
    return y, x
  roll, = check_roll(g, WS, X, rolls=[6]).rolls
  assert roll.ys == 0


@pytest.mark.parametrize("odd", [0, 3, 5])
def test_an_odd_iteration_is_peeled(odd):
  def f(ws, x):
    for i, w in enumerate(ws):
      x = jnp.tanh(x @ w) if i != odd else jnp.cos(x @ w) + 1
    return x
  ws = weights(12, 4, 4)
  trips = [r.trip_count for r in check_roll(f, ws, X).rolls]
  assert sum(trips) >= 8


def test_a_value_of_the_first_iteration_used_by_all():
  def f(ws, x):
    first = None
    for w in ws:
      x = jnp.tanh(x @ w)
      first = x if first is None else first
      x = x + first
    return x
  assert check_roll(f, WS, X).rolls[0].trip_count >= 5


@pytest.mark.parametrize("lag", [2, 3])
def test_lags_become_shift_registers(lag):
  def f(x):
    xs = [x + i for i in range(lag)]
    for _ in range(12):
      xs.append(jnp.sin(xs[-1]) + xs[-lag] * 0.5)
    return xs[-1], xs[-2]
  roll = check_roll(f, X).rolls[-1]
  assert roll.trip_count >= 9 and roll.carries >= lag


def test_fibonacci_shares_one_register_chain():
  def f(a, b):
    for _ in range(10):
      a, b = b, a * 0.5 + b
    return a, b
  roll = check_roll(f, X, X + 1).rolls[-1]
  assert roll.carries == 2


def test_swapped_carries():
  def f(a, b):
    for _ in range(8):
      a, b = jnp.sin(b), jnp.cos(a)
    return a, b
  check_roll(f, X, X + 1)


def test_literals_and_static_indices_become_data():
  def f(x, y):
    for i in range(6):
      x = x * (1 + 0.1 * i) + y[:, i % 4 : i % 4 + 1]
    return x
  def g(x, y):
    for i in range(4):
      x = x * (1 + 0.1 * i) + y[:, i : i + 1]
    return x
  check_roll(f, X, X)
  roll, = check_roll(g, X, X, rolls=[4]).rolls
  assert set(roll.feeds) == {"constants"}


@pytest.mark.parametrize("index", [
    lambda a, i: a[i], lambda a, i: a[::-1][i], lambda a, i: a[2 * i], lambda a, i: a[-1 - i], lambda a, i: a[i : i + 3].sum(0)])
def test_reading_one_array_by_static_index(index):
  array = np.arange(48, dtype=np.float32).reshape(12, 4)
  def f(x, a):
    for i in range(6):
      x = jnp.sin(x) + index(a, i)
    return x
  assert check_roll(f, X, array, rolls=[6]).rolls[0].trip_count == 6


def test_captured_arrays_differ_per_layer():
  constants = [np.arange(4, dtype=np.float32) + i for i in range(6)]
  def f(x):
    for c in constants:
      x = jnp.sin(x) * c
    return x
  assert check_roll(f, X).rolls[0].xs == 1


def test_invariants_are_computed_once_and_kept_once():
  def f(ws, x):
    masks = []
    for w in ws:
      mask = jnp.tril(jnp.ones((3, 4)))
      x = jnp.tanh(x @ w) * mask
      masks.append(mask)
    return x, masks
  roll, = check_roll(f, WS, X, rolls=[6]).rolls
  assert roll.ys == 0


def test_independent_iterations():
  def f(ps, gs):
    return [p - 0.1 * g / (jnp.sqrt(g * g) + 1e-3) for p, g in zip(ps, gs)]
  roll, = check_roll(f, WS, weights(6, 4, 4, seed=1), rolls=[6]).rolls
  assert roll.carries == 0


def test_a_second_loop_reads_the_first_ones_results_in_reverse():
  def f(ws, x):
    skips = []
    for w in ws:
      x = jnp.tanh(x @ w)
      skips.append(x)
    for w, s in zip(ws, reversed(skips)):
      x = jnp.cos(x @ w + s)
    return x
  down, up = check_roll(f, WS, X, rolls=[6, 6]).rolls
  assert up.reverse and up.feeds.count("ys") == 1


def test_parts_of_an_earlier_loops_results():
  def f(ws, x):
    x0, seen = x, []
    for w in ws:
      x = jnp.tanh(x @ w)
      seen.append(x)
    for s in seen[1:5]:
      x = jnp.cos(x + s)
    for s in [x0, *seen[:3]]:
      x = jnp.sin(x * s)
    for s in [seen[2], seen[1], seen[0], x0]:
      x = jnp.exp(-x * s)
    for s in [x0 + 1, *seen[:3]]:
      x = jnp.tanh(x * s)
    return x
  report = check_roll(f, WS, X)
  assert [r.trip_count for r in report.rolls] == [6, 4, 4, 4, 4]
  assert [r.feeds for r in report.rolls[1:]] == [("indexed ys",)] * 3 + [("ys part",)]


def test_nested_loops_roll_at_each_level():
  def f(x):
    for _ in range(5):
      for _ in range(4):
        x = jnp.sin(jnp.tanh(x) * 2.)
      for _ in range(3):
        x = jnp.cos(jnp.exp(-x))
    return x
  report = check_roll(f, X)
  assert {(r.depth, r.trip_count) for r in report.rolls} == {(0, 5), (1, 4), (1, 3)}


def test_within_a_jitted_function():
  inner = jax.jit(chain)
  report = check_roll(lambda ws, x: inner(ws, x) + 1, WS, X)
  assert [(r.depth, r.trip_count) for r in report.rolls] == [(1, 6)]


def test_a_layer_with_another_shape_is_no_part_of_the_roll():
  ws = [*weights(5, 4, 4), *weights(1, 4, 3), *weights(4, 3, 3)]
  def f(ws, x):
    for w in ws:
      x = jnp.tanh(x @ w)
    return x
  assert [r.trip_count for r in check_roll(f, ws, X).rolls] == [5, 4]


def test_nothing_to_roll_gives_the_same_object():
  closed = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.cos(x) * 2)(X)
  rolled, report = roll_jaxpr(closed, forced())
  assert rolled is closed and not report.rolls and report.eqns_before == report.eqns_after


def test_off_gives_the_same_object():
  closed = jax.make_jaxpr(chain)(WS, X)
  assert roll_jaxpr(closed, RollOptions(strategy="off"))[0] is closed


def test_min_trip_count_and_min_body_eqns():
  closed = jax.make_jaxpr(chain)(WS, X)
  assert roll_jaxpr(closed, RollOptions(strategy="scan", min_trip_count=7))[0] is closed
  assert roll_jaxpr(closed, RollOptions(strategy="scan", min_body_eqns=5))[0] is closed
  assert roll_jaxpr(closed, RollOptions(strategy="scan", min_trip_count=6, min_body_eqns=4))[0] is not closed


def test_rolled_control_flow_layers():
  def layer(w, x):
    y, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)
    return lax.cond(y.sum() > 0, jnp.sin, jnp.cos, y)
  def f(ws, x):
    for w in ws:
      x = layer(w, x)
    return x
  assert check_roll(f, WS, X).rolls[0].trip_count >= 5


def test_an_invariant_that_equals_a_varying_value_of_the_first_iteration():
  def f(w, *xs):
    acc = jnp.ones_like(w)
    for x in (w, *xs):  # in the first iteration sin(x) and sin(w) are the same
      acc = acc * jnp.sin(x) + jnp.sin(w)
    return acc
  args = [np.float32(i) for i in range(4)]
  for strategy in STRATEGIES:
    check_roll(f, *args, rolls=[4], options=forced(strategy), compiled=False)


def test_hoisted_equations_read_each_other_and_equal_ones_outside():
  def f(w, xs):
    out = [jnp.sin(w)]
    for x in xs:
      out.append(jnp.cos(jnp.sin(w)) * x + jnp.sin(jnp.sin(w)))
    return out
  check_roll(f, X, [X + i for i in range(5)], compiled=False)
  def g(x):
    outs = [jnp.sin(x) * 0.5 for _ in range(4)]
    for _ in range(4):
      x = jnp.sin(jnp.cos(x) * 2)
    return outs, x
  check_roll(g, X, compiled=False)


@pytest.mark.parametrize("read, is_kept", [(lambda w: w, True), (lambda w: w + 1, False), (lambda w: w @ w, False)])
def test_a_large_matrix_transposed_for_products_is_not_copied_before_the_loop(read, is_kept):
  def f(w, x):
    for _ in range(6):
      x = jnp.tanh(x @ read(w.T)) + x
    return x
  w, x = weights(1, 128, 128)[0], np.ones((2, 128), np.float32)
  closed = jax.make_jaxpr(f)(w, x)
  rolled, _ = roll_jaxpr(closed, forced())
  assert ("transpose" in str(rolled.jaxpr.eqns[-1].params["jaxpr"])) == is_kept
  assert ("transpose" in [e.primitive.name for e in rolled.jaxpr.eqns]) != is_kept
  check_roll(f, w, x, compiled=False)


def test_more_outside_values_than_results():
  def f(x, y):
    for i in range(4):
      x = x * (i + 0.5)
    return x
  check_roll(f, X[0], X[1], compiled=False)
