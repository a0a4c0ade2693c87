"""Repeats that are nearly identical: what differs becomes data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxroll import RollOptions, explain, roll_jaxpr
from jaxroll.testing import check_roll
from programs import weights

W = weights(1, 4, 4)[0]
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
SERIES = np.linspace(-1, 1, 72, dtype=np.float32).reshape(3, 6, 4)
ROWS = np.linspace(-1, 1, 36, dtype=np.float32).reshape(3, 12)
FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)


def recurrent(read, steps=6):
  """A function of weights and data that reads something else of the data in each step."""
  def f(w, data):
    h = jnp.zeros((3, 4))
    for i in range(steps):
      h = jnp.tanh(h @ w + read(data, i))
    return h
  return f


READS = {
    "x[:, t]": (lambda a, t: a[:, t], SERIES),
    "x[:, -t]": (lambda a, t: a[:, -1 - t], SERIES),
    "x[:, t:t+1]": (lambda a, t: a[:, t : t + 1, :][:, 0], SERIES),
    "x[..., 2i:2i+2]": (lambda b, i: b[..., 2 * i : 2 * i + 2].sum(-1, keepdims=True), ROWS),
    "x[:, t, t]": (lambda a, t: a[:, t, t % 4][:, None], SERIES),
    "x[:1, t]": (lambda a, t: a[:1, t], SERIES),
    "dynamic_slice": (lambda a, t: lax.dynamic_slice(a, (0, t, 0), (3, 1, 4))[:, 0], SERIES),
    "dynamic_index_in_dim": (lambda a, t: lax.dynamic_index_in_dim(a, t, 1, keepdims=False), SERIES),
    "take": (lambda a, t: jnp.take(a, t, axis=1), SERIES),
    "take several": (lambda a, t: a[:, np.array([t, (t + 1) % 6])].sum(1), SERIES),
    "roll by a traced index": (lambda a, t: jnp.roll(a, jnp.int32(t), 1)[:, 0], SERIES),
}


@pytest.mark.parametrize("name", READS)
def test_reads_at_another_place_in_each_step(name):
  read, data = READS[name]
  f = recurrent(read)
  report = check_roll(f, W, data, options=FORCED, rolls=[6], vmap=False, compiled=False)
  assert set(report.rolls[0].feeds) == {"constants"}


def test_strided_slices():
  check_roll(recurrent(lambda b, i: b[..., i::3], 3), W, ROWS, options=FORCED, rolls=[3])
  check_roll(recurrent(lambda b, i: b[:, i : i + 8 : 2], 5), W, ROWS, options=FORCED, rolls=[5])


@pytest.mark.parametrize("take", [
    lambda a: [a[:, t] for t in range(6)],
    lambda a: jnp.unstack(a, axis=1),
    lambda a: [x[:, 0] for x in jnp.split(a, 6, 1)],
    lambda a: list(a.swapaxes(0, 1)),
    lambda a: [a[:, t] for t in (3, 1, 4, 0, 5, 2)],
    lambda a: [a[:, t] for t in range(5, -1, -1)],
], ids=["slices", "unstack", "split", "iteration", "in any order", "backwards"])
def test_an_array_taken_apart_beforehand_is_read_where_it_lies(take):
  def f(w, a):
    h = jnp.zeros((3, 4))
    for x in take(a):
      h = jnp.tanh(h @ w + x)
    return h
  roll = check_roll(f, W, SERIES, options=FORCED, compiled=False).rolls[-1]
  assert roll.trip_count == 6 and roll.feeds in (("slice",), ("constants",)) and sum(roll.copied_bytes) == 0


@pytest.mark.parametrize("take", [
    lambda w, i: w[i], lambda w, i: lax.slice_in_dim(w, i, i + 1)[0], lambda w, i: jnp.unstack(w)[i],
    lambda w, i: jnp.split(w, 6)[i][0],
], ids=["index", "slice", "unstack", "split"])
def test_stacked_weights_reach_the_loop_as_they_lie(take):
  def f(w, x):
    for i in range(6):
      x = jnp.tanh(x @ take(w, i) + x)
    return x
  w, x = np.stack([W] * 6) * np.linspace(0.5, 1, 6, dtype=np.float32)[:, None, None], np.ones((3, 4), np.float32)
  check_roll(f, w, x, options=FORCED, rolls=[6])
  rolled, _ = roll_jaxpr(jax.make_jaxpr(f)(w, x), FORCED)
  scan, = (e for e in rolled.jaxpr.eqns if e.primitive.name == "scan")
  assert rolled.jaxpr.invars[0] in scan.invars, "an axis of size one added before the loop makes XLA copy them all"


@pytest.mark.parametrize("take", [lambda a, t: a[:, t], lambda a, t: a[..., t], lambda a, t: jnp.take(a, t, axis=1)])
def test_gradients_of_reads_accumulate_in_the_loop(take):
  data = SERIES if take(SERIES, 0).shape[-1] == 4 else np.linspace(-1, 1, 72, dtype=np.float32).reshape(3, 4, 6)
  f = lambda w, a: (recurrent(take)(w, a) ** 2).sum()
  forward, *_, backward = check_roll(jax.grad(f, (0, 1)), W, data, options=FORCED, grad=False, vmap=False, compiled=False).rolls
  assert forward.trip_count == 6 and backward.trip_count >= 4 and backward.carries >= 2


WRITES = {
    "dynamic_update_slice": ((6, 3, 4), lambda b, i, h: lax.dynamic_update_slice(b, h[None], (i, 0, 0))),
    ".at[i].set": ((6, 3, 4), lambda b, i, h: b.at[i].set(h)),
    ".at[:, i].set": ((3, 6, 4), lambda b, i, h: b.at[:, i].set(h)),
    ".at[i, 1:].add": ((6, 3, 4), lambda b, i, h: b.at[i, 1:].add(h[1:])),
    ".at[i:i+2].set": ((7, 4), lambda b, i, h: b.at[i : i + 2].set(h[:2])),
    "pad": ((3, 12), lambda b, i, h: b + jnp.pad(h, ((0, 0), (i, 8 - i)))),
    "pad of a column": ((3, 12), lambda b, i, h: b + jnp.pad(h[:, :1], ((0, 0), (i, 11 - i)))),
    "pad of an element": ((6, 5), lambda b, i, h: b + lax.pad(h[0, 1][None, None], 2., ((i, 5 - i, 0), (1, 3, 0)))),
    "pad of a column of many": ((3, 400), lambda b, i, h: b + jnp.pad(h[:, :1], ((0, 0), (i, 399 - i)))),
    "lax.pad with gaps": ((3, 12), lambda b, i, h: b + lax.pad(h, 0., ((0, 0, 0), (i, 5 - i, 1)))),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_one_buffer(name):
  shape, write = WRITES[name]
  def f(w, a, buffer):
    h = jnp.zeros((3, 4))
    for i in range(6):
      h = jnp.tanh(h @ w + a[:, i])
      buffer = write(buffer, i, h)
    return buffer
  roll, = check_roll(f, W, SERIES, jnp.zeros(shape), options=FORCED, rolls=[6], vmap=False, compiled=False).rolls
  assert roll.carries == 2 and set(roll.feeds) == {"constants"}


SIZES = (1, 2, 3, 2, 3, 1)
I = np.arange(4)
DIFFERING = {
    "scale": lambda n, x, key: x * 0.5 ** n,
    "layer index": lambda n, x, key: x + n,
    "full": lambda n, x, key: x + jnp.full((4,), n * 0.1),
    "captured array": lambda n, x, key: x + np.linspace(0, n, 4, dtype=np.float32),
    "captured array in a jit": lambda n, x, key: jax.jit(lambda x: x + np.linspace(0, n, 4, dtype=np.float32))(x),
    "literal in a jit": lambda n, x, key: jax.jit(lambda x: jnp.sin(x * (n + 0.5)))(x),
    "literal in a jit in a jit": lambda n, x, key: jax.jit(lambda x: jax.jit(lambda x: jnp.sin(x) + n)(x) * n)(x),
    "literal in a checkpoint": lambda n, x, key: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * (n + 0.5)))(x),
    "slice in a checkpoint": lambda n, x, key: jax.checkpoint(lambda x: jnp.sin(x * x[:, n : n + 1]))(x),
    "literal in a scan": lambda n, x, key: lax.scan(lambda c, y: (jnp.sin(c * n), c + y), x, jnp.ones((2, 4)))[0],
    "slice in a scan": lambda n, x, key: lax.scan(lambda c, y: (c + x[:, n : n + 1], c * y), x, jnp.ones((2, 4)))[0],
    "captured array in a loop": lambda n, x, key: lax.fori_loop(
        0, 3, lambda i, c: jnp.sin(c) + np.linspace(0, n, 4, dtype=np.float32), x),
    "literals in branches": lambda n, x, key: lax.cond(
        x.sum() > n, lambda x: x * n + 0.5, lambda x: jnp.sin(x) - n * 0.1, x),
    "literal in a scan in a branch": lambda n, x, key: lax.switch(jnp.int32(x.sum()) % 3, [
        lambda x: lax.scan(lambda c, _: (jnp.cos(c * n), None), x, None, length=2)[0], lambda x: x * n, jnp.sin], x),
    "window": lambda n, x, key: x @ jnp.where((jnp.arange(4)[:, None] - jnp.arange(4)) < n, 1., 0.),
    "two-sided window": lambda n, x, key: x @ jnp.where(jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4)) <= n, 1., 0.),
    "constant mask": lambda n, x, key: x @ jnp.where(np.abs(I[:, None] - I) <= n, 1., 0.),
    "tril": lambda n, x, key: x @ jnp.tril(jnp.ones((4, 4)), n - 1),
    "leaky_relu": lambda n, x, key: jax.nn.leaky_relu(x, 0.1 * n),
    "clip": lambda n, x, key: jnp.clip(x, -0.1 * n, 0.2 * n),
    "one_hot": lambda n, x, key: x + jax.nn.one_hot(n, 4),
    "fold_in": lambda n, x, key: x + jax.random.normal(jax.random.fold_in(key, n), x.shape),
    "dropout rate": lambda n, x, key: jnp.where(
        jax.random.bernoulli(jax.random.fold_in(key, 7 * n), 1 - 0.1 * n, x.shape), x / (1 - 0.1 * n), 0.),
    "rounds of a hash": lambda n, x, key: x + jax.random.uniform(jax.random.key(n * 7919), x.shape),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_what_differs_becomes_data(name):
  change = DIFFERING[name]
  def f(w, x, key):
    for n in SIZES:
      x = change(n, jnp.tanh(x @ w), key)
    return x
  report = check_roll(f, W, X, jax.random.key(0), options=FORCED, vmap=False, compiled=name in ("scale", "tril"))
  outer = [r for r in report.rolls if r.depth == 0]
  assert [r.trip_count for r in outer] == [6] and set(outer[0].feeds) == {"constants"}


@pytest.mark.parametrize("strategy", ["scan", "fence", "call", "inline"])
def test_loops_that_end_elsewhere_and_differ_in_their_literals(strategy):
  def f(w, x):
    for n in SIZES:
      is_going = lambda c: (c[1] < n) & (c[0].max() < 3 * n)
      x, _ = lax.while_loop(is_going, lambda c: (c[0] * 1.5 + w[0] * 0.1 * n, c[1] + 1), (jnp.tanh(x @ w), 0))
    return x
  options = RollOptions(strategy=strategy, min_body_eqns=1, strict=True)
  check_roll(f, W, X, options=options, rolls=[6], grad=False)


def test_branches_within_a_shard_map_that_differ_in_their_literals():
  mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
  def f(x):
    def g(x):
      for n in range(4):
        x = lax.cond(x.sum() > 1, lambda x: jnp.sin(x) - n, lambda x: x, x)
      return x
    return jax.shard_map(g, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))(x)
  check_roll(f, np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), options=FORCED)


def test_loops_of_different_lengths_are_no_repeat():
  def f(w, x):
    for n in range(1, 4):
      x = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=n)[0] * 2
    return x
  check_roll(f, W, X, options=FORCED, rolls=0, vmap=False, compiled=False)


def test_names_of_inner_functions_do_not_count():
  def f(w, x, wrap):
    for n in range(6):
      def layer(x):
        return jnp.tanh(x @ w)
      layer.__name__ = f"layer_{n}"
      with jax.named_scope(f"scope_{n}"):
        x = wrap(layer)(x)
    return x
  for wrap in (jax.jit, lambda layer: jax.checkpoint(jax.jit(layer)), jax.checkpoint):
    check_roll(lambda w, x: f(w, x, wrap), W, X, options=FORCED, rolls=[6], vmap=False)


def test_names_that_a_checkpoint_policy_may_ask_for_do_count():
  def f(w, x):
    for n in range(6):
      x = checkpoint_name(jnp.tanh(x @ w), f"layer_{n}")
    return x
  assert not explain(f, FORCED)(W, X).rolls


@pytest.mark.parametrize("change", [
    lambda n, x: x ** (n + 1),
    lambda n, x: jnp.roll(x, n, -1),
    lambda n, x: x.sum(n % 2, keepdims=True) + x,
    lambda n, x: jax.jit(lambda x: x + 1, inline=True)(x) if n % 2 else x - 1,
    lambda n, x: x + x[:, :n].sum(1, keepdims=True),
], ids=["integer powers", "rotations", "axes", "operations", "shapes"])
def test_what_is_no_data_is_no_repeat(change):
  def f(w, x):
    for n in range(1, 4):
      x = change(n, jnp.tanh(x @ w))
    return x
  check_roll(f, W, X, options=FORCED, rolls=0, vmap=False, compiled=False)


def test_differing_arguments_of_a_jit_with_options_are_left_alone():
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  def f(x):
    for n in range(5):
      x = jax.jit(lambda x: jnp.sin(x) * n, out_shardings=sharding)(x)
    return x
  assert not [r for r in explain(f, FORCED)(X).rolls if r.depth == 0]


def test_affine_indices_are_computed_and_others_are_one_constant():
  def f(order):
    def g(a):
      h = jnp.zeros((3, 4))
      for t in order:
        h = jnp.sin(h + a[:, t])
      return h
    return g
  closed = jax.make_jaxpr(f([0, 2, 4]))(SERIES)
  rolled, _ = roll_jaxpr(closed, FORCED)
  assert "iota" in {e.primitive.name for e in rolled.jaxpr.eqns} and not rolled.consts
  closed = jax.make_jaxpr(f([0, 1, 4, 2]))(SERIES)
  rolled, _ = roll_jaxpr(closed, FORCED)
  assert "iota" not in {e.primitive.name for e in rolled.jaxpr.eqns} and len(rolled.consts) == 1
