"""What the examples share: compile a function stage by stage, run each jit in a fresh process, print what came out.

Times are taken twice. Wall time is what you wait for. CPU time is the work of all the process's threads together:
larger where XLA compiles in parallel, and hardly touched by what else the machine is doing, so the one to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np

import jaxroll
from jaxroll.fingerprint import distinct_size
from jaxroll.options import AIMS, STRATEGIES

JITS = {"jax": "jax.jit", "roll": "roll_jit"}
STAGES = ("trace", "pass", "lower", "compile")


def add_options(parser) -> None:
  """Adds to an argument parser the options that every example has."""
  group = parser.add_argument_group("measuring")
  group.add_argument("--jit", choices=(*JITS, "both"), default="both",
                     help="compile with jax.jit, with jaxroll.roll_jit, or run both, each in a process of its own, "
                          "and compare them")
  group.add_argument("--strategy", choices=STRATEGIES, default="auto",
                     help="how roll_jit rewrites repeated code, see jaxroll.RollOptions")
  group.add_argument("--optimize-for", choices=AIMS, default="balanced",
                     help="what roll_jit aims at where the strategy is 'auto', see jaxroll.RollOptions")
  group.add_argument("--json", metavar="FILE", help="also write everything that was measured to this file")


def count(text: str) -> int:
  """A positive integer, for the parser."""
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
  return int(text)


@dataclasses.dataclass
class Run:
  """One jit at work on one example: does the timing, tells on stderr how far it is, keeps the numbers.

  Attributes:
    jit: 'jax' or 'roll'.
    strategy, optimize_for: the options of 'roll'.
    about: the example's size, in words.
    machine: JAX's version and the device.
    wall, cpu: seconds per stage of compilation. Tracing is split in two: 'trace' is the user's function, 'pass' all
      that jaxroll adds to it.
    temp_bytes: what the program needs while it runs, besides its arguments and results.
    step_wall, step_cpu: seconds per training step.
    losses: the loss of each step.
    heldout: the loss on data that was not trained on.
    report: what jaxroll did, as text; empty for 'jax'.
  """

  jit: str
  strategy: str = "auto"
  optimize_for: str = "balanced"
  about: str = ""
  machine: str = ""
  wall: dict[str, float] = dataclasses.field(default_factory=dict)
  cpu: dict[str, float] = dataclasses.field(default_factory=dict)
  temp_bytes: int = 0
  step_wall: list[float] = dataclasses.field(default_factory=list)
  step_cpu: list[float] = dataclasses.field(default_factory=list)
  losses: list[float] = dataclasses.field(default_factory=list)
  heldout: float = float("nan")
  report: str = ""

  @property
  def name(self) -> str:
    return JITS[self.jit]

  def wrap(self, fun, **jit_options):
    """`fun` under this run's jit."""
    if self.jit == "jax":
      return jax.jit(fun, **jit_options)
    options = jaxroll.RollOptions(strategy=self.strategy, optimize_for=self.optimize_for)
    return jaxroll.roll_jit(fun, roll=options, **jit_options)

  def compile(self, fun, *args, **jit_options):
    """`fun`, compiled for these arguments, with every stage timed."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache was not compiled
    self.machine = f"jax {jax.__version__} on {jax.devices()[0].device_kind}"
    jitted = self.wrap(fun, **jit_options)
    with jaxroll.collect_reports() as reports, self._timed("trace", "trace" if self.jit == "jax" else "trace, pass"):
      traced = jitted.trace(*args)
    if reports:
      report = reports[-1]
      self.report = str(report)
      added = 1 - report.seconds["trace"] / self.wall["trace"]  # the pass's share, the same for both clocks
      for seconds in (self.wall, self.cpu):
        seconds["pass"] = added * seconds["trace"]
        seconds["trace"] -= seconds["pass"]
    with self._timed("lower"):
      lowered = traced.lower()
    with self._timed("compile"):
      compiled = lowered.compile()
    memory = compiled.memory_analysis()
    self.temp_bytes = memory.temp_size_in_bytes if memory else 0
    return compiled

  def step(self, compiled, *args):
    """The result of a compiled training step, when it is there."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(compiled(*args))
    self.step_wall.append(time.perf_counter() - wall)
    self.step_cpu.append(time.process_time() - cpu)
    return result

  def tell(self, loss, steps: int) -> None:
    """Keeps the loss of the step just made, and prints one of every tenth part of the steps."""
    self.losses.append(float(loss))
    done = len(self.losses)
    if done == 1 or done % max(steps // 10, 1) == 0:
      print(f"{self.name:<9} step {done:>{len(str(steps))}} of {steps}: loss {self.losses[-1]:.4f}, "
            f"{1e3 * self.step_wall[-1]:.0f} ms", file=sys.stderr, flush=True)

  @contextlib.contextmanager
  def _timed(self, stage: str, label: str = ""):
    with ticking(f"{self.name:<9} {label or stage:<11}"):
      wall, cpu = time.perf_counter(), time.process_time()
      yield
      self.wall[stage], self.cpu[stage] = time.perf_counter() - wall, time.process_time() - cpu


@contextlib.contextmanager
def ticking(label: str):
  """Shows on stderr that something is under way and for how long: in place on a terminal, else a line every 10 s."""
  terminal = sys.stderr.isatty()
  start = time.perf_counter()
  over = threading.Event()

  def show(after: str) -> None:
    print(f"{label} {time.perf_counter() - start:6.1f} s{after}", end="", file=sys.stderr, flush=True)

  def tick() -> None:
    while not over.wait(0.2 if terminal else 10):
      show(" ...\r" if terminal else " so far\n")

  ticker = threading.Thread(target=tick, daemon=True)
  ticker.start()
  try:
    yield
  finally:
    over.set()
    ticker.join()
  show("    \n" if terminal else "\n")


def count_program(jitted, *args) -> tuple[int, int, int, int]:
  """How long a jitted function's program is for these arguments, without compiling it.

  Returns:
    Its equations at top level, all equations with nested ones (code that is shared once), lines of the printed jaxpr,
    and lines of StableHLO.
  """
  traced = jitted.trace(*args)
  closed = traced.jaxpr
  lines = [len(text.splitlines()) for text in (str(closed), traced.lower().as_text())]
  return len(closed.jaxpr.eqns), distinct_size(closed), *lines


def run_each(script: str, arguments: list[str]) -> list[Run]:
  """Runs the script once per jit, each time in a fresh process, so that neither finds warm caches or used memory."""
  runs = []
  with tempfile.TemporaryDirectory() as directory:
    for jit in JITS:
      file = str(Path(directory, jit))
      command = [sys.executable, script, *arguments, "--jit", jit, "--json", file]
      if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        raise SystemExit(f"{script} --jit {jit} failed; its messages are above")
      runs += load(file)
  return runs


def run(script: str, arguments: list[str], args, train) -> None:
  """Does what `add_options` offers: runs `train`, a function of a `Run` that returns it, under the jits asked for.

  `script` and its `arguments` are started anew for each jit where both are asked for; `args` are the arguments parsed.
  """
  if args.jit == "both":
    runs = run_each(script, arguments)
  else:
    runs = [train(Run(args.jit, args.strategy, args.optimize_for))]
  if args.json:
    save(args.json, runs)
  print_runs(runs)


def save(file: str, runs: list[Run]) -> None:
  """Writes runs to a file, as JSON."""
  Path(file).write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=1))


