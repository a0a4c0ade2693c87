"""`check_roll` passes what is right and says what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, RollReport
from jaxroll.testing import RollMismatch, check_roll
from jaxroll.testing import check as check_module
from jaxroll.testing.check import far_apart

RANDOM = np.random.RandomState(0)
WS = [np.float32(RANDOM.randn(4, 4) * 0.5) for _ in range(5)]
X = np.float32(RANDOM.randn(3, 4))


def layers(ws, x):
  outs = []
  for w in ws:
    x = jnp.tanh(x @ w) + x * 0.5
    outs.append(x)
  return {"x": x, "outs": jnp.stack(outs)}


def wrong_pass(change):
  """A pass that gives the jaxpr of a changed function."""
  def roll_jaxpr(closed, options):
    def changed(*args):
      return change(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))
    return jax.make_jaxpr(changed)(*closed.in_avals), RollReport()
  return roll_jaxpr


def test_everything_about_a_chain():
  report = check_roll(layers, WS, X, rolls=[(5, 4)])
  assert [r.trip_count for r in report.rolls if r.depth == 0] == [5]


def test_without_compiling():
  assert check_roll(layers, WS, X, rolls=1, compiled=False).rolls


def test_keyword_and_static_arguments():
  def fun(x, *, steps, mode):
    for _ in range(steps.n):
      x = jnp.sin(x) if mode == "sin" else jnp.cos(x)
    return x

  class Steps:
    n = 6
  check_roll(fun, X, steps=Steps(), mode="sin", rolls=[6])


def test_integers_keys_and_no_gradient():
  def fun(key, n):
    outs = []
    for _ in range(5):
      key, sub = jax.random.split(key)
      n = n * 3 + jax.random.bits(sub, (2,)).astype(jnp.int32)
      outs.append(n)
    return key, outs
  check_roll(fun, jax.random.key(0), np.array([1, 2], np.int32), rolls=1)
  check_roll(fun, jax.random.PRNGKey(0), np.array([1, 2], np.int32), rolls=1)


def test_complex_half_precision_and_scalars():
  def fun(z, h, s):
    for _ in range(5):
      z, h, s = z * 0.5 + 1j, jnp.sin(h), s * 0.5
    return z, h, s
  check_roll(fun, np.complex64(1 + 2j), jnp.bfloat16(1.5), 2.0)


def test_nothing_to_roll_and_no_arguments():
  assert not check_roll(lambda x: jnp.sin(x), X, rolls=0).rolls
  check_roll(lambda: jnp.zeros(3), rolls=[])


def test_options_are_those_given():
  check_roll(layers, WS, X, rolls=0, options=RollOptions(strategy="scan", min_trip_count=6))
  check_roll(layers, WS, X, rolls=[5], options=RollOptions(strategy="scan", min_body_eqns=1))


@pytest.mark.parametrize("rolls", [0, 2, [4], [(5, 3)], [5, 5]])
def test_other_rolls_than_expected(rolls):
  with pytest.raises(RollMismatch, match=r"rolls \(trip count, body equations\): expected .*, got \[\(5, 4\)\]"):
    check_roll(layers, WS, X, rolls=rolls, grad=False, vmap=False, compiled=False)


def test_wrong_bits_name_result_place_and_distance(monkeypatch):
  off = np.zeros((3, 4), np.float32)
  off[1, 2] = 1e-6
  monkeypatch.setattr(check_module, "roll_jaxpr", wrong_pass(lambda outs: [outs[0], outs[1] + off]))
  with pytest.raises(RollMismatch, match=r"values: result \['x'\] at \[1, 2\]: expected .*, got .* \(\d+ ulps apart"):
    check_roll(layers, WS, X)


def test_negative_zero(monkeypatch):
  monkeypatch.setattr(check_module, "roll_jaxpr", wrong_pass(lambda outs: [-outs[0]]))
  with pytest.raises(RollMismatch, match="expected 0.0, got -0.0"):
    check_roll(lambda x: x * 0.0, np.float32(1))


def test_wrong_types(monkeypatch):
  monkeypatch.setattr(check_module, "roll_jaxpr", wrong_pass(lambda outs: [outs[0].astype(jnp.bfloat16)]))
  with pytest.raises(RollMismatch, match=r"expected type float32\[3, 4\], got bfloat16\[3, 4\]"):
    check_roll(jnp.sin, X)


def test_wrong_gradient(monkeypatch):
  right = check_module.roll_jaxpr

  def roll_jaxpr(closed, options):
    if len(closed.out_avals) > 1:  # the gradient program
      return wrong_pass(lambda outs: [*outs[:-1], outs[-1] * 2])(closed, options)
    return right(closed, options)

  monkeypatch.setattr(check_module, "roll_jaxpr", roll_jaxpr)
  with pytest.raises(RollMismatch, match="gradient program: result 1 at"):
    check_roll(jnp.sin, X)


def test_wrong_roll_function(monkeypatch):
  monkeypatch.setattr(check_module, "roll_jit", lambda fun, roll: jax.jit(lambda *a: [y + 1 for y in fun(*a)]))
  with pytest.raises(RollMismatch, match="compiled values: result .*ulps of the largest magnitude"):
    check_roll(jnp.sin, X)
  monkeypatch.undo()
  monkeypatch.setattr(check_module, "roll", lambda fun, options: lambda *a: [y * 2 for y in fun(*a)])
  for compiled in (False, True):
    with pytest.raises(RollMismatch, match="gradient of the rolled function"):
      check_roll(jnp.sin, X, compiled=compiled)
    with pytest.raises(RollMismatch, match="vmap of the rolled function"):
      check_roll(jnp.sin, X, compiled=compiled, grad=False)


def test_errors_of_the_pass_are_raised(monkeypatch):
  def broken(closed, options):
    assert options.is_strict
    raise RuntimeError("broken")
  monkeypatch.setattr(check_module, "roll_jaxpr", broken)
  with pytest.raises(RuntimeError, match="broken"):
    check_roll(layers, WS, X, options=RollOptions())


def test_control_flow_within_layers():
  def fun(x, flag):
    for _ in range(4):
      x = lax.cond(flag, jnp.sin, jnp.cos, x)
      x = lax.fori_loop(0, 2, lambda i, x: x * 0.5 + i, x)
    return x
  check_roll(fun, X, True, rolls=[4])


def test_far_apart():
  a = np.float32([1, -2, np.inf, np.nan])
  assert far_apart(a, a.copy(), 0) is None
  assert far_apart(a, a + np.float32(1e-7), 1) is None
  assert "at [3]" in far_apart(a, np.float32([1, -2, np.inf, 0]), 1e9)
  assert "at [2]" in far_apart(a, np.float32([1, -2, -np.inf, np.nan]), 1e9)
  assert "off by 1" in far_apart(np.float32(0), np.float32(1), 1e9)
  assert far_apart(np.float32(0), np.float32(1), 0, slack=1) is None
  assert "expected 1, got 2" in far_apart(np.int32(1), np.int32(2), 1e9)
  assert "at [1]" in far_apart(np.complex64([1j, 2j]), np.complex64([1j, 2]), 64)
