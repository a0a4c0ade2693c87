"""Where a program will run, as far as can be told while it is traced.

The pass runs during tracing, before JAX decides on devices. A wrong guess costs
speed, never correctness: whatever depends on the platform computes the same on all.
"""

from __future__ import annotations

import jax


def default_platform() -> str | None:
  """The platform on which JAX would run a program now, such as 'cpu' or 'gpu'."""
  device = jax.config.jax_default_device
  if device is not None:
    return device if isinstance(device, str) else device.platform
  return jax.default_backend()


def platform_of(jit_options: dict) -> str | None:
  """The platform that `jax.jit`'s options ask for, else the default one."""
  return asked_platform(jit_options) or default_platform()


def asked_platform(jit_options: dict) -> str | None:
  """The platform that `jax.jit`'s options ask for; None if they leave it open."""
  if jit_options.get("backend") is not None:
    return str(jit_options["backend"])
  if jit_options.get("device") is not None:
    return getattr(jit_options["device"], "platform", None)
  shardings = [jit_options.get("in_shardings"), jit_options.get("out_shardings")]
  for leaf in jax.tree.leaves(shardings):
    if isinstance(leaf, jax.sharding.Sharding):
      platforms = {d.platform for d in leaf.device_set}
      return platforms.pop() if len(platforms) == 1 else None
  return None
