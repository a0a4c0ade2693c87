"""The pass, end to end: analyze, find rolls, choose, schedule, rewrite; then the same within the bodies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
import warnings
from collections import defaultdict
from typing import Any, Callable

import jax

from jaxroll import compat, cost, draws, exempt, where
from jaxroll.bodies import for_cpu
from jaxroll.duplicates import without_duplicates
from jaxroll.fingerprint import Fingerprinter, distinct_size, nested_jaxprs
from jaxroll.inlining import write_out
from jaxroll.nested import REWRITABLE, map_nested
from jaxroll.options import RollOptions
from jaxroll.order import regroup
from jaxroll.outlining import outline
from jaxroll.plan import find_rolls
from jaxroll.program import analyze
from jaxroll.report import RollReport, Refusal, RollRecord
from jaxroll.rewrite import evaluate, loop_body
from jaxroll.threefry import spell_out

_MAX_DEPTH = 32


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
    with _without_collections():
      rolled = run.rewrite(closed_jaxpr, 0)
      with run.stage("random"):
        rolled = run.spell_out(rolled)
    if rolled is not closed_jaxpr:
      if options.is_strict:
        with run.stage("check"):
          compat.check_jaxpr(rolled)
    report = RollReport(
        rolls=tuple(run.records), refusals=tuple(run.refusals), eqns_before=before, eqns_after=len(rolled.jaxpr.eqns),
        size_before=distinct_size(closed_jaxpr), size_after=distinct_size(rolled),
        draws=run.draws, exempt=run.exempt, seconds=dict(run.seconds))
  except Exception as error:  # by intent: no defect of the pass may reach the user as a crash
    if options.is_strict:
      raise
    message = f"{type(error).__name__}: {error}"
    warnings.warn(
        "jaxroll met an internal error and compiles this program as written. Please report it with the "
        f"program, or with jax.make_jaxpr's output, to jaxroll's issue tracker. {message}", RuntimeWarning, stacklevel=2)
    return closed_jaxpr, RollReport(eqns_before=before, eqns_after=before, error=message)
  return rolled, report


@contextlib.contextmanager
def _without_collections():
  """No garbage collection within: the pass makes many objects, little garbage, and each collection walks the whole heap."""
  is_on = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    if is_on:
      gc.enable()


def _check_types(closed, rolled) -> None:
  """Raises `RollError` unless both jaxprs have the same types and effects."""
  for what, a, b in (("input types", closed.in_avals, rolled.in_avals),
                     ("result types", closed.out_avals, rolled.out_avals),
                     ("effects", closed.effects, rolled.effects)):
    if a != b:
      raise RollError(f"the rolled program's {what} differ: {a} became {b}")


class _Pass:
  """One run of the pass over a jaxpr and all that is nested in it."""

  def __init__(self, options: RollOptions, platform: str | None, several_devices: bool):
    self.options, self.platform, self.several_devices = options, platform, several_devices
    self.fingerprinter = Fingerprinter()
    self.records: list[RollRecord] = []
    self.refusals: list[Refusal] = []
    self.exempt = 0
    self.seconds: dict[str, float] = defaultdict(float)
    self.draws = 0
    self._done: dict[int, tuple] = {}  # by id: the rewritten jaxpr, and the one with this id, kept alive
    self._functions: dict = {}  # those that loops call, by body
    self._first: dict[tuple, Any] = {}  # by type and fingerprint
    self._work: dict = {}  # of nested jaxprs

  @contextlib.contextmanager
  def stage(self, name: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      self.seconds[name] += time.perf_counter() - start

  def rewrite(self, jaxpr, depth: int):
    """A closed jaxpr that computes what `jaxpr`, closed or open, does with its repeats rolled; or the same object."""
    first = self.shared(jaxpr) if depth else jaxpr
    if id(first) not in self._done:
      rolled = self._rewrite(first, depth) if depth <= _MAX_DEPTH and compat.is_rewritable(first) else first
      self._done[id(first)] = (rolled, first)
      self._done[id(rolled)] = (rolled, rolled)  # what the pass wrote, it does not roll again
    rolled, _ = self._done[id(first)]
    return jaxpr if rolled is first else rolled

  def shared(self, jaxpr):
    """The first nested jaxpr seen that is equal to this one, so that equal bodies become one function."""
    if id(jaxpr) in self._done:
      return jaxpr
    key = self.fingerprinter.find(jaxpr)
    return jaxpr if key is None else self._first.setdefault((type(jaxpr), key), jaxpr)

  def _rewrite(self, jaxpr, depth: int):
    place = len(self.records)
    closed = compat.as_closed(jaxpr)
    later = self._nearly_alike(closed)
    self.exempt += sum([self.fingerprinter.size(e) for e in closed.jaxpr.eqns if exempt.is_exempt(e)])
    nested = self._nested(closed, depth, lambda inner: id(inner) not in later)
    with self.stage("analyze"):
      written = write_out(nested, self.fingerprinter)
    rolled = self._roll(written, depth, place, later)
    rolled = self._nested_later(nested if rolled is written else rolled, depth, later)
    if rolled is closed:
      return jaxpr
    rolled = compat.with_effects_of(closed, rolled)
    _check_types(closed, rolled)
    return rolled

  def _nearly_alike(self, closed) -> dict[int, Any]:
    """The jaxprs, by id, within equations that are the same but for static operands.

    They wait until the equations are rolled, so that the first one's is rewritten and not each of them. So do
    those of a call within which an equation is alike to one that stands by itself: they may be one repeat.
    """
    groups: dict[int, list] = defaultdict(list)
    for eqn in closed.jaxpr.eqns:
      if eqn.primitive.name in REWRITABLE:
        fingerprint, statics = self.fingerprinter.equation(eqn)
        if fingerprint >= 0 and statics:
          groups[fingerprint].append((eqn, tuple(map(self.fingerprinter.static, statics))))
    alike = {f for f, group in groups.items() if len({s for _, s in group}) >= self.options.min_trip_count}
    if alike and len(groups) > len(alike):
      within = {f: self._within(group[0][0]) for f, group in groups.items()}
      alike |= {f for a in alike for f in within[a] & groups.keys()} | {f for f in groups if not within[f].isdisjoint(alike)}
    return {id(jaxpr): jaxpr for f in alike for eqn, _ in groups[f] for jaxpr in nested_jaxprs(eqn.params)}

  def _within(self, eqn) -> frozenset[int]:
    """The fingerprints of the equations in an equation's jaxprs that hold jaxprs themselves."""
    return frozenset([self.fingerprinter.equation(e)[0] for jaxpr in nested_jaxprs(eqn.params)
                      for e in compat.as_closed(jaxpr).jaxpr.eqns if e.primitive.name in REWRITABLE])

  def _roll(self, closed, depth: int, place: int, later: dict[int, Any]):
    with self.stage("analyze"):
      program = without_duplicates(analyze(closed, self.fingerprinter), self._work)
      as_written, closed = closed, program.closed
    with self.stage("find"):
      rolls, refused = find_rolls(program, self.options)
    gathers = self.options.strategy == "auto" and self.platform == "cpu" and not self.several_devices
    if gathers and draws.how_many(program) >= self.options.min_trip_count:
      plan, _, _ = self._chosen(program, rolls)
      with self.stage("find"):
        gathered = draws.gather(program, cost.unscanned(program, plan), self.options.min_trip_count)
        if gathered is not None:
          program, rolls, refused = gathered, *find_rolls(gathered, self.options)
    is_apart = False
    if not self.several_devices:
      with self.stage("order"):
        program, rolls, refused, is_apart = regroup(
            program, rolls, refused, self.options, cost.min_saved(self.options))
    plan, reasons, too_dear = self._chosen(program, rolls)
    self.refusals += [cost.located(program, r) for r in (*refused, *too_dear)]
    rolled = closed if plan is None else self._evaluated(closed, program, plan, reasons, depth, place)
    if is_apart:
      rolled = self._outlined(rolled, program if plan is None else None, depth, later)
    return as_written if rolled is closed else rolled

  def _evaluated(self, closed, program, plan, reasons, depth: int, place: int):
    with self.stage("rewrite"):
      bodies = [None if loop is None else self._body(program, plan, loop) for loop in plan.loops]
    self.records[place:place] = [cost.record(program, plan, k, reasons[k], depth) for k, loop in enumerate(plan.loops) if loop]
    bodies = [body if body is None or loop.strategy == "batch" else self.rewrite(self.shared(body), depth + 1)
              for body, loop in zip(bodies, plan.loops)]
    with self.stage("rewrite"):
      spell = functools.partial(self.spell_out, fenced=False)
      fun = lambda *args: evaluate(program, plan, bodies, self._functions, self.platform, spell, args)
      return jax.make_jaxpr(fun)(*closed.in_avals)

  def _outlined(self, closed, program, depth: int, later: dict[int, Any]):
    """The closed jaxpr, whose analysis `program` is if not None, with blocks that stand apart as calls."""
    strategy = self.options.strategy
    if strategy not in ("auto", "fence", "call"):
      return closed
    if strategy == "auto":
      strategy = "fence"
    whole = self._nested_later(closed, depth, later)
    with self.stage("order"):
      program = analyze(whole, self.fingerprinter) if program is None or whole is not closed else program
      prepare = functools.partial(self._prepared, strategy=strategy)
      found = outline(program, self.options, strategy, self.platform, prepare)
    if found is None:
      return closed
    self.records += [dataclasses.replace(record, depth=depth) for record in found[1]]
    return found[0]

  def _chosen(self, program, rolls):
    with self.stage("choose"):
      return cost.choose(program, rolls, self.options, self.platform, self.several_devices)

  def _body(self, program, plan, loop):
    return self._prepared(loop_body(program, plan, loop), loop.strategy)

  def _prepared(self, body, strategy: str):
    """A body in the form that suits where and how it will run."""
    if self.platform == "cpu" and strategy in ("scan", "call", "fence") and not self.several_devices:
      return for_cpu(body, inlined=strategy == "fence")
    return body

  def spell_out(self, closed, *, fenced: bool = True):
    mode = self.options.random_bits
    if self.several_devices and mode == "auto":
      mode = "keep"  # XLA divides JAX's own code among the devices
    closed, count = spell_out(closed, mode, self.platform, fenced=fenced)
    self.draws += count
    return closed

  def _nested(self, closed, depth: int, which: Callable[[Any], bool]):
    """Rolls within the jaxprs that equations hold, those of them that `which` tells."""
    eqns = closed.jaxpr.eqns
    rolled = [self._equation(e, depth, which) for e in eqns]
    return compat.replace_eqns(closed, rolled) if any([a is not b for a, b in zip(eqns, rolled)]) else closed

  def _nested_later(self, closed, depth: int, later: dict[int, Any]):
    """Rolls within those jaxprs of `later` that are still there."""
    return self._nested(closed, depth, lambda inner: id(inner) in later) if later else closed

  def _equation(self, eqn, depth: int, which: Callable[[Any], bool]):
    if exempt.is_exempt(eqn):
      return eqn
    rewrite = lambda inner: self._inner(inner, depth) if which(inner) else inner
    return map_nested(eqn, rewrite) if eqn.primitive.name in REWRITABLE else eqn

  def _inner(self, jaxpr, depth: int):
    options = self.options
    least = max(options.min_trip_count * options.min_body_eqns, cost.min_saved(options) + 1)  # the first iteration saves none
    return jaxpr if self.fingerprinter.jaxpr_size(jaxpr) < least else self.rewrite(jaxpr, depth + 1)
