"""Which rolls pay, and how to rewrite each: `scan`, `fence`, `call`, `inline`, or not at all.

A scan compiles its body once, but its inputs must lie stacked in one array: what
does not lie so already is copied, and so is what is taken apart afterwards. A
fence copies nothing and compiles every iteration, but each by itself. So: scan
what can be scanned for (almost) nothing, fence the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from jaxroll import compat, where
from jaxroll.options import RollOptions
from jaxroll.draws import is_random
from jaxroll.graph import components
from jaxroll.parts import One, Part, Pieces, Woven
from jaxroll.plan import Carry, Const, Roll, Slices, Xs, saved
from jaxroll.program import Program, aval_bytes, reckoned
from jaxroll.report import Refusal, RollRecord, human_bytes
from jaxroll.rewrite import constant_xs, is_indexed
from jaxroll.schedule import STACKING, Loop, Schedule, schedule
from jaxroll.work import Work, equation_work

# Rolls that save fewer equations are left alone: what XLA compiles in no time needs no help.
_MIN_SAVED = 60
# The bytes that a scan may copy, as a part of the bytes that its iterations write.
_COPIED_PER_WRITTEN = {"balanced": 0.02, "run": 0.0, "compile": float("inf")}
# Copies of fewer bytes than this stay in a cache: so much more of them may be made.
_IN_CACHE, _CACHED_FACTOR = 1 << 18, 3
# The bytes of random values that may be drawn before they are needed, as a part of the program's input bytes.
_EARLY_PER_INPUT = 0.01
_KEY_BYTES = 1 << 10  # of a value that may be a key, at most
_LEAST_SEGMENT = 3  # A loop over random bits is cut so that no piece has fewer iterations.
# A fence takes some microseconds on CPU. It is put around bodies of at least this many equations, which XLA is
# slow to compile, or of this many seconds' work, which hardly notice it.
_FENCED_BODY = 40
_FENCED_SECONDS = 100e-6
_FENCED_SAVED = 600  # or around any of which there are many, as unrolled recurrences are what XLA is slowest with,
_FENCED_LEAST = 3e-6  # and which are not too quick: forty layers of 5 us ran 1.18 as long
# And sooner around those in which products read what fuses through many iterations, such as an LSTM's cell: each product
# makes all the steps before anew (`--only recurrence`).
_FENCED_SAVED_CHAINED = 350
# A step of a loop takes XLA:CPU about half a microsecond. Where an iteration takes less than this, some are made at
# once: 50 leapfrog steps in 30 dimensions run in .97 of the time unrolled, 1.35 without this (jax 0.10.2 and 0.12).
_UNROLLED_SECONDS, _UNROLLED = 2e-6, 4
# What a loop carries for several iterations moves on by a place in each: where the moves take a larger part of an iteration
# than this, as many iterations are made at once as bring all back to where they were, and nothing moves. A concatenation
# of the last four results: 1.25 as long as unrolled, 1.02 with this.
_MOVED_PART, _LONGEST_TURN = 0.02, 8
# A step that reads what it carries at several places, such as a stencil's, fuses with those before it into a kernel that
# computes each place anew, more of them with each step: `examples/benchmark.py --only heat` compiles in 14 s and runs in
# 22 ms, as a loop in .3 s and .1 ms. From so many steps on a loop also runs faster on small arrays.
# So does one whose results reductions or kernels elsewhere read, each of which makes all the steps before anew: the
# gradient by a parameter of a simulation (`--only control`).
_FUSED_TRIPS = 8
_FLOPS, _BANDWIDTH = 3e10, 1e10  # of a CPU core, roughly
# From so many iterations on, calls kept out of line compile faster than fences, where they are known to survive.
_CALLED_TRIPS = 12
_ROUNDS = 8
_FUSES = "the body fuses into one kernel with its neighbours"


@dataclasses.dataclass(frozen=True)
class Compile:
  """CPU seconds that XLA:CPU takes to compile; only their ratios count.

  Attributes:
    equation: passes over an equation, each time that it stands in the program.
    kernel: code for an equation of a body, once: XLA compiles the equal kernels of fenced iterations once.
    stack: reading or writing one array of a scan's xs or ys, a kernel each.
    copy: one operation that stacks or takes apart.
  """

  equation: float
  kernel: float
  stack: float
  copy: float

  def fence(self, estimate: Estimate) -> float:
    return estimate.body * (self.equation * estimate.trips + self.kernel)

  def scan(self, estimate: Estimate) -> float:
    return (estimate.body * (self.equation + self.kernel) + self.stack * estimate.stacks
            + self.copy * estimate.operations)


# As `examples/fit_costs.py` fits them, between what jax 0.10.2 and 0.12 give.
COMPILE = Compile(equation=0.24e-3, kernel=4.5e-3, stack=15e-3, copy=1e-3)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """What a roll saves and costs, if scanned.

  Attributes:
    saved: equations that XLA need not compile, nested ones counted.
    copied: bytes stacked or taken apart each time that the program runs.
    operations: how many operations stack or take apart.
    stacks: how many arrays its xs and ys are.
    unread: bytes of stacked results that nothing reads.
    work: what all the iterations do.
    body: equations of an iteration, nested ones counted.
    trips: iterations.
    is_random: whether the body does nothing but derive keys and draw random bits.
    is_independent: whether no iteration reads what another made.
    is_stencil: whether many iterations, which fuse, read what they carry at several places.
    is_remade: whether reductions, or kernels elsewhere, read what many iterations, which fuse, make one from the other.
    is_chained: whether the body's kernels do, which make more of it anew than the roll saves.
    streamed: bytes of stacked arrays that each iteration reads and writes, such as the residuals of a gradient.
  """

  saved: int
  copied: int
  operations: int
  stacks: int
  unread: int
  work: Work
  body: int
  trips: int
  is_random: bool = False
  is_independent: bool = False
  is_stencil: bool = False
  is_remade: bool = False
  is_chained: bool = False
  streamed: int = 0

  @property
  def is_slow_fused(self) -> bool:
    """Whether XLA fuses the iterations to their disadvantage, to be kept from it."""
    return self.is_stencil or self.is_remade

  @property
  def seconds(self) -> float:
    """A rough guess at how long an iteration runs on a CPU."""
    return (self.work.flops / _FLOPS + self.work.bytes / _BANDWIDTH) / self.trips


def min_saved(options: RollOptions) -> int:
  """The fewest equations that a roll must save."""
  return _MIN_SAVED if options.strategy == "auto" else 1


def choose(program: Program, rolls: list[Roll], options: RollOptions, platform: str | None,
           several_devices: bool = False):
  """The rolls that pay, their schedule, the reason for each one's strategy, and refusals for the others.

  What one roll costs depends on the others (an earlier scan's ys can be read as
  they are), so that the choice is repeated until it no longer changes.
  """
  if options.strategy != "auto":
    strategy, reason = options.strategy, "as asked"
    if strategy == "call" and where.has_explicit_axes(program.closed):
      strategy, reason = "fence", "XLA can't divide calls kept out of line along explicit axes of a mesh"
    plan = schedule(program, rolls, [strategy] * len(rolls)) if rolls else None
    plan = plan and dataclasses.replace(plan, on_one_device=not several_devices)
    return plan, [reason] * len(rolls), []
  memo: dict = {}
  kept, refusals = [], []
  for roll in rolls:
    if saved(program, roll) < _MIN_SAVED:
      refusals.append(Refusal(roll.start, roll.period, roll.trips, f"saves only {saved(program, roll)} equations"))
    else:
      kept.append(roll)
  if not kept:
    return None, [], refusals
  may_inline = options.optimize_for != "compile"
  strategies = ["inline" if may_inline and _only_fuses(program, r, memo) else "scan" for r in kept]
  reasons = [_FUSES if s == "inline" else "nothing to copy" for s in strategies]
  inputs = sum(aval_bytes(v.aval) for v in program.jaxpr.invars)
  for round_ in range(_ROUNDS):
    plan, estimates = _estimated(program, kept, strategies, memo)
    verdicts = {k: _judge(e, inputs, options, platform, several_devices) for k, e in estimates.items()}
    if all(verdict in STACKING for verdict, _ in verdicts.values()):
      for k in _slower_to_compile(plan, {k: estimates[k] for k, v in verdicts.items() if not estimates[k].is_random}):
        verdicts[k] = _aside(estimates[k], options, platform, several_devices), _slower(estimates[k])
    before = list(strategies)
    for k, (strategies[k], reason) in verdicts.items():
      reasons[k] = "next to rolls that are not scanned, " * (round_ > 0 and strategies[k] == "fence") + reason
    if strategies == before:
      break
  else:
    plan, estimates = _estimated(program, kept, strategies, memo)
  if several_devices:
    # XLA reduces all summands over the devices at once. And it lays out a slice at an unknown place otherwise.
    plan = dataclasses.replace(_unfenced(program, plan), on_one_device=False)
  else:
    plan = _divided(program, plan, estimates, inputs, options)
    if platform == "cpu":  # convolutions that are summed run beside the next iteration's on other cores
      plan = _unfenced(program, plan, lambda loop: loop.strategy == "fence" and _work(program, loop, memo).convolutions > 0)
  return plan, [r if loop is None else r + _division(loop) for r, loop in zip(reasons, plan.loops)], refusals


def _estimated(program: Program, rolls: list[Roll], strategies: list[str], memo: dict):
  """The schedule by these strategies, and the estimate of each roll that is scanned in it."""
  plan = schedule(program, rolls, strategies)
  return plan, {k: estimate_scan(program, loop, memo, rolls) for k, loop in enumerate(plan.loops)
                if loop and strategies[k] in STACKING}


def _only_fuses(program: Program, roll: Roll, memo: dict) -> bool:
  """Whether iterations, none of which reads what another made, do only what fuses, so that no scan is to be tried."""
  if any(isinstance(s, Carry) for s in roll.inputs):
    return False
  work = [equation_work(program.eqns[roll.start + j], memo) for j in roll.members]
  return not any(w.kernels or w.draws for w in work)


def _division(loop: Loop) -> str:
  """How the iterations are divided, for the report."""
  return f", in {loop.segments} parts" * (loop.segments > 1) + f", {loop.unroll} iterations a step" * (loop.unroll > 1)


def _unfenced(program: Program, plan: Schedule, which=lambda loop: True) -> Schedule:
  """The plan with no fence around sums over the iterations, in those loops that `which` tells."""
  return dataclasses.replace(plan, loops=tuple(
      dataclasses.replace(loop, unfenced=_sums(program, loop)) if loop and which(loop) else loop for loop in plan.loops))


def _work(program: Program, loop: Loop, memo: dict) -> Work:
  """The work of one iteration."""
  work = Work()
  for j in loop.offsets:
    work += equation_work(program.eqns[loop.roll.start + j], memo)
  return work


def _sums(program: Program, loop: Loop) -> frozenset[int]:
  """The carried results of the body that nothing in it reads but the addition that makes the next one."""
  roll = loop.roll
  slot_of, out_of = program.slot_starts(roll.start, roll.period), program.result_starts(roll.start, roll.period)
  readers: dict[int, list[int]] = {}  # by body result, read in the same iteration or as a carry
  for j in loop.offsets:
    for b in roll.bindings[slot_of[j] : slot_of[j + 1]]:
      source = None if b >= 0 else roll.inputs[-1 - b]
      result = b if source is None else source.result if isinstance(source, Carry) else -1
      readers.setdefault(result, []).append(j)
  return frozenset(
      q for q in loop.carried if len(readers.get(q, ())) == 1
      and program.eqns[roll.start + readers[q][0]].primitive.name in ("add", "add_any") and out_of[readers[q][0]] == q)


def unscanned(program: Program, plan: Schedule | None) -> np.ndarray:
  """bool[equations]: which equations no scan computes."""
  free = np.ones(len(program.eqns), bool)
  for loop in plan.loops if plan else ():
    if loop and loop.strategy in STACKING:
      offsets = np.asarray(loop.offsets)
      free[loop.roll.start + (np.arange(loop.roll.trips)[:, None] * loop.roll.period + offsets).ravel()] = False
  return free


def _divided(program: Program, plan: Schedule, estimates: dict[int, Estimate], inputs: int,
             options: RollOptions) -> Schedule:
  """Cuts loops that draw random bits long before they are read into several, so that few bytes wait at a time.

  And lets iterations share a step of the loop that are quick, or move what they carry from place to place. `estimates`
  has that of each loop that is scanned.
  """
  loops = []
  for k, loop in enumerate(plan.loops):
    if k in estimates:
      estimate = estimates[k]
      if estimate.is_random and not (loop.reverse or loop.read_whole or loop.carried_ys):
        loop = dataclasses.replace(loop, segments=_segments(_waiting(program, loop), inputs, loop.roll.trips))
      elif (loop.strategy == "scan" and options.optimize_for != "compile"
            and not (estimate.is_random or estimate.is_slow_fused)):
        unroll = _UNROLLED if estimate.seconds < _UNROLLED_SECONDS else _turns(program, loop, estimate)
        loop = dataclasses.replace(loop, unroll=unroll if estimate.trips >= 2 * unroll else 1)
    loops.append(loop)
  return dataclasses.replace(plan, loops=tuple(loops))


def _turns(program: Program, loop: Loop, estimate: Estimate) -> int:
  """After how many iterations carried values lie again where they lay, if their moves in between would be felt, else 1."""
  lags = [len(chain.inits) for chain in loop.chains]
  moved = sum((lag - 1) * program.nbytes(chain.inits[0]) for lag, chain in zip(lags, loop.chains))
  felt = moved / _BANDWIDTH > _MOVED_PART * estimate.seconds
  return max(lags) if felt and max(lags) <= _LONGEST_TURN else 1


def _segments(waiting: int, inputs: int, trips: int) -> int:
  """Into how many loops to cut one whose results wait."""
  return min(-(-waiting // max(_EARLY_PER_INPUT * inputs, _IN_CACHE)), max(trips // _LEAST_SEGMENT, 1)) or 1


def _waiting(program: Program, loop: Loop) -> int:
  """The bytes of a loop's results at once, over what lives at once where each is made just before it is read."""
  change = np.zeros(len(program.eqns) + 2)
  total = 0
  for q, trips in loop.taken.items():
    values = np.asarray([loop.row(q, t) for t in trips])
    size = program.nbytes(values[0])
    np.add.at(change, program.first_use[values], size)
    np.add.at(change, program.last_use[values] + 1, -size)
    total += size * len(trips)
  return total - int(np.cumsum(change).max())


