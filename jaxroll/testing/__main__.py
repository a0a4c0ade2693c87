"""Checks the pass on random programs: ``python -m jaxroll.testing --programs 20000 --seed 0``."""

from __future__ import annotations

import argparse
import dataclasses
import resource
import sys
import time
from typing import Callable, Iterable

import jax
import numpy as np

from jaxroll.options import AIMS, RollOptions
from jaxroll.testing.check import ROLL_ALL, check_roll
from jaxroll.testing.generate import random_program


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of one random program.

  Attributes:
    seed: of `random_program` and `random_options`.
    description: of the program.
    planted: how often its body occurs unspoiled, else 0.
    rolls: rolls made of its values' program, at any depth.
    error: why the rolled program is wrong, or the pass's own error; else ''.
  """

  seed: int
  description: str
  planted: int
  rolls: int
  error: str


def random_options(seed: int) -> RollOptions:
  """Options of the pass for the random program of this seed: mostly such as roll all that can be rolled."""
  random = np.random.RandomState(seed ^ 0x5EED)
  if random.rand() < 0.4:
    return ROLL_ALL
  strategy = ("scan", "scan", "auto", "fence", "call", "inline")[random.randint(6)]
  return RollOptions(
      strategy=strategy, optimize_for=AIMS[random.randint(len(AIMS))],
      max_copy_bytes=(None, None, 64)[random.randint(3)], min_trip_count=int(random.randint(2, 5)),
      min_body_eqns=int(random.randint(1, 6)), strict=True)


def check_program(seed: int, grad: bool = True, compiled: bool = False) -> Outcome:
  """Rolls the random program of this seed and compares results bit for bit.

  Args:
    seed: see `random_program`.
    grad: compare its gradient, too, if it has one.
    compiled: compare everything that `check_roll` does, compiled and under `jax.vmap`, too.
  """
  program, rolls = random_program(seed), 0
  try:
    report = check_roll(program.fun, *program.args, options=random_options(seed), grad=grad, vmap=compiled,
                        compiled=compiled, ulps=program.ulps)
    rolls, error = len(report.rolls), ""
  except Exception as caught:  # a wrong result or a defect of the pass: both are what this looks for
    error = f"{type(caught).__name__}: {caught}"
  return Outcome(seed, program.description, program.planted, rolls, error)


def fuzz(seeds: Iterable[int], grad_every: int = 2, compiled_every: int = 100,
         report: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
  """The outcomes of the random programs of these seeds.

  Args:
    seeds: integers.
    grad_every: gradients of seeds divisible by it are compared; 0 for none.
    compiled_every: seeds divisible by it are also compiled; 0 for none.
    report: called with each outcome.
  """
  outcomes = []
  for seed in seeds:
    outcome = check_program(
        seed, bool(grad_every) and seed % grad_every == 0, bool(compiled_every) and seed % compiled_every == 0)
    outcomes.append(outcome)
    report(outcome)
  return outcomes


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog="python -m jaxroll.testing", description=__doc__)
  parser.add_argument("--programs", type=int, default=20_000, help="how many")
  parser.add_argument("--seed", type=int, default=0, help="the seed of the first program; the next has the next")
  parser.add_argument("--start", type=int, default=0, help="programs to skip, to go on where an earlier run stopped")
  parser.add_argument("--grad", type=int, default=2, metavar="K", help="gradients of each K-th program; 0: of none")
  parser.add_argument("--compiled", type=int, default=100, metavar="K", help="compile each K-th program; 0: none")
  options = parser.parse_args(argv)
  start, counts = time.perf_counter(), dict.fromkeys(("programs", "rolled", "rolls", "mismatches"), 0)
  memory = _memory_mb()

  def report(outcome: Outcome) -> None:
    nonlocal memory
    counts["programs"] += 1
    counts["rolls"] += outcome.rolls
    counts["rolled"] += outcome.rolls > 0
    if outcome.error:
      counts["mismatches"] += 1
      print(f"\nseed {outcome.seed}: {outcome.description}\n{outcome.error}\n", flush=True)
    if counts["programs"] % 500 == 0:
      print(_line(counts, time.perf_counter() - start), flush=True)
      if _memory_mb() > memory + 4096:
        jax.clear_caches()
        memory = _memory_mb()

  fuzz(range(options.seed + options.start, options.seed + options.programs), options.grad, options.compiled, report)
  print("done:", _line(counts, time.perf_counter() - start))
  return 1 if counts["mismatches"] else 0


def _line(counts: dict[str, int], seconds: float) -> str:
  return (f"{counts['programs']:,} programs, {counts['rolled']:,} rolled, {counts['rolls']:,} rolls, "
          f"{counts['mismatches']} mismatches, {seconds:.0f} s")


def _memory_mb() -> float:
  """The peak of this process's memory."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
  sys.exit(main())
