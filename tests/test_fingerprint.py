import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll.fingerprint import Fingerprinter
from jaxroll.program import analyze


def fingerprints(fun, *args):
  return analyze(jax.make_jaxpr(fun)(*args), Fingerprinter()).fingerprints.tolist()


X = jnp.ones((2, 3))


def pair(f, g):
  """The fingerprints of two functions of one equation each."""
  a, b = fingerprints(lambda x: (f(x), g(x)), X)
  return a, b


@pytest.mark.parametrize("f, g", [
    (lambda x: x * 2., lambda x: x * 3.),  # literals become operands
    (lambda x: x * 2., lambda x: x * np.float32(2)),  # and so does their weak type
    (lambda x: lax.slice(x, (0, 0), (1, 3)), lambda x: lax.slice(x, (1, 0), (2, 3))),  # where a slice starts
    (jax.jit(lambda x: jnp.sin(x) + 1), jax.jit(lambda y: jnp.sin(y) + 1)),  # names of jitted functions
    (lambda x: lax.cumsum(x, 1), lambda x: lax.cumsum(x, 1)),
])
def test_equal(f, g):
  a, b = pair(f, g)
  assert a == b >= 0


def by_scan(f):
  return lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]


def until(limit):
  return lambda x: lax.while_loop(lambda c: c.sum() < limit, jnp.exp, x)


def with_rule(f):
  g = jax.custom_jvp(f)
  g.defjvp(rule)
  return g


def rule(primals, tangents):
  return jnp.sin(primals[0]) + 1, tangents[0]


@pytest.mark.parametrize("f, g", [
    (jax.jit(lambda x: jnp.sin(x) + 1), jax.jit(lambda x: jnp.sin(x) + 2)),
    (jax.jit(lambda x: x + jnp.float32(0.)), jax.jit(lambda x: x + jnp.float32(-0.))),
    (jax.checkpoint(lambda x: jnp.sin(x) * 0.5), jax.checkpoint(lambda x: jnp.sin(x) * 1.5)),
    (by_scan(lambda x: jnp.sin(x) + 1), by_scan(lambda x: jnp.sin(x) + 2)),
    (by_scan(lambda x: x + jnp.float32(0.)), by_scan(lambda x: x + jnp.float32(-0.))),
    (until(1.), until(2.)),
])
def test_what_a_function_or_loop_holds_is_an_operand_that_is_compared_by_bits(f, g):
  fingerprinter = Fingerprinter()
  program = analyze(jax.make_jaxpr(lambda x: (f(x), g(x), f(x)))(X), fingerprinter)
  a, b, c = program.fingerprints[-3:].tolist()
  assert a == b == c >= 0
  first, second, third = program.canonical[-3:].tolist()
  assert first == third != second


@pytest.mark.parametrize("f, g", [
    (jnp.sin, jnp.cos),
    (lambda x: lax.cumsum(x, 1), lambda x: lax.cumsum(x, 0)),
    (lambda x: lax.cumsum(x, 1), lambda x: lax.cumsum(x, 1, reverse=True)),
    (lambda x: lax.slice(x, (0, 0), (1, 3)), lambda x: lax.slice(x, (0, 0), (2, 3))),
    (lambda x: lax.integer_pow(x, 2), lambda x: lax.integer_pow(x, 3)),
    (with_rule(lambda x: jnp.sin(x) + 1), with_rule(lambda x: jnp.sin(x) + 2)),  # a literal that a rule might hold, too
    (with_rule(lambda x: x + jnp.float32(0.)), with_rule(lambda x: x + jnp.float32(-0.))),  # compared by bits
    (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16)),
])
def test_different(f, g):
  a, b = pair(f, g)
  assert a != b


def test_contexts_are_compared():
  def f(x):
    with jax.default_matmul_precision("highest"):
      a = x @ x.T
    return a, x @ x.T
  a, b = [fp for fp in fingerprints(f, X)][1::2] if len(fingerprints(f, X)) == 4 else fingerprints(f, X)[-2:]
  assert a != b


def test_effects_and_references_match_nothing():
  def f(x):
    jax.debug.print("{}", x)
    jax.debug.print("{}", x)
    return x
  assert all(fp < 0 for fp in fingerprints(f, X)) and len(set(fingerprints(f, X))) == 2


def test_weak_result_types_are_told_apart():
  a, b = fingerprints(lambda x, y: (x * 2, y * 2), jax.ShapeDtypeStruct((), np.float32, weak_type=True),
                      jax.ShapeDtypeStruct((), np.float32))
  assert a != b


def test_constants_and_literals_are_unified_by_value():
  one, again, two = (np.arange(3., dtype=np.float32) + k for k in (0, 0, 1))
  program = analyze(jax.make_jaxpr(lambda x: (x + one, x + again, x + two, x * 2., x * 2.))(np.ones(3, np.float32)),
                    Fingerprinter())
  slots = program.slots.reshape(-1, 2)
  assert slots[0, 1] == slots[1, 1] != slots[2, 1]
  assert slots[3, 1] == slots[4, 1]


def test_equal_computations_have_one_canonical_value_and_dead_ones_are_dropped():
  def f(x):
    jnp.exp(x)
    return jnp.sin(x) + 1, jnp.sin(x) + 1, jnp.sin(x) + 2
  program = analyze(jax.make_jaxpr(f)(X), Fingerprinter())
  assert len(program.eqns) == 6
  assert program.canonical.tolist() == [0, 1, 0, 1, 0, 5]
  assert program.last_use.tolist() == [1, 6, 3, 6, 5, 6]
