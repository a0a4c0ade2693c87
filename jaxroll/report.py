"""What the pass did and why: small frozen records that print as a table."""

from __future__ import annotations

import dataclasses


_TELLING = 30  # equations of a refused repeat that the printed report mentions


@dataclasses.dataclass(frozen=True)
class Refusal:
  """A repeat that was left alone.

  Attributes:
    start: its first equation, counted among the live ones of its jaxpr.
    body_eqns: equations in an iteration.
    trip_count: iterations.
    reason: why, in words.
    location: where in the user's code its first equation comes from.
  """

  start: int
  body_eqns: int
  trip_count: int
  reason: str
  location: str = ""


@dataclasses.dataclass(frozen=True)
class RollRecord:
  """One roll.

  Attributes:
    strategy: how the repeat was rewritten: ``'scan'``, ``'batch'`` (a vectorized call), ``'fence'``,
      ``'call'`` or ``'inline'``.
    reason: why so.
    trip_count: iterations.
    body_eqns: equations in the body, those of nested jaxprs not counted.
    body_size: the same as XLA meets them: nested ones counted, and a random-number generator as a hundred.
    carries, consts, xs, ys: how many of each the loop has; where it is no scan, values that go from one
      iteration to the next, inputs that are the same, inputs that differ, results that are read elsewhere.
    reverse: whether it runs from the last element of its xs to the first.
    feeds: per xs, how it is made: ``'stack'``, ``'ys'`` (an earlier roll's ys as they are),
      ``'indexed ys'`` (the same, read in another order or in part), ``'woven ys'`` (several, in turn), ``'ys part'`` (put together of such and
      others), ``'slice'`` (of one array), ``'constants'``;
      ``'arguments'`` where nothing is stacked.
    copied_bytes: per xs, the bytes copied each time the program runs.
    unstacked_bytes: bytes of ys that are taken apart again.
    operations: how many operations stack xs or take ys apart.
    recomputed_bytes: bytes of earlier results that are not stored for this roll, as its body computes them anew from
      others.
    depth: 0 at top level, 1 within a body or a nested jaxpr, and so on.
    location: where in the user's code the first equation of the body comes from.
  """

  strategy: str
  reason: str
  trip_count: int
  body_eqns: int
  body_size: int
  carries: int
  consts: int
  xs: int
  ys: int
  reverse: bool
  feeds: tuple[str, ...]
  copied_bytes: tuple[int, ...]
  unstacked_bytes: int
  operations: int
  recomputed_bytes: int
  depth: int
  location: str


@dataclasses.dataclass(frozen=True)
class RollReport:
  """What the pass did to one program.

  Attributes:
    rolls: a `RollRecord` per roll, outer ones before the ones in their bodies.
    refusals: a `Refusal` per repeat that was seen and left alone.
    eqns_before, eqns_after: equations at top level.
    size_before, size_after: equations, nested ones counted; after, those of a function that is called several
      times once.
    exempt: equations that `no_roll` keeps as they are, nested ones counted.
    draws: generators of random bits that were written anew, those of a shared body counted once.
    seconds: wall seconds per stage, in order; 'trace' only where the pass traced.
    error: what went wrong inside the pass, if it gave up, else ''.
    function: the function that was traced, and where it is defined; '' for a jaxpr.
  """

  rolls: tuple[RollRecord, ...] = ()
  refusals: tuple[Refusal, ...] = ()
  eqns_before: int = 0
  eqns_after: int = 0
  size_before: int = 0
  size_after: int = 0
  exempt: int = 0
  draws: int = 0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  error: str = ""
  function: str = ""

  def to_dict(self) -> dict:
    """The report as plain dicts, lists, strings and numbers, fit for JSON."""
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    lines = [f"jaxroll: {self.eqns_before:,} equations -> {self.eqns_after:,} at top level "
             f"({self.size_before:,} -> {self.size_after:,} with nested ones), {len(self.rolls)} rolls"
             + f", {self.draws} generators" * bool(self.draws)]
    if self.error:
      lines.append(f"the pass gave up: {self.error}"[:100])
    if self.rolls:
      lines.append(f"{'roll':<8}{'trips':>6}{'body':>7}{'carry':>6}{'const':>6}{'xs':>5}{'ys':>5}"
                   f"{'copied':>9}{'unstacked':>10}  from")
    for r in self.rolls:
      name = "  " * min(r.depth, 2) + r.strategy + ("<" if r.reverse else "")
      lines.append(f"{name:<8.8}{r.trip_count:>6}{r.body_eqns:>7}{r.carries:>6}{r.consts:>6}{r.xs:>5}{r.ys:>5}"
                   f"{human_bytes(sum(r.copied_bytes)):>9}{human_bytes(r.unstacked_bytes):>10}  {r.location}"[:100])
      counts = {f: r.feeds.count(f) for f in dict.fromkeys(r.feeds)} if r.feeds and r.feeds[0] != "arguments" else {}
      feeds = "xs: " + ", ".join(f"{n} x {f}" for f, n in counts.items()) + "; " if counts else ""
      again = f"recomputes {human_bytes(r.recomputed_bytes)}; " if r.recomputed_bytes else ""
      lines.append(f"          {feeds}{again}{r.reason}"[:100])
    telling = dict.fromkeys(
        f"left alone: {r.trip_count} x {r.body_eqns} equations at {r.location or r.start}: {r.reason}"
        for r in self.refusals if r.trip_count * r.body_eqns >= _TELLING)
    lines += [line[:100] for line in list(telling)[:8]]
    if len(telling) > 8:
      lines.append(f"... and {len(telling) - 8} more left alone")
    if self.exempt:
      lines.append(f"left as written under no_roll: {self.exempt:,} equations")
    if self.seconds:
      lines.append(("seconds: " + ", ".join(f"{k} {v:.3f}" for k, v in self.seconds.items()))[:100])
    return "\n".join(lines)


def human_bytes(n: float) -> str:
  """A number of bytes, rounded, with its unit."""
  n = round(n)
  for unit in ("B", "KB", "MB"):
    if n < 10_000:
      return f"{n} {unit}"
    n = round(n / 1024)
  return f"{n} GB"
