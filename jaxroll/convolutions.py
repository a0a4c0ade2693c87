"""Convolutions within loops, written so that XLA:CPU runs them fast.

XLA:CPU brings a convolution into the layout of its fast kernels only where it
stands in the entry computation. In the body of a loop or of a function that is
kept out of line, one with permuted dimension numbers, as every gradient of a
convolution has them, runs as a naive loop, ten times slower. There the pass
writes it with the layout spelled out: transposed operands, a convolution with
(batch, space, features) and (space, in, out), and a transposed result. The
products and sums are the same ones in the same order.
"""

from __future__ import annotations

from jax import lax

from jaxroll import compat


def canonical(eqn) -> list | None:
  """The equations for a convolution that is not canonical; None for any other."""
  if eqn.primitive.name != "conv_general_dilated" or _is_canonical(eqn.params["dimension_numbers"]):
    return None
  return compat.splice(eqn, lambda operands: [convolve(*operands, eqn.params)])


def _canonical_specs(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
  """(batch, features, *space) positions of operand, kernel (out, in, *space) and result."""
  space = tuple(range(1, rank - 1))
  return (0, rank - 1, *space), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *space)


def _is_canonical(numbers) -> bool:
  return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == _canonical_specs(len(numbers.lhs_spec))


def convolve(x, kernel, params):
  """The convolution of `conv_general_dilated`'s parameters, through canonical dimension numbers.

  Args:
    x: the operand, of any layout that `params['dimension_numbers']` describes.
    kernel: the kernel, the same.
    params: the parameters of a `conv_general_dilated` equation.
  """
  numbers = params["dimension_numbers"]
  rank = x.ndim
  lhs, rhs, out = _canonical_specs(rank)

  def moved(spec, target):
    """The permutation that brings the dimensions of `spec` to where `target` has them."""
    permutation = [0] * rank
    for at, to in zip(spec, target):
      permutation[to] = at
    return tuple(permutation)

  result = lax.conv_general_dilated(
      lax.transpose(x, moved(numbers.lhs_spec, lhs)), lax.transpose(kernel, moved(numbers.rhs_spec, rhs)),
      params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"],
      lax.ConvDimensionNumbers(lhs, rhs, out), params["feature_group_count"], params["batch_group_count"],
      params["precision"], params["preferred_element_type"])
  return lax.transpose(result, moved(out, numbers.out_spec))