def load(file: str) -> list[Run]:
  """The runs that `save` wrote."""
  return [Run(**fields) for fields in json.loads(Path(file).read_text())]


def print_runs(runs: list[Run]) -> None:
  """Prints the times of one run, or of two side by side, their losses, and what jaxroll did."""
  print(f"\n{runs[0].about}; {runs[0].machine}\n")
  _print_times(runs)
  print()
  _print_losses(runs)
  for run in runs:
    if run.report:
      print(f"\nWhat {run.name} did:\n{run.report}")


def _print_times(runs: list[Run]) -> None:
  names = "".join(f"{run.name:>11}" for run in runs)
  versus = f"{'ratio':>8}" if len(runs) == 2 else ""
  gap = " " * 6
  width = len(names + versus)
  print(f"{'':<14}{gap}{'wall time':>{width}}{gap}{'CPU time':>{width}}")
  print(f"{'':<14}{gap}{names}{versus}{gap}{names}{versus}")

  def row(label, *clocks, show=_seconds):
    print(f"{label:<14}" + "".join(gap + _cells(values, show) for values in clocks))

  for stage in STAGES:
    row(stage, *([getattr(run, clock).get(stage) for run in runs] for clock in ("wall", "cpu")))
  row("first step", [run.step_wall[0] for run in runs], [run.step_cpu[0] for run in runs])
  row("sum of these", [sum(run.wall.values()) + run.step_wall[0] for run in runs],
      [sum(run.cpu.values()) + run.step_cpu[0] for run in runs])
  row("median step", [_median(run.step_wall) for run in runs], [_median(run.step_cpu) for run in runs])
  row("temp memory", [run.temp_bytes for run in runs], show=_bytes)


def _print_losses(runs: list[Run]) -> None:
  steps = len(runs[0].losses)
  shown = sorted({0, *range(steps // 10 - 1, steps, max(steps // 10, 1)), steps - 1} - {-1})
  print(f"{'loss':<20}" + "".join(f"{run.name:>11}" for run in runs) + f"{'difference':>14}" * (len(runs) == 2))
  rows = [(f"step {i + 1}", [run.losses[i] for run in runs]) for i in shown]
  rows.append(("held-out", [run.heldout for run in runs]))
  for label, losses in rows:
    difference = f"{losses[1] - losses[0]:>14.1e}" if len(runs) == 2 else ""
    print(f"{label:<20}" + "".join(f"{loss:>11.5f}" for loss in losses) + difference)
  if len(runs) == 2:
    apart = max(abs(a - b) for a, b in zip(*(run.losses for run in runs)))
    spacing = np.spacing(np.float32(max(runs[0].losses)))
    print(f"At most {apart:.1e} apart in {steps} steps; float32 numbers of this size are spaced {spacing:.1e}.")


def _cells(values, show) -> str:
  """The values of all runs, and for two runs how many times the second goes into the first."""
  cells = "".join(f"{'-' if value is None else show(value):>11}" for value in values)
  if len(values) == 2:
    both = None not in values and values[1]
    cells += f"{f'{values[0] / values[1]:.1f} x' if both else '':>8}"
  return cells


def _median(step_times: list[float]) -> float:
  return statistics.median(step_times[1:] or step_times)  # the first one is a warm-up


def _seconds(seconds: float) -> str:
  return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def _bytes(number: float) -> str:
  return f"{number / 1e6:.1f} MB"
