"""Concatenations within bodies, written so that XLA:CPU compiles them once.

XLA:CPU compiles equal fused kernels once, but a concatenation that stands by itself
anew each time, for 25 to 50 ms (jax 0.10.2 and 0.12): a split whose gradient joins the
parts again, to be multiplied, costs more than the rest of a layer. Short ones are written as a choice
between padded parts, which fuses; behind a fence, or each reader would make its own, and
on jax 0.12 store it. The values are only moved, so the bits are the same.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll import compat
from jaxroll.program import aval_bytes

_PARTS = 4  # each element of a choice looks at all of them: eight heads joined so make a layer a tenth slower
_BYTES = 1 << 20  # from there on a copy runs faster than the choice


def as_choice(eqn) -> list | None:
  """The equations for a short `concatenate` or `stack`; None for any other."""
  name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
  if name not in ("concatenate", "stack") or not 2 <= len(eqn.invars) <= _PARTS or not compat.is_static(eqn):
    return None
  if not compat.is_plain(out) or compat.key_impl(out) or aval_bytes(out) > _BYTES or not out.size:
    return None
  axis = eqn.params["dimension" if name == "concatenate" else "axis"]

  def choose(parts):
    if name == "stack":
      parts = [lax.expand_dims(p, (axis,)) for p in parts]
    ends = np.cumsum([p.shape[axis] for p in parts]).tolist()
    at = lax.broadcasted_iota(np.int32, out.shape, axis)
    chosen = None
    for part, end in reversed(list(zip(parts, ends))):
      around = [(0, 0, 0)] * out.ndim
      around[axis] = (end - part.shape[axis], ends[-1] - end, 0)
      padded = lax.pad(part, jnp.zeros((), part.dtype), around)
      chosen = padded if chosen is None else lax.select(at < end, padded, chosen)
    return compat.fence([chosen], "cpu")

  return compat.splice(eqn, choose)