def _judge(estimate: Estimate, inputs: int, options: RollOptions, platform: str | None,
           several_devices: bool) -> tuple[str, str]:
  """The strategy for a roll, and why, if a scan compiles sooner than what else it may be."""
  aim = options.optimize_for
  if estimate.is_random and not several_devices:
    if estimate.is_independent:
      return "batch", "random numbers, made at once"
    return "scan", "random numbers, made by one loop"
  if not estimate.work.kernels and not estimate.is_slow_fused and aim != "compile":
    return "inline", _FUSES
  aside = _aside(estimate, options, platform, several_devices)
  if several_devices:
    return aside, "a scan's arrays might lie otherwise on the devices, and be sent more often"
  streams = estimate.copied > 0 or estimate.streamed > _KEY_BYTES
  if platform == "cpu" and estimate.work.convolutions and streams and aim != "compile":
    return aside, "on CPU convolutions run faster outside loops that read or write arrays besides"
  if options.max_copy_bytes is not None and estimate.copied > options.max_copy_bytes:
    return aside, f"a scan would copy {human_bytes(estimate.copied)}, more than max_copy_bytes"
  allowed = _COPIED_PER_WRITTEN[aim] * estimate.work.bytes
  if aim == "balanced" and estimate.copied < _IN_CACHE:
    allowed *= _CACHED_FACTOR
  if estimate.unread > max(_EARLY_PER_INPUT * inputs, _IN_CACHE) and aim != "compile":
    return aside, f"a scan would keep {human_bytes(estimate.unread)} of results that nothing reads"
  if estimate.copied > allowed:
    return aside, f"a scan would copy {human_bytes(estimate.copied)} beside {human_bytes(estimate.work.bytes)} written"
  return "scan", f"copies {human_bytes(estimate.copied)}" if estimate.copied else "nothing to copy"


