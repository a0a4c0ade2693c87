"""What goes wrong under `roll_jit` goes wrong as under `jax.jit`, and leaves nothing behind."""

import gc
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxroll.pipeline
from jaxroll import RollOptions, collect_reports, roll_jaxpr, roll_jit
from programs import chain, weights

WS = weights(6, 4, 4)
X = np.ones((3, 4), np.float32)
FORCED = RollOptions(strategy="scan", min_body_eqns=1)


class Planted(Exception):
  pass


def test_nothing_is_cached_after_an_exception():
  fails = True
  def f(ws, x):
    y = chain(ws, x)
    if fails:
      raise Planted
    return y
  rolled = roll_jit(f, roll=FORCED)
  for _ in range(2):
    with pytest.raises(Planted):
      rolled(WS, X)
  fails = False
  with collect_reports() as reports:
    np.testing.assert_allclose(rolled(WS, X), jax.jit(f)(WS, X), rtol=1e-5)
  assert [r.trip_count for r in reports[0].rolls] == [6]


def test_tracebacks_hold_no_frame_of_the_package():
  @roll_jit
  def f(x):
    return g(x)
  def g(x):
    raise Planted
  with pytest.raises(Planted) as error:
    f(X)
  assert [frame.name for frame in traceback.extract_tb(error.value.__traceback__)][-2:] == ["f", "g"]
  assert not [f for f in traceback.extract_tb(error.value.__traceback__) if "jaxroll" in f.filename.split("/")]


@pytest.mark.parametrize("stage", ["analyze", "find_rolls", "evaluate"])
def test_an_interrupt_in_the_pass_leaves_no_half_state(monkeypatch, stage):
  f = lambda ws, x: chain(ws, x)
  rolled = roll_jit(f, roll=FORCED)
  def interrupt(*args):
    raise KeyboardInterrupt
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(jaxroll.pipeline, stage, interrupt)
    rolled(WS, X)
  with collect_reports() as reports:
    np.testing.assert_allclose(rolled(WS, X), jax.jit(f)(WS, X), rtol=1e-5)
  assert [r.trip_count for r in reports[0].rolls] == [6]


def test_threads_compile_at_the_same_time():
  shared = lambda ws, x: chain(ws, x)
  started, results = threading.Barrier(6), {}
  def work(k):
    own = lambda ws, x: chain(ws, x) + k
    started.wait()
    results[k] = [roll_jit(f, roll=FORCED)(WS, X) for f in (shared, own)]
  threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  expected = jax.jit(shared)(WS, X)
  for k in range(6):
    for result, plus in zip(results[k], (0, k), strict=True):
      np.testing.assert_allclose(result, expected + plus, rtol=1e-5)


def deeply(fun):
  """Runs a function in a thread with a deep stack."""
  results = []
  size, limit = threading.stack_size(1 << 29), sys.getrecursionlimit()
  sys.setrecursionlimit(200_000)
  try:
    thread = threading.Thread(target=lambda: results.append(fun()))
    thread.start()
    thread.join()
  finally:
    threading.stack_size(size)
    sys.setrecursionlimit(limit)
  return results[0]


def test_2000_nested_calls():
  def nested(x, n=2000):
    return x if n == 0 else jnp.sin(nested(x, n - 1)) * 2
  expected = jax.jit(nested, static_argnums=1)
  rolled = roll_jit(nested, roll=FORCED, static_argnums=1)
  assert deeply(lambda: rolled(X)).shape == deeply(lambda: expected(X)).shape


def test_200_nested_jitted_functions():
  def nested():
    f = lambda x: x * 2
    for _ in range(200):
      f = jax.jit(lambda x, g=f: g(x) + 1)
    with jax.enable_checks(False), collect_reports() as reports:
      roll_jit(lambda x: f(f(f(f(x)))), roll=FORCED).trace(X)
    return reports[0]
  report = deeply(nested)
  assert [r.trip_count for r in report.rolls if r.depth == 0] == [4] and report.size_before > 400


def test_100000_equations():
  choice = np.random.RandomState(0).randint(0, 3, 100_000)
  def f(x):
    for k in choice:
      x = (lax.sin, lax.cos, lax.tanh)[k](x)
    return x
  with jax.enable_checks(False), collect_reports() as reports:
    traced = roll_jit(f).trace(1.)
  assert reports[0].eqns_before == 100_000 and not reports[0].error and traced.out_info.shape == ()


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_collection_is_as_before(is_on, monkeypatch):
  fun = lambda x: sum(jnp.sin(x) * i for i in range(9))
  seen = []
  monkeypatch.setattr(jaxroll.pipeline, "find_rolls", lambda *args: seen.append(gc.isenabled()) or 1 / 0)
  if not is_on:
    gc.disable()
  try:
    with pytest.raises(ZeroDivisionError):
      roll_jaxpr(jax.make_jaxpr(fun)(jnp.ones(3)), RollOptions(strict=True))
    assert gc.isenabled() is is_on and seen == [False]
  finally:
    gc.enable()
