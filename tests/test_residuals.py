"""What the backward body computes anew instead of reading it of the forward one: each through the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS, VS = weights(6, 4, 4), weights(6, 4, 4, seed=1)


@pytest.mark.parametrize("strategy", ["scan", "call"])
@pytest.mark.parametrize("optimize", ["balanced"])
def test_smoke(strategy, optimize):
  def f(ws, x):
    for w in ws:
      x = x + jax.nn.gelu(jnp.where(x > 0.1, x @ w, 0.) * 2.)
    return (x**2).sum()
  options = RollOptions(strategy=strategy, min_body_eqns=1, strict=True)
  g = jax.grad(f, argnums=(0, 1))
  closed = jax.make_jaxpr(g)(WS, X)
  print(roll_jaxpr(closed, options)[1])
  check_roll(g, WS, X, options=options, grad=False)
