"""Where a program will run, and on how many devices, as far as can be told while it is traced.

The pass runs during tracing, before JAX decides on devices. A wrong guess costs
speed, never correctness: whatever depends on the platform computes the same on all.
"""

from __future__ import annotations

import itertools

import jax

from jaxroll import compat


# Where a call that is asked to stay out of line is known to do so and to be compiled once, and how that is known.
# Anywhere else the cost model does not choose `call`.
CALLS_SURVIVE = {
    "cpu": "jax 0.12: the optimized HLO of a rolled program holds the calls (tests/test_strategies.py), and compiles in "
           "0.6 of the time that fences take at 24 iterations (examples/benchmark.py). On 0.10 the calls survive, but XLA "
           "clones what they call, and fences compile faster.",
}


def calls_survive(platform: str | None) -> bool:
  """Whether calls kept out of line are known to survive, and to pay, on a platform and this version of JAX."""
  return platform in CALLS_SURVIVE and compat.CALLS_ARE_SHARED


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


def asks_for_several_devices(jit_options: dict) -> bool:
  """Whether `jax.jit`'s options lay arguments or results out over several devices."""
  leaves = jax.tree.leaves([jit_options.get("in_shardings"), jit_options.get("out_shardings")])
  return any(isinstance(leaf, jax.sharding.PartitionSpec)  # over the mesh that is set when it is called
             or isinstance(leaf, jax.sharding.Sharding) and len(leaf.device_set) > 1 for leaf in leaves)


def is_on_several_devices(closed) -> bool:
  """Whether any value at a jaxpr's top level is known to lie on several devices.

  An array on a mesh has that mesh in its type, be its axes auto, explicit or manual.
  """
  meshes = map(_mesh, _types(closed))
  return any(m is not None and m.size > 1 for m in meshes) or jax.sharding.get_abstract_mesh().size > 1


def has_explicit_axes(closed) -> bool:
  """Whether the type of any value at a jaxpr's top level says how it lies on a mesh."""
  return any(m is not None and m.explicit_axes for m in map(_mesh, _types(closed)))


def explicit_sharding(aval):
  """How the type says an array lies on a mesh with explicit axes; None where it doesn't, or there is none."""
  mesh = _mesh(aval)
  return aval.sharding if mesh is not None and mesh.explicit_axes else None


def _types(closed):
  jaxpr = closed.jaxpr
  return (v.aval for v in itertools.chain(jaxpr.invars, jaxpr.constvars, *(eqn.outvars for eqn in jaxpr.eqns)))


def _mesh(aval):
  return getattr(getattr(aval, "sharding", None), "mesh", None)
