"""The pass, end to end: analyze, find rolls, choose, schedule, rewrite; then the same within the bodies."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import defaultdict

import jax

from jaxroll import compat, cost, draws, exempt, where
from jaxroll.convolutions import canonical_convolutions
from jaxroll.fingerprint import Fingerprinter, distinct_size
from jaxroll.options import RollOptions
from jaxroll.plan import find_rolls
from jaxroll.program import analyze
from jaxroll.report import RollReport, Refusal, RollRecord
from jaxroll.rewrite import evaluate, loop_body
from jaxroll.threefry import spell_out

_MAX_DEPTH = 8
_RECURSE = frozenset({"jit"})


class RollError(RuntimeError):
  """The pass made a mistake and noticed; the program as written is not to blame."""


def roll_jaxpr(closed_jaxpr, options: RollOptions | None = None, *, platform: str | None = None,
               several_devices: bool = False):
  """Rewrites the repeats of a jaxpr as loops.

  Args:
    closed_jaxpr: a `jax.extend.core.ClosedJaxpr`, as `jax.make_jaxpr` returns it.
    options: what the pass may do, a `RollOptions`.
    platform: where the program will run, such as ``'cpu'``; by default where JAX would run it now.
    several_devices: whether arrays may lie on several devices even where their types don't say so.

  Returns:
    A closed jaxpr with inputs and results of the same types, and a `RollReport`.
    Evaluated one primitive at a time, both give the same bits. Where nothing is
    rewritten the very same object comes back.

  Raises:
    RollError, or whatever went wrong: in strict mode only. Otherwise an internal
    error gives a warning, the same object back, and `RollReport.error`.

  >>> import jax, jax.numpy as jnp
  >>> def f(ws, x):
  ...   for w in ws:
  ...     x = jnp.tanh(x @ w) + x * 0.5
  ...   return x
  >>> closed = jax.make_jaxpr(f)([jnp.ones((4, 4))] * 6, jnp.ones(4))
  >>> rolled, report = roll_jaxpr(closed, RollOptions(strategy='scan'))
  >>> [(r.trip_count, r.body_eqns) for r in report.rolls]
  [(6, 4)]
  """
  if not isinstance(closed_jaxpr, compat.ClosedJaxpr):
    raise TypeError(f"roll_jaxpr takes a closed jaxpr, as jax.make_jaxpr(fun)(*args) returns it, not {closed_jaxpr!r:.80}")
  options = options or RollOptions()
  before = len(closed_jaxpr.jaxpr.eqns)
  unchanged = RollReport(eqns_before=before, eqns_after=before)
  if options.is_off:
    return closed_jaxpr, unchanged
  try:
    run = _Pass(options, platform or where.default_platform(),
                several_devices or where.is_on_several_devices(closed_jaxpr))
    rolled = run.rewrite(closed_jaxpr, 0)
    with run.stage("random"):
      rolled, count = spell_out(rolled, options.random_bits, run.platform)
    if rolled is not closed_jaxpr:
      with run.stage("check"):
        _check(closed_jaxpr, rolled, options)
    report = RollReport(
        rolls=tuple(run.records), refusals=tuple(run.refusals), eqns_before=before, eqns_after=len(rolled.jaxpr.eqns),
        size_before=distinct_size(closed_jaxpr), size_after=distinct_size(rolled),
        draws=count, exempt=run.exempt, seconds=dict(run.seconds))
  except Exception as error:  # by intent: no defect of the pass may reach the user as a crash
    if options.is_strict:
      raise
    message = f"{type(error).__name__}: {error}"
    warnings.warn(
        "jaxroll met an internal error and compiles this program as written. Please report it with the "
        f"program, or with jax.make_jaxpr's output, to jaxroll's issue tracker. {message}", RuntimeWarning, stacklevel=2)
    return closed_jaxpr, RollReport(eqns_before=before, eqns_after=before, error=message)
  return rolled, report


def _check(closed, rolled, options) -> None:
  """Raises `RollError` unless both jaxprs have the same types."""
  for what, a, b in (("input", closed.in_avals, rolled.in_avals), ("result", closed.out_avals, rolled.out_avals)):
    if list(a) != list(b):
      raise RollError(f"the rolled program's {what} types differ: {list(a)} became {list(b)}")
  if options.is_strict:
    compat.check_jaxpr(rolled)


class _Pass:
  """One run of the pass over a jaxpr and all that is nested in it."""

  def __init__(self, options: RollOptions, platform: str | None, several_devices: bool):
    self.options, self.platform, self.several_devices = options, platform, several_devices
    self.fingerprinter = Fingerprinter()
    self.records: list[RollRecord] = []
    self.refusals: list[Refusal] = []
    self.exempt = 0
    self.seconds: dict[str, float] = defaultdict(float)
    self._done: dict[int, tuple] = {}

  @contextlib.contextmanager
  def stage(self, name: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds[name] += time.perf_counter() - start

  def rewrite(self, closed, depth: int):
    """The closed jaxpr with its repeats rolled, or the same object."""
    if depth > _MAX_DEPTH or compat.is_high(closed):
      return closed
    known = self._done.get(id(closed))
    if known is None:
      known = self._done[id(closed)] = (self._rewrite(closed, depth), closed)
    return known[0]

  def _rewrite(self, closed, depth: int):
    place = len(self.records)
    rolled = self._roll(self._nested(closed, depth), depth, place)
    self._done[id(rolled)] = (rolled, rolled)  # what the pass wrote, it does not roll again
    return rolled

  def _roll(self, closed, depth: int, place: int):
    program, plan, reasons, refused = self._plan(closed)
    if self.options.strategy == "auto" and self.platform == "cpu" and not self.several_devices:
      with self.stage("find"):
        gathered = draws.gather(program, cost.unscanned(program, plan), self.options.min_trip_count)
      if gathered is not None:
        program, plan, reasons, refused = self._plan(gathered)
    self.refusals += [cost.located(program, r) for r in refused]
    if plan is None:
      return closed
    with self.stage("rewrite"):
      bodies = [None if loop is None else self._body(program, plan, loop) for loop in plan.loops]
    self.records[place:place] = [cost.record(program, plan, k, reasons[k], depth) for k, loop in enumerate(plan.loops) if loop]
    bodies = [None if body is None else self.rewrite(body, depth + 1) for body in bodies]
    with self.stage("rewrite"):
      return jax.make_jaxpr(lambda *args: evaluate(program, plan, bodies, self.platform, args))(*closed.in_avals)

  def _plan(self, closed):
    with self.stage("analyze"):
      program = analyze(closed, self.fingerprinter)
    with self.stage("find"):
      rolls, refused = find_rolls(program, self.options)
    with self.stage("choose"):
      plan, reasons, too_dear = cost.choose(program, rolls, self.options, self.platform, self.several_devices)
    return program, plan, reasons, [*refused, *too_dear]

  def _body(self, program, plan, loop):
    body = loop_body(program, plan, loop)
    if self.platform == "cpu" and loop.strategy in ("scan", "call"):  # where XLA does not inline the body
      body = canonical_convolutions(body)
    return body

  def _nested(self, closed, depth: int):
    """Rolls within the jitted functions that a jaxpr calls."""
    eqns = list(closed.jaxpr.eqns)
    changed = False
    for i, eqn in enumerate(eqns):
      if exempt.is_exempt(eqn):
        self.exempt += self.fingerprinter.size(eqn)
        continue
      if eqn.primitive.name not in _RECURSE:
        continue
      inner = eqn.params["jaxpr"]
      if len(inner.jaxpr.eqns) < self.options.min_trip_count:
        continue
      rolled = self.rewrite(inner, depth + 1)
      if rolled is not inner:
        eqns[i] = eqn.replace(params={**eqn.params, "jaxpr": rolled})
        changed = True
    return compat.replace_eqns(closed, eqns) if changed else closed
