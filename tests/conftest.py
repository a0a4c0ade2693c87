"""The whole suite runs strict: an internal error of the pass is a failure, not a warning."""

import os

os.environ["JAXROLL_STRICT"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

# JAX's own checks of everything that it traces take a fifth of the suite's time, so one of the versions has them. What
# the pass makes is checked under every version: that is what strict means.
jax.config.update("jax_enable_checks", jax.__version_info__ >= (0, 12))


@pytest.fixture
def x64():
  """Runs a test with 64-bit types."""
  before = jax.config.jax_enable_x64
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", before)
