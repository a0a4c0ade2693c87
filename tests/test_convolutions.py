import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll.bodies import for_cpu
from jaxroll.testing import check_roll
from jaxroll.testing.oracle import bits_differ, evaluate

RANDOM = np.random.RandomState(0)


def array(*shape):
  return RANDOM.randn(*shape).astype(np.float32)


def convolution(layout, **options):
  spec = {1: "H", 2: "HW", 3: "DHW"}[len(layout[0]) - 2]
  return lambda x, k: lax.conv_general_dilated(
      x, k, options.get("strides", (1,) * len(spec)), options.get("padding", "SAME"), dimension_numbers=layout,
      **{k: v for k, v in options.items() if k not in ("strides", "padding")})


CASES = {
    "NHWC": (convolution(("NHWC", "HWIO", "NHWC")), array(2, 5, 6, 4), array(3, 3, 4, 8)),
    "NCHW": (convolution(("NCHW", "OIHW", "NCHW")), array(2, 4, 5, 6), array(8, 4, 3, 3)),
    "mixed": (convolution(("HWNC", "IHWO", "CNHW")), array(5, 6, 2, 4), array(4, 3, 3, 8)),
    "strided": (convolution(("NCHW", "OIHW", "NHWC"), strides=(2, 3), padding=[(1, 2), (0, 1)]), array(2, 4, 7, 8), array(8, 4, 3, 2)),
    "dilated": (convolution(("NHWC", "OIHW", "NHWC"), rhs_dilation=(2, 1)), array(2, 8, 6, 4), array(8, 4, 3, 3)),
    "transposed": (convolution(("NHWC", "HWOI", "NHWC"), lhs_dilation=(2, 2), padding=[(1, 2), (2, 1)]), array(2, 4, 5, 4), array(3, 3, 8, 4)),
    "grouped": (convolution(("NCHW", "OIHW", "NCHW"), feature_group_count=2), array(2, 4, 5, 6), array(8, 2, 3, 3)),
    "depthwise": (convolution(("NHWC", "HWIO", "NHWC"), feature_group_count=4), array(2, 5, 6, 4), array(3, 3, 1, 4)),
    "batch groups": (convolution(("NHWC", "HWIO", "NHWC"), batch_group_count=2), array(4, 5, 6, 4), array(3, 3, 4, 8)),
    "1-D": (convolution(("NCH", "OIH", "NCH")), array(2, 4, 9), array(8, 4, 3)),
    "3-D": (convolution(("NCDHW", "OIDHW", "NCDHW")), array(2, 2, 4, 5, 3), array(4, 2, 3, 3, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gradient", [False, True])
def test_same_bits_and_nothing_left_permuted(name, gradient):
  conv, x, k = CASES[name]
  fun = (lambda x, k: jax.vjp(conv, x, k)[1](jnp.sin(conv(x, k)))) if gradient else (lambda x, k: jax.jit(conv)(x, k))
  closed = jax.make_jaxpr(fun)(x, k)
  canonical = for_cpu(closed, inlined=False)
  for a, b in zip(evaluate(closed, x, k), evaluate(canonical, x, k)):
    assert bits_differ(a, b) is None
  assert for_cpu(canonical, inlined=False) is canonical and for_cpu(closed, inlined=True) is closed
  assert list(canonical.out_avals) == list(closed.out_avals)


def test_within_loops_and_calls():
  ks = [array(3, 3, 4, 4) * 0.1 for _ in range(4)]
  def loss(ks, x):
    for k in ks:
      x = x + jnp.tanh(lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return (x ** 2).sum()
  from jaxroll import RollOptions
  for strategy in ("scan", "call"):
    options = RollOptions(strategy=strategy, min_body_eqns=1, strict=True)
    report = check_roll(jax.grad(loss, argnums=(0, 1)), ks, array(1, 5, 5, 4), options=options, grad=False, vmap=False)
    assert [r.trip_count for r in report.rolls] == [4, 4]
