"""A layer that is a call in one place and written out in another is one repeat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, explain, roll_jaxpr, roll_jit
from jaxroll.testing import check_roll
from programs import weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(8, 4, 4)
FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)


def layer(w, x):
  return jnp.tanh(x @ w) * 0.5 + jnp.sin(x)


def model(wrap):
  """Layers of which every third is wrapped."""
  def f(ws, x):
    for i, w in enumerate(ws):
      x = (wrap(layer) if i % 3 == 1 else layer)(w, x)
    return x
  return f


@pytest.mark.parametrize("inline", [False, True])
def test_a_jitted_layer_among_others(inline):
  roll, = check_roll(model(functools.partial(jax.jit, inline=inline)), WS, X, options=FORCED, rolls=[8]).rolls
  assert roll.body_eqns == 5


def test_a_jitted_layer_in_a_jitted_layer():
  wrap = lambda layer: jax.jit(lambda w, x: jax.jit(layer)(w, x))
  check_roll(lambda ws, x: model(jax.jit)(ws, model(wrap)(ws, x)), WS, X, options=FORCED, vmap=False)
  def f(ws, x):
    for i, w in enumerate(ws):
      x = wrap(layer)(w, x) if i == 1 else jax.jit(layer)(w, x) if i == 4 else layer(w, x)
    return x
  assert max(r.trip_count for r in check_roll(f, WS, X, options=FORCED).rolls) >= 3


def test_the_gradient_program():
  f = lambda ws, x: (model(jax.jit)(ws, x) ** 2).sum()
  check_roll(jax.grad(f), WS, X, options=FORCED, grad=False)


def test_unused_results_of_a_call():
  def two(w, x):
    y = jnp.tanh(x @ w)
    return jnp.sin(y), jnp.cos(y)
  def f(ws, x):
    for i, w in enumerate(ws):
      x, _ = (jax.jit(two) if i % 2 else two)(w, x)
    return x
  check_roll(f, WS, X, options=FORCED)


def test_calls_stay_where_nothing_like_them_is_written_out():
  f = lambda ws, x: [x := jax.jit(layer)(w, x) for w in ws][-1]
  roll, = check_roll(f, WS, X, options=FORCED, rolls=[8]).rolls
  assert roll.body_eqns == 1
  g = lambda ws, x: jnp.cos(jax.jit(layer)(ws[0], layer(ws[1], x)))
  closed = jax.make_jaxpr(g)(WS, X)
  assert roll_jaxpr(closed, FORCED)[0] is closed


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: jax.custom_jvp(f)])
def test_what_gradients_treat_differently_stays_wrapped(wrap):
  def with_rule(f):
    wrapped = wrap(f)
    if isinstance(wrapped, jax.custom_jvp):
      wrapped.defjvp(lambda p, t: (f(*p), jax.jvp(f, p, t)[1] * 2))
    return wrapped
  f = lambda ws, x: model(with_rule)(ws, x).sum()
  assert not [r for r in explain(f, FORCED)(WS, X).rolls if r.trip_count > 3]
  for a, b in zip(jax.grad(roll_jit(f, roll=FORCED))(WS, X), jax.grad(f)(WS, X)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_scopes_of_a_written_out_call_stay():
  def f(ws, x):
    for i, w in enumerate(ws):
      with jax.named_scope("outer"):
        x = (jax.jit(layer) if i % 3 == 0 else layer)(w, x)
    return x
  text = roll_jit(f, roll=FORCED).lower(WS, X).compile().as_text()
  assert "outer/tanh" in text
