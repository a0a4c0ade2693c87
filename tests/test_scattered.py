"""Equal subgraphs that form no chain and do not follow one another are put together and rolled."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, compat
from jaxroll.fingerprint import Fingerprinter
from jaxroll.order import reordered
from jaxroll.pipeline import roll_jaxpr
from jaxroll.program import analyze
from jaxroll.scatter import Growth
from jaxroll.testing import check_roll
from jaxroll.testing.check import ROLL_ALL
from programs import weights

INDEPENDENT = 0  # carries


def shuffled(things, seed=0):
  things = list(things)
  random.Random(seed).shuffle(things)
  return things


def leaves(counts, seed=0):
  """Arrays of several shapes, so many of each, in no order."""
  return shuffled([w for k, (shape, n) in enumerate(counts.items()) for w in weights(n, *shape, seed=seed + k)])


def made(report):
  """The rolls at top level: trip counts and equations."""
  return sorted((r.trip_count, r.body_eqns) for r in report.rolls if r.depth == 0)


COUNTS = {(2, 3): 9, (4,): 7, (5, 2): 11}


def test_optimizer_updates_laid_out_by_operation():
  def adam(params, grads, mus, nus):
    mus = [0.9 * m + 0.1 * g for m, g in zip(mus, grads)]
    nus = [0.99 * n + 0.01 * g * g for n, g in zip(nus, grads)]
    scaled = [m / (jnp.sqrt(n) + 1e-3) for m, n in zip(mus, nus)]
    return [p - 0.1 * s for p, s in zip(params, scaled)], mus, nus

  args = [leaves(COUNTS, seed) for seed in (0, 10, 20)] + [[w * w for w in leaves(COUNTS, 30)]]
  report = check_roll(adam, *args, grad=False, vmap=False, compiled=False)
  assert made(report) == [(7, 12), (9, 12), (11, 12)]
  assert report.eqns_after < 0.3 * report.eqns_before
  assert all(r.carries == INDEPENDENT for r in report.rolls)


def test_updates_that_need_the_norm_of_all_gradients():
  """Clipping by the global norm stands between the squares and the updates: two rolls per shape, no cycle."""
  def clipped(params, grads):
    norm = jnp.sqrt(sum([jnp.sum(jnp.square(jnp.cos(g))) for g in grads]))
    return [p * 0.99 - jnp.tanh(g / norm) for p, g in zip(params, grads)]

  report = check_roll(clipped, leaves(COUNTS), leaves(COUNTS, 10), grad=False, vmap=False, compiled=False)
  assert [r for r in made(report) if r[1] == 4] == [(7, 4), (9, 4), (11, 4)], "the updates"
  assert [r for r in made(report) if r[1] == 3] == [(6, 3), (9, 3), (11, 3)], "the squares, but that of the first sum"


def test_equal_blocks_here_and_there():
  ws, us = weights(8, 4, 4), weights(8, 4, 4, seed=1)

  def fun(ws, us, x):
    def block(w, u, x):
      return jnp.tanh(x @ w) @ u + jnp.sin(x)
    odd = [jnp.exp, jnp.square, jnp.cos]
    total = x.sum()
    out = []
    for i, (w, u) in enumerate(zip(ws, us)):
      for f in shuffled(odd, i)[: i % 4]:
        total = f(total * 0.1)
      out.append(block(w, u, x + i))
    return total, out

  report = check_roll(fun, ws, us, np.ones((3, 4), np.float32), compiled=False, vmap=False)
  assert made(report)[-1] == (8, 6)


def test_samples_of_two_lengths():
  def fun(w, xs):
    return [jax.nn.softmax(jnp.sin(x @ w)).max() for x in xs]

  xs = leaves({(2, 4): 6, (5, 4): 5})
  report = check_roll(fun, jnp.eye(4), xs, compiled=False, vmap=False)
  assert sorted(r.trip_count for r in report.rolls if r.depth == 0 and r.body_eqns > 5) == [5, 6]


def test_heads_of_two_kinds():
  def fun(x, ws):
    out = []
    for kind, (q, k) in zip("llgllglglg", zip(ws[::2], ws[1::2])):
      a = (x @ q) @ (x @ k).T
      a = jnp.where(jnp.tri(len(x), dtype=bool), a, -1e9) if kind == "l" else jnp.tanh(a)
      out.append(jnp.exp(a - a.max(-1, keepdims=True)) @ x)
    return jnp.concatenate(out, -1)

  report = check_roll(fun, np.random.RandomState(0).randn(4, 5).astype(np.float32), weights(20, 5, 3), compiled=False,
                      grad=False, vmap=False)
  heads = [r for r in report.rolls if r.depth == 0 and r.body_eqns >= 8]
  assert sorted(r.trip_count for r in heads) == [4, 6]


def test_twenty_losses_and_their_metrics():
  kinds = "aababbbaabaaabbabaab"

  def fun(predictions, targets):
    losses = {}
    for i, (kind, p, t) in enumerate(zip(kinds, predictions, targets)):
      d = p - t
      if kind == "a":
        losses[i] = jnp.sum(jnp.abs(d)) + jnp.sum(jnp.log1p(jnp.square(d)))
      else:
        losses[i] = jnp.sum(jnp.square(jnp.tanh(d)))
    metrics = {k: jnp.sqrt(jnp.exp(losses[k])) for k in shuffled(losses)}
    return sum(losses.values()), metrics

  report = check_roll(fun, weights(20, 3), weights(20, 3, seed=1), compiled=False, vmap=False, grad=False)
  trips = [r.trip_count for r in report.rolls if r.depth == 0 and r.body_eqns >= 4]
  assert sorted(trips) == [kinds.count("b"), kinds.count("a")]


def test_members_that_wait_for_one_another_are_not_put_together():
  """Blocks between which something else stands each time: what can't be contiguous stays where it is."""
  def fun(ws, x):
    between = [jnp.sin, jnp.cos, jnp.exp, jnp.square, jnp.abs]
    for w, f in zip(ws, between):
      x = f(jnp.tanh(x @ w) * 0.5 + x) * 0.1
    return x

  check_roll(fun, weights(5, 3, 3), np.ones(3, np.float32), rolls=0, compiled=False, vmap=False)