def _aside(estimate: Estimate, options: RollOptions, platform: str | None, several_devices: bool) -> str:
  """The strategy for a roll that is not to be scanned."""
  if options.optimize_for == "compile":
    is_called = estimate.trips >= _CALLED_TRIPS and where.calls_survive(platform) and not several_devices
    return "call" if is_called else "fence"
  is_many = estimate.saved >= (_FENCED_SAVED_CHAINED if estimate.is_chained else _FENCED_SAVED)
  if (estimate.body < _FENCED_BODY and estimate.seconds < _FENCED_SECONDS and not estimate.is_slow_fused
      and not (is_many and estimate.seconds > _FENCED_LEAST)):
    return "inline"  # XLA compiles so little in no time, and a fence would be felt
  return "fence"


def _slower_to_compile(plan: Schedule, estimates: dict[int, Estimate]) -> list[int]:
  """Those loops that compile no faster as scans. Loops that read one another's results are weighed together."""
  group = {k: {k} for k in estimates}
  for k in estimates:
    for parts in plan.loops[k].feeds.values():
      for j in {loop for part in parts for loop, _ in part.reads} & estimates.keys():
        group[k] |= group[j]
        group.update(dict.fromkeys(group[k], group[k]))
  return [k for k in estimates if sum(COMPILE.scan(estimates[j]) - COMPILE.fence(estimates[j]) for j in group[k]) >= 0]


