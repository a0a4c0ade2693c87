"""Repeats within repeats and within every kind of nested jaxpr."""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxroll import RollOptions, explain, roll_jaxpr, roll_jit
from jaxroll.testing import check_roll
from programs import chain, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)
FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)


def custom_jvp(f):
  wrapped = jax.custom_jvp(f)
  wrapped.defjvp(lambda p, t: (f(*p), jax.jvp(f, p, t)[1] * 2))
  return wrapped


def custom_vjp(f):
  wrapped = jax.custom_vjp(f)
  wrapped.defvjp(lambda *args: jax.vjp(f, *args), lambda pull, ct: jax.tree.map(lambda c: c * 3, pull(ct)))
  return wrapped


NESTED = {
    "jit": lambda ws, x: jax.jit(chain)(ws, x) * 2,
    "jit of jit": lambda ws, x: jax.jit(lambda ws, x: jax.jit(chain)(ws, x) + 1)(ws, x),
    "scan": lambda ws, x: lax.scan(lambda c, b: (chain(ws, c) + b, c.sum()), x, jnp.arange(3.)),
    "scan, reversed": lambda ws, x: lax.scan(lambda c, b: (chain(ws, c) + b, c), x, jnp.arange(3.), reverse=True),
    "fori_loop": lambda ws, x: lax.fori_loop(0, 3, lambda i, c: chain(ws, c) + i.astype(np.float32), x),
    "while body": lambda ws, x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, chain(ws, c[1])), (0, x)),
    "while condition": lambda ws, x: lax.while_loop(lambda c: chain(ws, c).sum() < 3, lambda c: c + 0.5, x),
    "cond": lambda ws, x: lax.cond(x.sum() < 9, lambda x: chain(ws, x), jnp.sin, x),
    "cond, both branches": lambda ws, x: lax.cond(
        x.sum() < 0, lambda x: chain(ws, x), lambda x: chain(ws[::-1], x) + 1, x),
    "switch": lambda ws, x: lax.switch(x.shape[0], [jnp.sin, jnp.cos, lambda x: chain(ws, x)], x),
    "map": lambda ws, x: lax.map(lambda row: chain(ws, row), x),
    "remat": lambda ws, x: jax.checkpoint(chain)(ws, x),
    "remat with a policy": lambda ws, x: jax.checkpoint(
        chain, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)(ws, x),
    "custom_jvp": custom_jvp(chain),
    "custom_vjp": custom_vjp(chain),
    "remat in scan in cond": lambda ws, x: lax.cond(
        x.sum() < 9, lambda x: lax.scan(lambda c, _: (jax.checkpoint(chain)(ws, c), None), x, length=2)[0],
        jnp.sin, x),
}


@pytest.mark.parametrize("kind", NESTED)
def test_rolls_within(kind):
  f = NESTED[kind]
  has_while = "while" in kind or kind == "fori_loop"
  report = check_roll(f, WS, X, grad=not has_while, options=FORCED, rolls=0)
  trips = [(r.trip_count, r.body_eqns) for r in report.rolls]
  assert trips == [(6, 4)] * (2 if kind == "cond, both branches" else 1)


def test_a_gradient_program_rolls_within_its_loops_both_ways():
  def f(ws, x):
    return lax.scan(lambda c, _: (jax.checkpoint(chain)(ws, c), None), x, length=3)[0].sum()
  report = explain(jax.grad(f), FORCED)(WS, X)
  # Forward, and in the backward pass recomputed and transposed.
  assert {r.trip_count for r in report.rolls} == {5, 6} and len(report.rolls) >= 3
  check_roll(jax.grad(f), WS, X, options=FORCED, grad=False)


def test_derivative_rules_count_not_the_primal():
  f = lambda ws, x: NESTED["custom_jvp"](ws, x).sum()
  g = lambda ws, x: NESTED["custom_vjp"](ws, x).sum()
  plain = jax.grad(lambda ws, x: chain(ws, x).sum())(WS, X)
  for fun, factor in ((f, 2), (g, 3)):
    for gradient in (jax.grad(roll_jit(fun, roll=FORCED)), roll_jit(jax.grad(fun), roll=FORCED)):
      for a, b in zip(gradient(WS, X), plain):
        np.testing.assert_allclose(a, factor * b, rtol=1e-4, atol=1e-6)


def test_stages_of_blocks_of_heads():
  def head(w, x):
    return jnp.tanh(x @ w) * 0.5
  def block(ws, x):
    return x + sum(head(w, x) for w in ws)
  def model(stages, x):
    for stage in stages:
      for block_ws in stage:
        x = block(block_ws, x)
      x = jnp.sin(x) * jnp.cos(x)
    return x
  stages = [[weights(4, 4, 4, seed=10 * i + j) for j in range(3)] for i in range(3)]
  report = check_roll(model, stages, X, options=FORCED)
  # A sum's first term is added to 0.
  assert [(r.depth, r.trip_count) for r in report.rolls] == [(0, 3), (1, 3), (2, 3)]