def test_equal_fingerprints_with_other_wiring_do_not_match():
  def fun(xs):
    out = []
    for i, x in enumerate(xs):
      a, b = jnp.sin(x), jnp.cos(x)
      out.append(jnp.tanh(a - b if i % 2 else b - a))
    return out

  report = check_roll(fun, weights(12, 3), grad=False, compiled=False)
  assert made(report) == [(6, 4), (6, 4)] or made(report) == [(6, 8)]


def test_nothing_is_moved_by_default_where_it_saves_little():
  closed = jax.make_jaxpr(lambda xs: [jnp.sin(x) * 2 for x in xs])(leaves({(2,): 5, (3,): 5}))
  rolled, report = roll_jaxpr(closed, RollOptions(strict=True))
  assert rolled is closed and not report.rolls


def test_default_options_put_updates_together():
  def fun(params, grads):
    moved = [jnp.tanh(g * 0.1) + p for p, g in zip(params, grads)]
    squared = [jnp.square(m) - 0.5 for m in moved]
    return [jnp.sin(s) * m for s, m in zip(squared, moved)]

  counts = {(2, 3): 14, (4,): 15}
  report = check_roll(fun, leaves(counts), leaves(counts, 7), options=RollOptions(strict=True), grad=False,
                      vmap=False, compiled=False)
  assert made(report) == [(14, 7), (15, 7)]
  assert all(sum(r.copied_bytes) == 0 for r in report.rolls), "nothing is stacked"


