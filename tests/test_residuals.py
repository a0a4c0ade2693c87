"""What a loop computes anew instead of reading it of an earlier one: through the oracle, with what is still stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, explain, roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)


def forced(strategy):
  return RollOptions(strategy=strategy, min_body_eqns=1, strict=True)


def rolls(fun, *args, strategy="scan", argnums=(0, 1)):
  """The rolls of a loss's gradient, which is checked bit for bit."""
  return checked(jax.grad(loss_of(fun), argnums), *args, strategy=strategy)


def loss_of(fun):
  return lambda *args: (fun(*args) ** 2).sum()


def checked(fun, *args, strategy):
  report = check_roll(fun, *args, options=forced(strategy), grad=False, vmap=False, compiled=False)
  return [r for r in report.rolls if r.depth == 0]


def stored(fun, *args, strategy):
  """The types of what the forward loop of a loss's gradient hands on."""
  rolled, _ = roll_jaxpr(jax.make_jaxpr(jax.grad(loss_of(fun), (0, 1)))(*args), forced(strategy))
  loop = next(e for e in rolled.eqns if e.primitive.name == "scan" or e.params.get("name") == "call_body")
  return [v.aval for v in loop.outvars]




def gelus(ws, x):
  for w in ws:
    x = jax.nn.gelu(x @ w)
  return x


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_gelu_keeps_its_argument_and_its_tanh(strategy):
  forward, backward = rolls(gelus, WS, X, strategy=strategy)
  # Not half of 1 + tanh, nor three times the argument's square, and so on. A call also returns what it carries.
  assert forward.ys == {"scan": 2, "call": 3}[strategy]
  fenced = rolls(gelus, WS, X, strategy="fence")[1]
  assert backward.recomputed_bytes == 6 * X.nbytes * (fenced.xs - backward.xs) > 0
  assert forward.recomputed_bytes == 0


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_relu_keeps_its_argument_alone(strategy):
  def f(ws, x):
    for w in ws:
      x = x + jax.nn.relu(x @ w) @ w
    return x
  forward, backward = rolls(f, WS, X, strategy=strategy)
  assert forward.ys == {"scan": 1, "call": 2}[strategy]  # neither the result nor the mask
  assert backward.recomputed_bytes == 6 * X.size  # the mask, a byte each: the argument takes what the result would


@pytest.mark.parametrize("strategy", ["fence", "inline"])
def test_where_xla_sees_all_iterations_it_does_so_itself(strategy):
  assert [r.recomputed_bytes for r in rolls(gelus, WS, X, strategy=strategy)] == [0, 0]


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_an_odd_iteration_outside_the_loop_keeps_no_more(strategy):
  forward, backward = rolls(gelus, WS, X, strategy=strategy, argnums=0)
  assert (forward.trip_count, backward.trip_count) == (6, 5)
  assert forward.ys == 3  # the layer's input, for the gradient of its weight
  assert backward.recomputed_bytes > 0


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_dropout_keeps_the_mask_alone(strategy):
  def f(ws, x, key):
    keys = jax.random.split(key, len(ws))
    for i, w in enumerate(ws):
      kept = jax.random.bernoulli(keys[i], 0.8, x.shape)
      x = x + jnp.where(kept, (x @ w) / 0.8, 0.)
    return x
  args = WS, X, jax.random.PRNGKey(0)
  forward, backward = rolls(f, *args, strategy=strategy)
  # The layer's input and the mask, of which the scan stacks the former as what it carries.
  assert forward.ys == {"scan": 1, "call": 2}[strategy]
  assert backward.recomputed_bytes == 6 * X.nbytes  # the zeros in place of what is dropped


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_a_mask_that_all_layers_share_is_broadcast_anew(strategy):
  def f(ws, x):
    for w in ws:
      scores = jnp.einsum("hqk,hlk->hql", x, x)
      scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), scores, -1e9)
      x = x + jnp.sin(scores) @ x @ w
    return x
  x = np.stack([X, X + 1])
  forward, backward = rolls(f, WS, x, strategy=strategy)
  scores = 2 * 3 * 3
  assert backward.recomputed_bytes >= 6 * scores * (1 + 4)  # the mask for each head, the zeros beneath it
  assert np.dtype(bool) not in [t.dtype for t in stored(f, WS, x, strategy=strategy)]


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_a_broadcast_statistic_is_kept_as_it_was_before(strategy):
  def f(ws, x):
    for w in ws:
      x = jnp.sin(x @ w) * jnp.broadcast_to(jnp.cos(x[:, :1]), x.shape)
    return x
  forward, backward = rolls(f, WS, X, strategy=strategy)
  fenced = rolls(f, WS, X, strategy="fence")[1]
  assert fenced.xs == backward.xs  # the column has taken the place of what it is broadcast to
  assert backward.recomputed_bytes == 6 * (X.nbytes - X[:, :1].nbytes)


@pytest.mark.parametrize("strategy", ["scan", "call"])
def test_scales_that_differ_per_layer_are_constants_of_the_loop(strategy):
  def f(ws, x):
    for i, w in enumerate(ws):
      y = jnp.tanh(x @ w)
      z = y * (i + 0.5)
      x = y + z * jnp.sin(z)
    return x
  forward, backward = rolls(f, WS, X, strategy=strategy)
  assert backward.recomputed_bytes > 0


def test_what_is_read_elsewhere_is_stored_and_read():
  def f(ws, x):
    seen = []
    for w in ws:
      y = jnp.tanh(x @ w)
      seen.append(y * 0.5)
      x = jnp.sin(seen[-1]) * seen[-1] + y
    return (x ** 2).sum(), seen
  gradient = jax.grad(f, (0, 1), has_aux=True)
  backward = checked(gradient, WS, X, strategy="scan")[1]
  without = checked(lambda *args: gradient(*args)[0], WS, X, strategy="scan")[1]
  assert without.recomputed_bytes == backward.recomputed_bytes + 6 * X.nbytes


def test_the_report_tells():
  report = explain(jax.grad(lambda ws, x: gelus(ws, x).sum(), (0, 1)), forced("scan"))(WS, X)
  assert f"recomputes {report.rolls[1].recomputed_bytes} B; as asked" in str(report)