def _slower(estimate: Estimate) -> str:
  return (f"a scan would compile no faster: {estimate.stacks} arrays of xs and ys, {estimate.operations} operations "
          "that stack and take apart")


def estimate_scan(program: Program, loop: Loop, memo: dict, rolls: list[Roll] = ()) -> Estimate:
  """What the loop, beside other rolls, saves and costs as a scan."""
  roll = loop.roll
  copied, operations, unread = _copies(program, loop)
  stacks = len(loop.ys) + sum(isinstance(roll.inputs[i], (Xs, Slices)) for i in loop.inputs)
  work = _work(program, loop, memo)
  size = int(sum(program.sizes[roll.start + j] for j in loop.offsets))
  random = work.draws > 0 and _is_random(program, loop, memo.setdefault("random", {}))
  is_many = roll.trips >= _FUSED_TRIPS and bool(loop.carried)
  fused, carried = _carried_work(program, loop, memo) if is_many else (0, Work())
  saved = size * (roll.trips - 1)
  return Estimate(
      saved=saved, copied=copied, operations=operations, stacks=stacks, unread=unread,
      work=work * roll.trips, body=size, trips=roll.trips, is_random=random, is_independent=not loop.carried,
      is_stencil=carried.shifts > 0 and not work.kernels,
      is_remade=carried.reductions > 0 if work.kernels else is_many and _feeds_kernels(program, loop, memo, rolls),
      is_chained=fused * carried.kernels * math.comb(roll.trips, 2) > saved, streamed=_streamed(program, loop))


