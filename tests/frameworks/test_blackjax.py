"""Blackjax kernels on a density with an unrolled recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

blackjax = pytest.importorskip("blackjax")

from jaxroll import RollOptions
from jaxroll.testing import check_roll

STEPS = 12
Y = np.random.RandomState(0).randn(STEPS).astype(np.float32)
KEY = jax.random.key(7)
START = {"drift": jnp.float32(0.1), "x": jnp.asarray(Y * 0.5)}


def log_density(position):
  x, total = jnp.float32(0), -0.5 * position["drift"] ** 2
  for t in range(STEPS):
    mean = jnp.tanh(x) + position["drift"]
    x = position["x"][t]
    total = total - 0.5 * (x - mean) ** 2 - jnp.log1p((Y[t] - x) ** 2 / 4)
  return total


@pytest.mark.parametrize("name", ["hmc", "nuts", "mala"])
def test_kernel(name):
  arguments = {"hmc": dict(step_size=0.1, inverse_mass_matrix=jnp.ones(STEPS + 1), num_integration_steps=3),
               "nuts": dict(step_size=0.1, inverse_mass_matrix=jnp.ones(STEPS + 1), max_num_doublings=3),
               "mala": dict(step_size=0.01)}[name]
  kernel = getattr(blackjax, name)(log_density, **arguments)
  state = kernel.init(START)
  report = check_roll(kernel.step, KEY, state, options=RollOptions(), grad=False, vmap=False)
  assert sum(STEPS - 2 <= r.trip_count <= STEPS for r in report.rolls) >= 2, str(report)