def test_time_steps_with_unrolled_substeps():
  def step(state, force):
    x, v = state
    for _ in range(16):
      v = v + 0.01 * (force - jnp.sin(x))
      x = x + 0.01 * v
    return (x, v), x
  def simulate(x, forces):
    return lax.scan(step, (x, x * 0), forces)
  report = check_roll(simulate, X, weights(1, 5, 3, 4)[0], options=FORCED, rolls=0)
  (roll,) = report.rolls
  assert (roll.depth, roll.trip_count, roll.carries) == (1, 16, 2)
  auto = explain(simulate)(X, weights(1, 5, 3, 4)[0])
  assert [(r.strategy, r.trip_count) for r in auto.rolls] == [("inline", 16)]


def test_equal_bodies_in_different_places_are_one_function():
  def f(ws, x):
    x = chain(ws[:5], x)
    x = lax.cond(x.sum() > 0, lambda x: chain(ws, x), jnp.sin, x)
    return chain(ws, jnp.exp(x))
  rolled = roll_jit(f, roll=RollOptions(strategy="fence", min_body_eqns=1, strict=True))
  text = rolled.lower(WS, X).as_text()
  assert text.count("func.func private @fence_body") == 1 and text.count("call @fence_body") == 5 + 6 + 6
  np.testing.assert_allclose(rolled(WS, X), jax.jit(f)(WS, X), rtol=1e-5)


def test_equal_nested_jaxprs_are_rolled_once():
  def f(ws, x):
    for _ in range(2):
      x = jnp.sin(lax.scan(lambda c, _: (chain(ws, c), None), x, length=2)[0])
    return x
  assert [(r.depth, r.trip_count) for r in check_roll(f, WS, X, options=FORCED).rolls] == [(1, 6)]


def test_what_differs_within_a_loop_may_be_constants():
  # An array of them is needed within a scan's jaxpr, and within that of a remat, which can hold none.
  scales = [0.3, 1.7, 0.9, 0.1, 2.5, 1.1]
  def layers(x):
    for s in scales:
      x = jnp.sin(x * s) + 0.5
    return x
  for f in (lambda x: lax.scan(lambda c, _: (layers(c), None), x, length=2)[0], jax.checkpoint(layers)):
    roll_, = check_roll(f, X, options=FORCED, rolls=0).rolls
    assert roll_.feeds == ("constants",)


def _loops_that_differ_in_a_literal(ws, x, read=lambda history: history[-1]):
  history = [x]
  for i in range(12):
    def step(c, _, i=i):
      return chain(ws, c) * (0.5 + 0.1 * i), None
    history.append(lax.scan(step, read(history), None, length=2)[0])
  return history[-1]


def test_loops_that_differ_in_a_literal_are_one_repeat_and_rolled_within_once():
  report = check_roll(_loops_that_differ_in_a_literal, WS, X, options=FORCED, rolls=1)
  assert sorted((r.depth, r.trip_count) for r in report.rolls) == [(0, 12), (2, 6)]


@pytest.mark.parametrize("called", [8, 7, 4, 1])
def test_calls_and_what_stands_by_itself_wait_for_each_other_where_they_differ_in_a_literal(called):
  def layer(x, w, scale):
    def step(c, _):
      for _ in range(12):
        c = jnp.tanh(c @ w) * scale + c * 0.5
      return c, None
    return jnp.sin(lax.scan(step, x, None, length=2)[0] @ w) + 1
  def f(ws, x):
    for k, w in enumerate(ws):
      x = jax.jit(lambda x, w, k=k: layer(x, w, 0.1 * k))(x, w) if k < called else layer(x, w, 0.1 * k)
    return x
  report = check_roll(f, weights(8, 4, 4), X, options=FORCED)
  assert sorted((r.depth > 0, r.trip_count) for r in report.rolls) == [(False, 8), (True, 12)]


def test_loops_that_differ_in_a_literal_and_form_no_chain_are_rolled_within_each():
  order = np.random.RandomState(1).permutation(1000)
  anywhere = lambda history: sum(history[order[len(history)] % len(history):]) + history[order[7 * len(history)] % len(history)]
  f = lambda ws, x: _loops_that_differ_in_a_literal(ws, x, anywhere)
  report = check_roll(f, WS, X, options=FORCED)
  assert [r.depth for r in report.rolls if (r.trip_count, r.body_eqns) == (6, 4)].count(1) >= 6
  assert report.size_after < report.size_before / 2, "no loop is left as written"


