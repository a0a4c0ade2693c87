"""Numpyro: stochastic variational inference, and the transitions of its NUTS kernel."""

import jax
import numpy as np
import pytest

numpyro = pytest.importorskip("numpyro")
optax = pytest.importorskip("optax")
dist = numpyro.distributions
infer = numpyro.infer

from jaxroll import RollOptions
from jaxroll.testing import check_roll
from stacks import check_stack

STEPS = 8
Y = np.random.RandomState(0).randn(STEPS).astype(np.float32)
KEY = jax.random.key(7)


def walk(y):
  """A random walk, a site per step."""
  drift = numpyro.sample("drift", dist.Normal(0., 1.))
  x = 0.
  for t in range(STEPS):
    x = numpyro.sample(f"x_{t}", dist.Normal(x + drift, 1.))
    numpyro.sample(f"y_{t}", dist.StudentT(4., x, 0.5), obs=y[t])


def test_svi_step():
  svi = infer.SVI(walk, infer.autoguide.AutoNormal(walk), optax.adam(1e-2), infer.Trace_ELBO())
  state = svi.init(KEY, Y)
  check_stack(svi.update, state, Y, layers=STEPS, grad=False, vmap=False)


def test_nuts_transition():
  kernel = infer.NUTS(walk, max_tree_depth=2)
  state = kernel.init(KEY, 5, None, (Y,), {})
  step = lambda state: kernel.sample(state, (Y,), {})
  report = check_roll(step, state, options=RollOptions(min_body_eqns=1), grad=False, vmap=False)
  assert sum(STEPS - 2 <= r.trip_count <= STEPS for r in report.rolls) >= 2, str(report)