def _streamed(program: Program, loop: Loop) -> int:
  """The bytes of stacked arrays that each iteration reads and writes, constants left out."""
  total = sum(program.nbytes(loop.roll.value(0, q)) for q in loop.ys)
  for source in (loop.roll.inputs[i] for i in loop.inputs):
    if isinstance(source, Slices):
      total += _row_bytes(program.aval(source.value))
    elif isinstance(source, Xs) and constant_xs(program, source.values) is None:
      total += program.nbytes(source.values[0])
  return total


def _row_bytes(aval) -> int:
  """The bytes of a row along the leading axis."""
  return aval_bytes(aval) // max(reckoned(aval.shape[0]), 1)


def _carried_work(program: Program, loop: Loop, memo: dict) -> tuple[int, Work]:
  """The work of the body's equations that read a carry that fuses with the next one, or what fuses with that.

  And how many of these equations fuse. Kernels on which such a carry depends itself are left out, XLA does not fuse past
  them: a normalization in a residual stream, but not the gradient of a weight.
  """
  roll = loop.roll
  slot_of, out_of = program.slot_starts(roll.start, roll.period), program.result_starts(roll.start, roll.period)
  own = {j: roll.bindings[slot_of[j] : slot_of[j + 1]] for j in loop.offsets}
  made = {j: range(out_of[j], out_of[j + 1]) for j in loop.offsets}
  work = {j: equation_work(program.eqns[roll.start + j], memo) for j in loop.offsets}
  carries = {-1 - i: s.result for i, s in enumerate(roll.inputs) if isinstance(s, Carry)}
  kept = carries
  while True:
    fused, reading = set(kept), []
    for j in loop.offsets:
      if not fused.isdisjoint(own[j]):
        reading.append(j)
        if not work[j].kernels:
          fused.update(made[j])
    remaining = {b: q for b, q in kept.items() if q in fused}
    if len(remaining) == len(kept):
      break
    kept = remaining
  maker = {q: j for j in loop.offsets for q in made[j]}
  sources = {j: [maker[q] for q in (carries.get(b, b) for b in own[j]) if q in maker] for j in loop.offsets}
  cycle = components(sources)
  on_cycles = {cycle[maker[q]] for q in kept.values()}
  counted = [j for j in reading if not work[j].kernels or cycle[j] not in on_cycles]
  return sum(not work[j].kernels for j in reading), sum([work[j] for j in counted], Work())


def _feeds_kernels(program: Program, loop: Loop, memo: dict, rolls: list[Roll]) -> bool:
  """Whether kernels outside of the loop, or what fuses with them in another roll, read an iteration's results."""
  roll = loop.roll
  first = roll.start + roll.trips // 2 * roll.period  # the middle one stands for all
  low, high = program.out_start[first], program.out_start[first + roll.period]
  readers = program.readers[(program.slots >= low) & (program.slots < high)]
  readers = readers[(readers < roll.start) | (readers >= roll.end)].tolist()
  starts = {r.start for r in rolls for e in readers if r.start <= e < r.end}
  bodies = [range(r.start, r.start + r.period) for r in rolls if r.start in starts]
  return any(equation_work(program.eqns[e], memo).kernels for e in [*readers, *itertools.chain(*bodies)])


