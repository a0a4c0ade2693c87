"""What an equation costs to run: floating-point operations and bytes, counted from its types."""

from __future__ import annotations

import dataclasses
import math
import operator

from jaxroll.fingerprint import GENERATORS, holds, nested_jaxprs
from jaxroll.program import aval_bytes, reckoned

# Primitives that XLA fuses into what reads them: a program of these alone becomes few kernels.
FUSIBLE = frozenset("""
  abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type broadcast_in_dim cbrt ceil clamp
  complex concatenate conj convert_element_type copy copy_p cos cosh custom_jvp_call custom_vjp_call device_put
  digamma div dynamic_slice eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota is_finite
  jit le lgamma log log1p logistic lt max min mul ne neg nextafter not one_minus_square optimization_barrier or pad
  population_count pow real reduce_precision rem reshape rev round rsqrt select_n shift_left
  shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square squeeze stack stop_gradient sub tan
  tanh transpose unstack xor
""".split())


@dataclasses.dataclass(frozen=True)
class Work:
  """What running some equations once costs.

  Attributes:
    flops: floating-point operations; a product with accumulation counts as two.
    bytes: bytes of all results, as if each was written; of an array updated in place, of what is written into it.
    kernels: equations that end a fusion, such as products, reductions, loops.
    reductions: those among them that fuse with what they read, of which each makes its own.
    convolutions: convolutions among them.
    draws: calls of a random-number generator.
    shifts: equations that fuse and write an element elsewhere than they read it.
  """

  flops: float = 0
  bytes: float = 0
  kernels: float = 0
  reductions: float = 0
  convolutions: float = 0
  draws: float = 0
  shifts: float = 0

  def __add__(self, other: Work) -> Work:
    return Work(*(a + b for a, b in zip(_counts(self), _counts(other))))

  def __mul__(self, times: float) -> Work:
    return Work(*(a * times for a in _counts(self)))


_counts = operator.attrgetter(*(f.name for f in dataclasses.fields(Work)))


def equation_work(eqn, memo: dict | None = None) -> Work:
  """The work of one equation, nested jaxprs included; a `while` is taken to run once.

  `memo` keeps the work of nested jaxprs from call to call.

  >>> import jax, jax.numpy as jnp
  >>> closed = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))
  >>> equation_work(closed.eqns[0])
  Work(flops=48, bytes=32, kernels=1, reductions=0, convolutions=0, draws=0, shifts=0)
  """
  memo = {} if memo is None else memo
  name, params = eqn.primitive.name, eqn.params
  if name == "dynamic_update_slice" or name.startswith("scatter"):  # in place
    update = eqn.invars[1 if name == "dynamic_update_slice" else 2].aval
    return Work(size_of(update), aval_bytes(update), kernels=1)
  inner = [] if not params or name in _COMBINING else [jaxpr_work(j, memo) for j in nested_jaxprs(params)]
  if inner:
    total = Work()
    for w in inner:
      total += w * reckoned(params["length"]) if name == "scan" else w
    return total + Work(kernels=0 if name in FUSIBLE or name in _TRANSPARENT else 1)
  results = sum(aval_bytes(v.aval) for v in eqn.outvars)
  out = eqn.outvars[0].aval if eqn.outvars else None
  size = size_of(out)
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return Work(2 * size * math.prod(reckoned(shape[d]) for d in contracted), results, 1)
  if name == "conv_general_dilated":
    kernel = [reckoned(d) for d in eqn.invars[1].aval.shape]
    per_output = math.prod(kernel) // max(kernel[params["dimension_numbers"].rhs_spec[0]], 1)
    return Work(2 * size * per_output, results, 1, convolutions=1)
  return Work(size, results, kernels=name not in FUSIBLE, reductions=name.startswith(_REDUCING),
              draws=name in GENERATORS, shifts=name in _SHIFTING)


def size_of(aval) -> int:
  """The elements of an array of this type."""
  return math.prod(map(reckoned, getattr(aval, "shape", ())))


_DRAWS = frozenset({"random_bits", "threefry2x32"})
_SHIFTING = frozenset({"concatenate", "pad", "rev", "transpose"})
_REDUCING = ("reduce_", "arg", "cum")
_TRANSPARENT = frozenset({"checkpoint", "remat2", "closed_call"})
# Their jaxprs combine two numbers and say nothing of the size of the work.
_COMBINING = frozenset({"reduce", "reduce_window", "sort"})


def jaxpr_work(jaxpr, memo: dict | None = None) -> Work:
  """The work of a jaxpr, open or closed."""
  memo = {} if memo is None else memo
  found = memo.get(id(jaxpr))
  if found is None:
    total = Work()
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
      total += equation_work(eqn, memo)
    found = memo[id(jaxpr)] = (total, jaxpr)
  return found[0]


def draws_random_bits(eqn, memo: dict | None = None) -> bool:
  """Whether an equation, or one nested in it, generates random bits."""
  return holds(eqn, _DRAWS, {} if memo is None else memo)
