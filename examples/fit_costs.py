"""Fits the constants of jaxroll's cost model on this machine, and compares them with those in jaxroll/cost.py.

  PYTHONPATH=. python examples/fit_costs.py                 about ten minutes on two cores
  PYTHONPATH=. python examples/fit_costs.py --trips 6,12    faster, less exact

Compile: chains of several kinds and lengths are compiled under each strategy, and XLA's CPU seconds are explained,
by least squares half-way between absolute and relative error, as

  fence   equation x trips x body equations + kernel x body equations
  scan    equation x body equations + kernel x body equations + stack x (xs + ys) + copy x operations that stack or take apart

plus a constant per kind of program for what stands around the rolls. Run: what a fence, an iteration of a scan and
a copied byte take, each from two programs that differ in nothing else. All seconds depend on the machine; what the model
compares are ratios of them.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import benchmark
from jaxroll import RollOptions, cost, explain, roll_jit

STRATEGIES = ("fence", "scan")


def mlp(trips):
  random = benchmark.Random()
  ws = [random(64, 64) for _ in range(trips)]

  def loss(ws, x):
    for w in ws:
      x = x + jnp.tanh(benchmark.norm(x, 1.1) @ w)
    return (x ** 2).mean()

  return jax.grad(loss), (ws, random(8, 64))


def recurrent(trips):
  random = benchmark.Random()

  def loss(w, xs):
    h = c = jnp.zeros((8, 64))
    for t in range(trips):
      i, f, o, g = jnp.split(xs[:, t] @ w + h @ w, 4, -1)
      c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
      h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h ** 2).mean()

  return jax.grad(loss), (random(64, 256), random(8, trips, 64))


def solver(trips):
  def run(x):
    for _ in range(trips):
      k1 = jnp.roll(x, 1, 0) - x * x
      k2 = jnp.roll(x + 0.1 * k1, 1, 0) - jnp.sin(x)
      x = x + 0.05 * (k1 + k2) / (1 + jnp.abs(x).sum())
    return x

  return run, (benchmark.Random()(64, 64),)


PROGRAMS = {
    "mlp": mlp, "recurrent": recurrent, "solver": solver,
    "convnet": lambda trips: benchmark.convnet(trips),
    "gpt": lambda trips: benchmark.gpt(trips, 64, 2, 32, 0.)[:2],
    "gpt gradient": lambda trips: benchmark.gpt(trips, 64, 2, 32, 0., jax.grad)[:2],
}


def compile_seconds(fun, args, options) -> float:
  lowered = roll_jit(fun, roll=options).lower(*args)
  start = time.process_time()
  lowered.compile()
  return time.process_time() - start


def features(rolls, strategy: str) -> list[float]:
  """What each of `cost.Compile`'s constants is multiplied by."""
  rolls = [r for r in rolls if r.depth == 0]
  body = sum(r.body_size for r in rolls)
  if strategy == "fence":
    return [sum(r.body_size * r.trip_count for r in rolls), body, 0, 0]
  return [body, body, sum(r.xs + r.ys for r in rolls), sum(r.operations for r in rolls)]


def fit_compile(trips: list[int], options) -> dict[str, float]:
  rows, seconds, kinds = [], [], list(PROGRAMS)
  for kind, make in PROGRAMS.items() if not options.only else [(k, PROGRAMS[k]) for k in options.only.split(",")]:
    for n in trips:
      fun, args = make(n)
      args = jax.tree.map(jnp.asarray, args)
      for strategy in STRATEGIES:
        options = RollOptions(strategy=strategy, min_trip_count=3, min_body_eqns=4)
        rolls = explain(fun, options)(*args).rolls
        taken = compile_seconds(fun, args, options)
        rows.append(features(rolls, strategy) + [float(k == kind) for k in kinds])
        seconds.append(taken)
        print(f"{kind:<14}{n:>4} {strategy:<6}{taken:8.2f} s   {[int(f) for f in rows[-1][:4]]}", flush=True)
  fitted, predicted = least_squares(np.asarray(rows), np.asarray(seconds))
  off = np.abs(np.log(predicted / seconds))
  print(f"predicted / measured is off by a factor of {np.exp(np.median(off)):.2f} in the median, {np.exp(off.max()):.2f} at most")
  return dict(zip(("equation", "kernel", "stack", "copy"), fitted))


def least_squares(rows: np.ndarray, seconds: np.ndarray):
  """Non-negative least squares, by leaving out what would be negative."""
  weights = seconds ** -0.5
  kept = list(range(rows.shape[1]))
  while True:
    solution = np.linalg.lstsq(rows[:, kept] * weights[:, None], seconds * weights, rcond=None)[0]
    if (solution >= 0).all():
      break
    kept.pop(int(np.argmin(solution)))
  fitted = np.zeros(rows.shape[1])
  fitted[kept] = solution
  return fitted, rows @ fitted


def run_seconds(fun, *args) -> float:
  compiled = jax.jit(fun).lower(*args).compile()
  best = []
  for _ in range(30):
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    best.append(time.perf_counter() - start)
  return min(best)


def fit_run() -> dict[str, float]:
  """Seconds of a fence, of a scan's iteration and of a copied byte, and what an operation and a byte take in a body."""
  from jaxroll import compat
  x, many = jnp.ones(64), 2000
  platform = jax.default_backend()

  def chain(fenced, trips=many // 4):
    def fun(x):
      for _ in range(trips):
        x = jnp.sort(x)
        x = compat.fence([x], platform)[0] if fenced else lax.optimization_barrier(x)
        x = -x
      return x
    return fun

  def scanned(x):
    return lax.scan(lambda x, _: (-jnp.sort(x), None), x, None, length=many)[0]

  def looped_less(x):
    return lax.scan(lambda x, _: (-jnp.sort(x), None), x, None, length=many // 2)[0]

  arrays = [jnp.ones((256, 1024)) + i for i in range(32)]
  stacking = run_seconds(lambda *a: jnp.stack(a), *arrays) / (32 << 20)
  w = jnp.ones((512, 512))
  flops = 2 * 512 ** 3 * 8 / run_seconds(lambda w: [w := w @ w * 1e-3 for _ in range(8)][-1], w)
  big = jnp.ones((4 << 20,))
  band = big.nbytes / run_seconds(lambda b: jnp.sin(b) * 2, big)
  iteration = (run_seconds(scanned, x) - run_seconds(looped_less, x)) / (many // 2)
  fence = max(run_seconds(chain(True), x) - run_seconds(chain(False), x), 0) / (many // 4)
  return dict(fence=fence, iteration=iteration, copied_byte=stacking, flops=flops, bandwidth=band)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--trips", default="6,16,32", help="lengths of the chains, by comma")
  parser.add_argument("--only", default="", help="kinds, by comma: " + ", ".join(PROGRAMS))
  options = parser.parse_args()
  jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))  # start the backend
  fitted = fit_compile([int(n) for n in options.trips.split(",")], options)
  print("\ncompile, ms                 fitted    cost.py")
  for name, value in fitted.items():
    print(f"  {name:<22}{value * 1e3:>10.3f}{getattr(cost.COMPILE, name) * 1e3:>11.3f}")
  print("run")
  for name, value in fit_run().items():
    print(f"  {name:<22}{value:>10.3g}")


if __name__ == "__main__":
  main()
