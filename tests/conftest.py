"""The whole suite runs strict: an internal error of the pass is a failure, not a warning."""

import os

os.environ["JAXROLL_STRICT"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_enable_checks", True)


@pytest.fixture
def x64():
  """Runs a test with 64-bit types."""
  before = jax.config.jax_enable_x64
  jax.config.update("jax_enable_x64", True)
  yield
  jax.config.update("jax_enable_x64", before)