def test_weakly_typed_carries_stay_weak():
  def f(x):
    def step(c, _):
      for _ in range(5):
        c = c * 2 + 1
      return c, c
    return lax.scan(step, x, length=3)
  report = check_roll(lambda: f(1.), options=FORCED, rolls=0)
  assert [r.trip_count for r in report.rolls] == [5]


def test_vmap_and_export_of_nested_rolls():
  f = lambda ws, x: NESTED["remat in scan in cond"](ws, NESTED["cond"](ws, x))
  rolled = roll_jit(f, roll=FORCED)
  batch = jnp.stack([X, X * 2])
  np.testing.assert_allclose(
      jax.vmap(rolled, (None, 0))(WS, batch), jax.vmap(f, (None, 0))(WS, batch), rtol=1e-5)
  np.testing.assert_allclose(jax.export.export(rolled)(WS, X).call(WS, X), f(WS, X), rtol=1e-5)


def test_effects_within_a_loop_stay():
  seen = []
  def f(x):
    def step(c, _):
      for i in range(4):
        c = jnp.sin(c) * 2
        jax.debug.callback(lambda v: seen.append(float(v)), c.sum(), ordered=True)
      return c, None
    return lax.scan(step, x, length=2)[0]
  jax.block_until_ready(jax.jit(f)(X))
  jax.effects_barrier()
  expected, seen[:] = list(seen), []
  jax.block_until_ready(roll_jit(f, roll=FORCED)(X))
  jax.effects_barrier()
  assert len(expected) == 8 and seen == expected


def tells(x):
  jax.debug.print("{}", x.sum())
  return x


def tells_in_order(x):
  jax.debug.print("{}", x.sum(), ordered=True)
  return x


def asks(x):
  return jax.experimental.io_callback(np.asarray, x, x)


@pytest.mark.parametrize("effect", [tells, tells_in_order, asks])
@pytest.mark.parametrize("choose", [
    lambda other, same, x: lax.cond(x.sum() > 99, other, same, x),
    lambda other, same, x: lax.switch((x.sum() > 99).astype(np.int32) + 1, [jnp.sin, same, other], x),
    lambda other, same, x: lax.cond(x.sum() > 99, jnp.sin, lambda x: lax.cond(x.sum() > 98, other, same, x), x),
    lambda other, same, x: lax.scan(lambda c, _: (lax.cond(c.sum() > 99, other, same, c), None), x, length=2)[0],
], ids=["cond", "switch", "nested cond", "cond in scan"])
def test_a_branch_without_the_effects_of_another_is_rolled(choose, effect):
  f = lambda ws, x: choose(effect, lambda x: chain(ws, x), x)  # JAX gives every branch the effects of all
  check_roll(f, WS, X, options=FORCED, grad=False, vmap=False)
  closed = jax.make_jaxpr(f)(WS, X)
  rolled, report = roll_jaxpr(closed, FORCED)
  assert [r.trip_count for r in report.rolls] == [6]
  assert rolled.effects == closed.effects != set()


def test_references_within_a_loop_are_left_alone():
  def f(x):
    def step(ref):
      for _ in range(4):
        ref[...] = jnp.sin(ref[...]) * 2
    ref = jax.new_ref(x)
    lax.fori_loop(0, 3, lambda i, _: step(ref), None)
    return ref[...]
  np.testing.assert_array_equal(roll_jit(f, roll=FORCED)(X), jax.jit(f)(X))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["scan", "fence"])
def test_shard_map(strategy, check_vma):
  mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  def local(ws, x):
    total = jnp.zeros(())
    for w in ws:
      x = jnp.tanh(x @ w) + lax.psum(x, "i") * 0.1
      total = total + x.sum()
    return x, lax.psum(total, "i")
  def f(ws, x):
    return jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=(jax.P("i"), jax.P()),
                         check_vma=check_vma)(ws, x)
  options = RollOptions(strategy=strategy, min_body_eqns=1, strict=True)
  ws, x = weights(6, 4, 4), np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
  report = explain(f, options)(ws, x)
  assert [(r.depth, r.strategy) for r in report.rolls] == [(1, strategy)] and report.rolls[0].trip_count >= 5
  for a, b in zip(roll_jit(f, roll=options)(ws, x), jax.jit(f)(ws, x)):
    np.testing.assert_allclose(a, b, rtol=1e-5)
  loss = lambda f: lambda ws, x: f(ws, x)[1]
  expected = jax.jit(jax.grad(loss(f)))(ws, x)
  for gradient in (jax.grad(loss(roll_jit(f, roll=options))), roll_jit(jax.grad(loss(f)), roll=options)):
    for a, b in zip(gradient(ws, x), expected):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
