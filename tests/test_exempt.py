import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, collect_reports, explain, no_roll, roll, roll_jit

X = np.linspace(0, 1, 4, dtype=np.float32)
FORCED = RollOptions(strategy="scan", min_trip_count=2, min_body_eqns=1)


def layers(x):
  for _ in range(6):
    x = jnp.sin(x * jnp.arange(4.)) * 2
  return x


kept = no_roll(layers)


@jax.custom_vjp
def with_rule(x):
  return jnp.sin(x)


with_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (kept(ct * jnp.cos(x)),))


def in_context(x):
  with no_roll():
    return layers(x)


def total(f):
  return lambda x: f(x).sum()


@pytest.mark.parametrize("fun", [
    kept, in_context, jax.grad(total(kept)), jax.vmap(kept, axis_size=3, in_axes=None), jax.jit(kept), no_roll(jax.jit(layers)),
    jax.grad(total(jax.checkpoint(kept))), jax.grad(total(no_roll(jax.checkpoint(layers)))), jax.hessian(total(kept)),
    jax.grad(total(jax.jit(kept))), jax.grad(no_roll(total(jax.jit(layers)))), jax.grad(total(with_rule)),
    lambda x: jax.jvp(kept, (x,), (x,)), lambda x: jax.linearize(kept, x)[1](x), no_roll(roll(layers, FORCED)),
    no_roll(roll_jit(layers, roll=FORCED)), lambda x: jax.linear_transpose(no_roll(lambda y: sum([y] * 6)), x)(x)],
    ids=range(17))
def test_nothing_traced_within_is_rolled(fun):
  report = explain(fun, FORCED)(X)
  assert not report.rolls and report.exempt >= 5
  assert "left as written under no_roll" in str(report)
  got, expected = roll_jit(fun, roll=FORCED)(X), jax.jit(fun)(X)
  jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_no_roll_contains_an_exempt_equation():
  def f(x):
    for _ in range(6):
      x = jnp.cos(no_roll(lambda y: jnp.sin(y) * 2)(x)) + 1
    return x
  report = explain(f, FORCED)(X)
  assert not report.rolls and report.exempt == 12 and report.eqns_before == 24


def test_what_is_around_is_rolled():
  report = explain(lambda x: layers(in_context(layers(x))), FORCED)(X)
  assert [r.trip_count for r in report.rolls] == [6, 6]


def test_a_jitted_function_is_traced_anew_within():
  f = roll_jit(lambda x: layers(x), roll=FORCED)
  with collect_reports() as reports:
    with no_roll():
      f(X)
    assert not reports
    f(X)
  assert [r.trip_count for r in reports[0].rolls] == [6]


def test_as_decorator():
  @no_roll
  @functools.partial(jax.jit, static_argnames="n")
  def f(x, n):
    """Doc."""
    return x * n
  assert f(2., n=3) == 6 and f.__name__ == "f" and f.__doc__ == "Doc."
  with pytest.raises(TypeError, match="callable"):
    no_roll(3)
