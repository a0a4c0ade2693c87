"""Finding repeats: stretches of the fingerprint sequence that recur with a period.

Candidate periods come from voting: windows of 1, 4, 16, 64 and 256 equations are
hashed, and each window votes for the distance to its next occurrence. A period's
runs are where the sequence equals itself shifted by the period, compared exactly.
Everything is array arithmetic, O(n log n) in the number of equations.
"""

from __future__ import annotations

import dataclasses

import numpy as np

_WINDOWS = (1, 4, 16, 64, 256)
_PERIODS_PER_WINDOW = 12
_MAX_RUNS = 20_000


@dataclasses.dataclass(frozen=True, order=True)
class Run:
  """`fingerprints[i] == fingerprints[i + period]` for start <= i < start + matches."""

  start: int
  period: int
  matches: int

  @property
  def end(self) -> int:
    """One past the last equation of the run."""
    return self.start + self.matches + self.period

  @property
  def trips(self) -> int:
    return self.matches // self.period + 1


def find_runs(fingerprints: np.ndarray, sizes: np.ndarray, min_trip_count: int) -> list[Run]:
  """Runs of at least `min_trip_count` iterations, the one that saves most equations first."""
  found: dict[tuple[int, int], Run] = {}
  total = np.concatenate([[0], np.cumsum(sizes)])
  for period in candidate_periods(fingerprints, min_trip_count):
    for run in _runs_of_period(fingerprints, period, min_trip_count):
      found[run.start, run.period] = run
    if len(found) > _MAX_RUNS:
      break

  def saved(run):
    return total[run.start + (run.trips - 1) * run.period] - total[run.start]

  return sorted(found.values(), key=lambda run: (-saved(run), run.period, run.start))


def candidate_periods(fingerprints: np.ndarray, min_trip_count: int) -> list[int]:
  """Periods worth comparing, smallest first."""
  n = len(fingerprints)
  longest = n // min_trip_count
  votes: dict[int, int] = {}
  hashes = _mix(fingerprints.astype(np.uint64))
  width = 1
  for window in _WINDOWS:
    while width < window and len(hashes) > width:
      hashes = _mix(hashes[:-width]) + hashes[width:]
      width *= 2
    if width < window:
      break
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    distance = np.diff(order)[ordered[1:] == ordered[:-1]]
    distance = distance[distance <= longest]
    if not len(distance):
      continue
    count = np.bincount(distance)
    # A run of period p that is long enough casts about (trips - 1) * p votes.
    count[count * 8 < np.arange(len(count))] = 0
    best = np.argsort(-count, kind="stable")[:_PERIODS_PER_WINDOW]
    for p in best[count[best] > 0]:
      votes[int(p)] = max(votes.get(int(p), 0), int(count[p]))
  return sorted(votes)


def _mix(x: np.ndarray) -> np.ndarray:
  """A bijective 64-bit mixer (the finalizer of SplitMix64, Steele et al. 2014)."""
  with np.errstate(over="ignore"):
    x = (x + np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _runs_of_period(fingerprints: np.ndarray, period: int, min_trip_count: int) -> list[Run]:
  equal = fingerprints[:-period] == fingerprints[period:]
  edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
  starts, ends = edges[::2], edges[1::2]
  long = ends - starts >= (min_trip_count - 1) * period
  return [Run(int(a), period, int(b - a)) for a, b in zip(starts[long], ends[long])]
