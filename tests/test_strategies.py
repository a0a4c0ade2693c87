"""What XLA makes of each strategy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, explain, roll_jaxpr, roll_jit
from jaxroll.compat import CALLS_ARE_SHARED
from jaxroll.testing import check_roll
from jaxroll.where import CALLS_SURVIVE
from programs import loss, weights

WS, X = weights(6, 64, 64), np.ones((8, 64), np.float32)
STRATEGIES = ("scan", "fence", "call", "inline")


def step(ws, x):
  return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_written_into_donated_inputs(strategy):
  plain = jax.jit(step, donate_argnums=0).lower(WS, X).compile().memory_analysis()
  rolled = roll_jit(step, roll=RollOptions(strategy=strategy), donate_argnums=0).lower(WS, X).compile().memory_analysis()
  assert rolled.alias_size_in_bytes == plain.alias_size_in_bytes == 6 * 64 * 64 * 4


def optimized(strategy):
  return roll_jit(loss, roll=RollOptions(strategy=strategy)).lower(WS, X).compile().as_text()


def calls(text):
  return len(re.findall(r" call\(.*to_apply=[^,]*call_body", text))


@pytest.mark.skipif(jax.default_backend() not in CALLS_SURVIVE, reason="calls are not known to survive here")
def test_calls_survive_where_the_table_says_so():
  assert calls(optimized("call")) == 6
  assert calls(optimized("fence")) == calls(optimized("inline")) == 0


def test_lowering_emits_a_body_once():
  for strategy in ("fence", "call", "inline"):
    text = roll_jit(loss, roll=RollOptions(strategy=strategy)).lower(WS, X).as_text()
    assert text.count("stablehlo.dot_general") == 1 and text.count(f"call @{strategy}_body") == 6


def test_compile_calls_where_that_is_known_to_pay():
  ws = weights(16, 256, 256)
  found = [r.strategy for r in explain(jax.grad(loss), RollOptions(optimize_for="compile"))(ws, jnp.ones((64, 256))).rolls]
  assert set(found) == {"call" if CALLS_ARE_SHARED else "fence"}


def fences(fun):
  closed, _ = roll_jaxpr(jax.make_jaxpr(fun)(WS, X), RollOptions(strategy="fence"))
  return sum(e.primitive.name == "optimization_barrier" or e.params.get("name") == "fence" for e in closed.jaxpr.eqns)


def test_a_computed_start_is_fenced_like_what_every_iteration_gives():
  assert fences(loss) == 6
  assert fences(lambda ws, x: loss(ws, jnp.sin(x))) == 7
  assert fences(lambda ws, x: loss(ws, jnp.ones_like(x))) == 6, "a constant start is for XLA to fold"


def test_what_differs_between_fenced_iterations_is_no_constant_to_xla():
  def fun(w, xs):
    x = jnp.zeros((8, 64))
    for t in range(6):
      x = jnp.tanh(x @ w + xs[:, t]) * (t + 1.5)
    return x

  compiled = roll_jit(fun, roll=RollOptions(strategy="fence")).lower(WS[0], np.ones((8, 6, 64), np.float32)).compile()
  assert " slice(" not in compiled.as_text(), "each would be a kernel of its own"


def test_quick_iterations_share_a_step_of_the_loop():
  def fun(w, x):
    for _ in range(32):
      x = jnp.sin(w @ x) - x.sum()
    return x

  w, x = np.eye(8, dtype=np.float32) / 2, np.ones(8, np.float32)
  for aim, unroll in ("balanced", 4), ("compile", 1):
    options = RollOptions(optimize_for=aim, strict=True)
    rolled, report = roll_jaxpr(jax.make_jaxpr(fun)(w, x), options, platform="cpu")
    assert [r.strategy for r in report.rolls] == ["scan"]
    assert [e.params["unroll"] for e in rolled.jaxpr.eqns if e.primitive.name == "scan"] == [unroll]
  check_roll(fun, w, x, options=RollOptions(strict=True))