def test_several_devices_leave_the_order_alone():
  closed = jax.make_jaxpr(lambda xs: [jnp.tanh(jnp.sin(x) * x) for x in shuffled(xs)])(leaves({(2,): 5, (3,): 6}))
  rolled, _ = roll_jaxpr(closed, ROLL_ALL, several_devices=True)
  again, report = roll_jaxpr(closed, ROLL_ALL)
  assert made(report) == [(5, 3), (6, 3)]
  assert len(again.jaxpr.eqns) < len(rolled.jaxpr.eqns)


def test_work_is_bounded(monkeypatch):
  monkeypatch.setattr("jaxroll.order._EFFORT", 0)
  closed = jax.make_jaxpr(lambda xs: [jnp.tanh(jnp.sin(x) * x) for x in xs])(leaves({(2,): 8, (3,): 9}))
  _, report = roll_jaxpr(closed, ROLL_ALL)
  assert any("bound on work" in r.reason for r in report.refusals)


@pytest.mark.parametrize("seed", range(3))
def test_a_reordered_program_is_analyzed_as_if_written_so(seed):
  def fun(x, y):
    for i in range(5):
      x, (y, _) = jnp.sin(x) * y, jnp.split(y * 2 + x * 0, 2)
      y = jnp.concatenate([y, y])
    return x, y, jnp.sin(x), 1.

  program = analyze(jax.make_jaxpr(fun)(np.ones(4), np.ones(4)), Fingerprinter())
  n = len(program.eqns)
  maker = np.repeat(np.arange(n), np.diff(program.out_start))
  waits = [{int(maker[v]) for v in program.slots[program.slot_start[e] : program.slot_start[e + 1]] if v >= 0}
           for e in range(n)]
  order: list[int] = []
  while len(order) < n:
    ready = [e for e in range(n) if e not in order and waits[e] <= {*order}]
    order.append(random.Random(seed + len(order)).choice(ready))
  assert order != list(range(n))
  got = reordered(program, np.asarray(order))
  closed = compat.replace_eqns(program.closed, list(got.eqns))
  expected = analyze(closed, program.fingerprinter)
  for name in ("eqns", "out_vars", "results"):
    assert list(getattr(got, name)) == list(getattr(expected, name))
  for name in ("fingerprints", "sizes", "slot_start", "out_start", "out_bytes", "canonical", "first_use", "last_use"):
    np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)
  inner = got.slots >= 0
  np.testing.assert_array_equal(inner, expected.slots >= 0)
  np.testing.assert_array_equal(got.slots[inner], expected.slots[inner])


@pytest.mark.parametrize("seed", range(30))
def test_phases_count_how_often_a_path_leaves_a_group_and_comes_back(seed):
  rng = random.Random(seed)
  n = 40

  def fun(x):
    values = [x]
    for _ in range(n):
      a, b = (rng.choice(values[-rng.choice([2, 6, 30]):]) for _ in range(2))
      values.append(jax.lax.add(a, b))
    return values

  program = analyze(jax.make_jaxpr(fun)(1.0), Fingerprinter())
  assert len(program.eqns) == n
  growth = Growth(program, [], RollOptions(), 0, 10**9)
  for size in (2, 4, 12):
    group = sorted(rng.sample(range(rng.choice([0, n // 2]), n), size))
    phase = [None] * n  # what the definition says, equation by equation
    for e in range(n):
      made = [int(program.maker(v)) for v in program.slots[program.slot_start[e] : program.slot_start[e + 1]] if v >= 0]
      before = [phase[m] + (e in group and m not in group) for m in made if phase[m] is not None]
      phase[e] = max(before, default=0 if e in group else None)
    columns = np.asarray(shuffled(group, seed)).reshape(2, -1)
    expected = [[phase[e] for e in row] for row in columns.tolist()]
    np.testing.assert_array_equal(growth._phases(columns), expected)
    np.testing.assert_array_equal(growth._phases(columns[::-1]), expected[::-1])