def _is_random(program: Program, loop: Loop, memo: dict) -> bool:
  """Whether a loop does nothing but derive keys and draw: all that it reads is as small as keys are."""
  roll = loop.roll
  values = [v for i in loop.inputs for v in _first_values(roll.inputs[i])]
  return (all(program.nbytes(v) <= _KEY_BYTES for v in values)
          and all(is_random(program.eqns[roll.start + j], memo) for j in loop.offsets))


def _first_values(source) -> tuple[int, ...]:
  if isinstance(source, Slices):
    return ()  # a row of an array, and no copy
  return source.values[:1] if isinstance(source, Xs) else source.inits[:1] if isinstance(source, Carry) else (source.value,)


def _copies(program: Program, loop: Loop) -> tuple[int, int, int]:
  """The bytes that a scan copies, the operations that do so, and the bytes of stacked results that nothing reads."""
  roll = loop.roll
  copied = operations = unread = 0
  for q, trips in loop.taken.items():
    size = program.nbytes(loop.row(q, trips[0]))
    copied += size * len(trips)
    operations += len(trips)
    unread += 0 if q in loop.read_whole else size * (roll.trips - len(trips))
  for i, parts in loop.feeds.items():
    if constant_xs(program, roll.inputs[i].values) is None:
      copied += _feed(program, loop, i)[1]
      operations += sum(isinstance(p, One) for p in parts)
  return copied, operations, unread


def record(program: Program, plan: Schedule, k: int, reason: str, depth: int) -> RollRecord:
  """A roll for the report."""
  loop = plan.loops[k]
  roll = loop.roll
  is_scan = loop.strategy in STACKING
  feeds, copied = [], []
  for i in loop.inputs:
    if isinstance(roll.inputs[i], (Xs, Slices)):
      kind, size = _feed(program, loop, i) if is_scan else ("arguments", 0)
      feeds.append(kind)
      copied.append(size)
  by_type = [type(roll.inputs[i]) for i in loop.inputs]
  return RollRecord(
      strategy=loop.strategy, reason=reason, trip_count=roll.trips, body_eqns=len(loop.offsets) + len(loop.remade),
      body_size=int(sum(program.sizes[roll.start + j] for j in loop.offsets)),
      carries=sum(len(c.inits) for c in loop.chains) + len(loop.lasts) if is_scan else by_type.count(Carry),
      consts=by_type.count(Const), xs=len(feeds), ys=len(loop.ys) if is_scan else len(loop.taken),
      reverse=loop.reverse, feeds=tuple(feeds), copied_bytes=tuple(copied),
      unstacked_bytes=sum(program.nbytes(loop.row(q, t[0])) * len(t) for q, t in loop.taken.items()) if is_scan else 0,
      operations=_copies(program, loop)[1] if is_scan else 0, recomputed_bytes=loop.recomputed_bytes, depth=depth,
      location=compat.location(program.eqns[roll.start]))


def _feed(program: Program, loop: Loop, i: int) -> tuple[str, int]:
  """How an xs is made, and the bytes copied to make it."""
  source = loop.roll.inputs[i]
  if isinstance(source, Slices):
    aval = program.aval(source.value)
    whole = len(source.starts) == aval.shape[0] and (source.starts[0] > source.starts[-1]) == loop.reverse
    return "slice", 0 if whole else _row_bytes(aval) * len(source.starts)
  if constant_xs(program, source.values) is not None:
    return "constants", 0
  parts = loop.feeds[i]
  size = program.nbytes(source.values[0]) * loop.roll.trips
  if isinstance(parts[0], Pieces):
    return "slice", 0
  if len(parts) == 1 and isinstance(parts[0], Part):
    return ("indexed ys" if is_indexed(parts) else "ys"), 0
  if isinstance(parts[0], Woven):
    return "woven ys", size
  return ("stack" if all(isinstance(p, One) for p in parts) else "ys part"), size


def located(program: Program, refusal: Refusal) -> Refusal:
  """The refusal with the place in the user's code."""
  return dataclasses.replace(refusal, location=compat.location(program.eqns[refusal.start]))
