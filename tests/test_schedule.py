"""What each loop reads and returns."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxroll.fingerprint import Fingerprinter
from jaxroll.options import RollOptions
from jaxroll.parts import One
from jaxroll.plan import Carry, Xs, find_rolls
from jaxroll.program import analyze
from jaxroll.schedule import schedule
from programs import chain, loss, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)


def scheduled(fun, *args, strategy="scan"):
  program = analyze(jax.make_jaxpr(fun)(*args), Fingerprinter())
  rolls, _ = find_rolls(program, RollOptions(min_body_eqns=1))
  return program, schedule(program, rolls, [strategy] * len(rolls))


def test_a_chain_takes_weights_and_a_carry_and_returns_its_final_carry():
  _, plan = scheduled(chain, WS, X)
  loop, = plan.loops
  assert [type(loop.roll.inputs[i]) for i in loop.inputs] == [Carry, Xs]
  assert len(loop.chains) == 1 and not loop.ys and not loop.lasts and not loop.taken
  (parts,) = loop.feeds.values()
  assert all(isinstance(p, One) for p in parts) and len(parts) == 6
  assert plan.steps == (0,)


def test_the_backward_loop_reads_whole_arrays_in_reverse():
  _, plan = scheduled(jax.grad(loss, argnums=(0, 1)), WS, X)
  forward, backward = plan.loops
  assert backward.reverse and not forward.reverse and not forward.taken
  whole = [parts[0] for parts in backward.feeds.values() if len(parts) == 1]
  assert whole and all(p.is_whole and p.loop == 0 for p in whole)
  assert len(forward.carried_ys) == 1  # each layer's input


def test_calls_take_single_values():
  _, plan = scheduled(jax.grad(loss, argnums=(0, 1)), WS, X, strategy="fence")
  forward, backward = plan.loops
  assert not backward.feeds and not backward.chains
  assert all(trips == tuple(range(6)) for q, trips in forward.taken.items() if q not in forward.carried)


def test_what_only_made_a_loops_xs_is_dropped():
  def f(w, xs):
    h = jnp.zeros(4)
    for i in range(6):
      h = jnp.tanh(h @ w + xs[i])
    return h
  program, plan = scheduled(f, WS[0], np.ones((6, 4), np.float32))
  kept = [program.eqns[e].primitive.name for step in plan.steps if not isinstance(step, int) for e in step]
  assert kept == ["broadcast_in_dim"]


def test_a_loop_that_nothing_needs_is_dropped():
  closed = jax.make_jaxpr(lambda ws, x: (chain(ws, x), x))(WS, X)
  closed = closed.replace(jaxpr=closed.jaxpr.replace(outvars=closed.jaxpr.outvars[1:])) if hasattr(closed, "jaxpr") else closed
  program = analyze(closed, Fingerprinter())
  assert not program.eqns
