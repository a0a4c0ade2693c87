import numpy as np
import pytest

from jaxroll.repeats import candidate_periods, find_runs


def runs(text, min_trip_count=3):
  """Runs in a string, as (start, period, iterations)."""
  fingerprints = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
  return [(r.start, r.period, r.trips) for r in find_runs(fingerprints, np.ones(len(text), np.int64), min_trip_count)]


def test_a_plain_period():
  assert runs("xyz" + "abc" * 5 + "w")[0] == (3, 3, 5)


def test_the_smallest_period_comes_first():
  assert runs("ab" * 12)[0] == (0, 2, 12)


def test_all_equal():
  assert runs("a" * 40)[0] == (0, 1, 40)


def test_repeats_within_a_body_do_not_hide_the_outer_period():
  assert runs("aabab" * 6)[0] == (0, 5, 6)


def test_long_bodies():
  random = np.random.RandomState(0)
  body = "".join(chr(97 + k) for k in random.randint(0, 20, 700))
  assert runs(body * 4)[0] == (0, 700, 4)


def test_too_few_iterations_are_no_run():
  assert runs("abc" * 2 + "xyz") == []
  assert runs("abc" * 3, min_trip_count=4) == []


def test_several_runs_each_found():
  found = runs("abcd" * 4 + "x" + "efg" * 5)
  assert (0, 4, 4) in found and (17, 3, 5) in found


@pytest.mark.parametrize("seed", range(20))
def test_planted_runs_are_found_and_every_run_is_one(seed):
  random = np.random.RandomState(seed)
  period, trips = random.randint(2, 60), random.randint(3, 9)
  body = random.randint(0, 10_000, period)
  before, after = random.randint(10_000, 20_000, 50), random.randint(10_000, 20_000, 50)
  sequence = np.concatenate([before, np.tile(body, trips), after])
  found = find_runs(sequence, np.ones(len(sequence), np.int64), 3)
  assert (found[0].start, found[0].period, found[0].trips) == (50, period, trips)
  for run in found:
    a = sequence[run.start : run.start + run.matches]
    assert (a == sequence[run.start + run.period : run.start + run.period + run.matches]).all()


def test_an_empty_and_a_short_sequence():
  for n in range(4):
    assert find_runs(np.arange(n), np.ones(n, np.int64), 3) == []
  assert candidate_periods(np.zeros(0, np.int64), 3) == []
