"""Two layers share a body only if their custom rules are the same (a wrong answer here is a wrong gradient)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll.fingerprint import Fingerprinter
from jaxroll.program import analyze


def custom_jvp(scale):
  @jax.custom_jvp
  def f(x):
    return x * 2
  f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * scale))
  return f


def custom_vjp(scale):
  @jax.custom_vjp
  def f(x):
    return x * 2
  f.defvjp(lambda x: (x * 2, x), lambda residual, ct: (ct * residual * scale,))
  return f


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def nondiff_jvp(x, scale):
  return x * 2


@nondiff_jvp.defjvp
def _(scale, primals, tangents):
  return primals[0] * 2, tangents[0] * scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def nondiff_vjp(scale, x):
  return x * 2


nondiff_vjp.defvjp(lambda scale, x: (x * 2, x), lambda scale, residual, ct: (ct * scale,))

MAKERS = {
    "custom_jvp": custom_jvp, "custom_vjp": custom_vjp,
    "nondiff_jvp": lambda s: lambda x: nondiff_jvp(x, s), "nondiff_vjp": lambda s: lambda x: nondiff_vjp(s, x),
    "vmapped custom_jvp": lambda s: jax.vmap(custom_jvp(s)), "vmapped custom_vjp": lambda s: jax.vmap(custom_vjp(s)),
}


def fingerprints(*functions):
  closed = jax.make_jaxpr(lambda x: [f(x) for f in functions])(jnp.ones(3))
  return analyze(closed, Fingerprinter()).fingerprints.tolist()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("same, other", [(1.5, 2.5), (0.0, -0.0), (1, 1.0), (np.float32(1), np.float32(2))])
def test_same_rule_same_fingerprint_other_rule_another(name, same, other):
  a, b, c = fingerprints(MAKERS[name](same), MAKERS[name](same), MAKERS[name](other))
  assert a == b != c


def test_closures_over_arrays_are_compared_by_value():
  one, again, two = (np.full(3, v, np.float32) for v in (1, 1, 2))
  a, b, c = fingerprints(custom_jvp(one), custom_jvp(again), custom_jvp(two))
  assert a == b != c


def test_closures_over_other_objects_are_compared_by_identity():
  class Scale:
    def __rmul__(self, other):
      return other * 2.
  scale = Scale()
  a, b, c = fingerprints(custom_jvp(scale), custom_jvp(scale), custom_jvp(Scale()))
  assert a == b != c


def test_recursive_rules_end():
  # relu's rule calls relu; so does a function that refers to itself.
  def recursive(n):
    return 1. if n == 0 else recursive(n - 1)
  assert len(set(fingerprints(jax.nn.relu, jax.nn.relu))) == 1
  a, b = fingerprints(custom_jvp(recursive(2)), custom_jvp(recursive(3)))
  assert a == b


def test_rules_of_different_code_differ():
  @jax.custom_jvp
  def f(x):
    return x * 2
  f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 1.5 * 1.))
  a, b = fingerprints(f, custom_jvp(1.5))
  assert a != b
