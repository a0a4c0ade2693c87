import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxroll
from jaxroll import RollOptions, collect_reports, explain, roll, roll_jit
from programs import chain, loss, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)
FORCED = RollOptions(strategy="scan", min_body_eqns=1)


def test_roll_jit_returns_jits_own_object():
  rolled = roll_jit(chain)
  assert type(rolled) is type(jax.jit(chain)) and isinstance(rolled, jax.stages.Wrapped)
  assert rolled.__wrapped__ is chain and rolled.__name__ == "chain" and rolled.__doc__ == chain.__doc__
  assert inspect.signature(rolled) == inspect.signature(chain)
  assert "jit_chain" in rolled.lower(WS, X).as_text()


def test_decorators_with_and_without_arguments():
  @roll_jit
  def f(x):
    return x + 1
  @roll_jit(static_argnames="n", roll=FORCED)
  def g(x, n):
    for _ in range(n):
      x = jnp.sin(x) * 2
    return x
  @functools.partial(roll_jit, donate_argnums=0)
  def h(x):
    return x * 2
  assert f(1) == 2 and g(1., n=0) == 1. and h(jnp.float32(3)) == 6
  np.testing.assert_allclose(g(X, n=5), jax.jit(g.__wrapped__, static_argnames="n")(X, n=5), rtol=1e-6)


def test_one_evaluation_of_the_users_function_per_cache_miss():
  def count(jit):
    calls = []
    @jit
    def f(ws, x):
      calls.append(None)
      return chain(ws, x)
    f(WS, X), f(WS, X + 1), f(WS, X[:2])
    jax.jit(jax.grad(lambda w: f(w, np.ones((5, 4), np.float32)).sum()))(WS)
    return len(calls)
  assert count(functools.partial(roll_jit, roll=FORCED)) == count(jax.jit) == 3


def test_a_long_program_with_nothing_to_roll_is_traced_once_and_not_evaluated_again():
  calls = []
  choice = np.random.RandomState(0).randint(0, 3, 1500)
  def f(x, *more):
    calls.append(None)
    for k in choice:
      x = (jnp.sin, jnp.cos, jnp.tanh)[k](x)
    return x, *more
  traced = roll_jit(f).trace(X)
  assert len(calls) == 1 and [e.primitive.name for e in traced.jaxpr.jaxpr.eqns] == ["jit"]
  # Also where it closes over tracers.
  outer = jax.jit(lambda z: roll_jit(lambda x: f(x, z))(z))
  np.testing.assert_array_equal(outer(X)[1], X)
  np.testing.assert_allclose(jax.vmap(outer)(X)[0], jax.jit(f)(X)[0], rtol=1e-6)


def test_exceptions_of_the_function_arrive_as_under_jit():
  def f(x):
    for _ in range(4):
      x = jnp.sin(x)
    if x.sum() > 0:
      return x
    return x @ jnp.ones((9, 9))
  messages = []
  for jitted in (jax.jit(f), roll_jit(f)):
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
      jitted(X)
    messages.append(str(error.value).split("\n")[0])
  assert messages[0] == messages[1]
  class Mine(Exception):
    pass
  @roll_jit
  def g(x):
    raise Mine
  with pytest.raises(Mine):
    g(X)


def test_pytrees_keywords_and_static_leaves():
  @roll_jit(static_argnames="n", roll=FORCED)
  def f(tree, *, n, scale=2.):
    x = tree["x"][0]
    for _ in range(n):
      x = jnp.sin(x) * scale
    return {"out": (x, None), "same": tree}
  out = f({"x": (X, None)}, n=5)
  assert out["out"][1] is None and (out["same"]["x"][0] == X).all()


def test_roll_composes_with_transformations_from_outside_and_inside():
  rolled = roll(chain, FORCED)
  expected = jax.jit(jax.grad(lambda w: chain(w, X).sum()))(WS)
  for got in (jax.jit(jax.grad(lambda w: rolled(w, X).sum()))(WS),
              jax.jit(roll(jax.grad(lambda w: chain(w, X).sum()), FORCED))(WS),
              jax.grad(lambda w: roll_jit(chain, roll=FORCED)(w, X).sum())(WS)):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
  xs = np.stack([X, X + 1])
  np.testing.assert_allclose(jax.jit(jax.vmap(rolled, (None, 0)))(WS, xs), jax.jit(jax.vmap(chain, (None, 0)))(WS, xs), rtol=1e-5)
  hess = jax.hessian(lambda x: chain(WS, x).sum())
  np.testing.assert_allclose(jax.jit(jax.hessian(lambda x: rolled(WS, x).sum()))(X), jax.jit(hess)(X), rtol=1e-3, atol=1e-5)


def test_without_a_jit_the_function_itself_is_called():
  seen = []
  def f(x):
    seen.append(type(x))
    return x
  roll(f)(X)
  with jax.disable_jit():
    roll_jit(f)(X)
  assert all(t is np.ndarray for t in seen) and len(seen) == 2


def test_a_function_without_dynamic_arguments_is_rolled():
  def f():
    x = jnp.arange(4.)
    for _ in range(6):
      x = jnp.sin(x) * 2
    return x
  with collect_reports() as reports:
    out = roll_jit(f, roll=FORCED)()
  assert reports[0].rolls[0].trip_count == 6
  np.testing.assert_allclose(out, jax.jit(f)(), rtol=1e-6)


def test_closures_over_outer_tracers():
  @jax.jit
  def outer(y):
    def inner(x):
      for _ in range(5):
        x = jnp.sin(x) * y
      return x
    return roll_jit(inner, roll=FORCED)(y), jax.vmap(roll(inner, FORCED))(jnp.stack([y, y]))
  a, b = outer(X)
  np.testing.assert_allclose(b[0], a, rtol=1e-6)


def test_donation_reuses_buffers():
  def step(ws, x):
    g = jax.grad(loss)(ws, x)
    return [w - 0.1 * d for w, d in zip(ws, g)]
  args = [w.copy() for w in WS], X
  for options in (FORCED, RollOptions(strategy="fence", min_body_eqns=1), RollOptions()):
    compiled = roll_jit(step, donate_argnums=0, roll=options).lower(*args).compile()
    plain = jax.jit(step, donate_argnums=0).lower(*args).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == plain.memory_analysis().alias_size_in_bytes > 0


def test_explain_takes_plain_jitted_and_rolled_functions():
  trips = [explain(f, FORCED)(WS, X).rolls[0].trip_count for f in (chain, jax.jit(chain), roll_jit(chain))]
  assert trips == [6, 6, 6]
  assert explain(roll_jit(chain, roll=FORCED))(WS, X).rolls
  assert not explain(roll_jit(chain, roll=RollOptions(strategy="off")))(WS, X).rolls
  static = roll_jit(lambda x, n: [jnp.sin(x) for _ in range(n)], static_argnums=1, roll=FORCED)
  assert explain(static)(X, 3).eqns_before == 3


def test_explain_compiles_nothing(monkeypatch):
  import jax._src.compiler as compiler
  def fail(*args, **kwargs):
    raise AssertionError("compiled")
  arguments = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in WS], jax.ShapeDtypeStruct(X.shape, X.dtype)
  monkeypatch.setattr(compiler, "compile_or_get_cached", fail)
  assert explain(chain, FORCED)(*arguments).rolls


def test_report_prints_within_100_columns_and_converts():
  import json
  report = explain(jax.value_and_grad(loss), FORCED)(WS, X)
  text = str(report)
  assert all(len(line) <= 100 for line in text.splitlines()) and "scan" in text and "programs.py" in text
  as_dict = json.loads(json.dumps(report.to_dict()))
  assert as_dict["rolls"][0]["trip_count"] == 6 and as_dict["eqns_before"] == report.eqns_before
  assert set(report.seconds) >= {"trace", "analyze", "find", "rewrite"}


def test_refusals_say_why_and_where():
  def f(x, y):
    values = [x, y]
    for i in range(9):  # equal equations without one dataflow
      values.append(jnp.logaddexp(values[-1], values[(i * 7) % len(values)]))
    return values[-1]
  report = explain(f, RollOptions())(X, X + 1)
  assert report.refusals and all(r.reason and r.location for r in report.refusals)


def test_wrong_options_are_refused():
  with pytest.raises(TypeError, match="RollOptions"):
    roll_jit(chain, roll="scan")
  with pytest.raises(TypeError):
    roll_jit(chain, static_argnumbers=0)


def test_public_names():
  for name in jaxroll.__all__:
    assert getattr(jaxroll, name).__doc__


def test_results_that_are_no_arrays_pass_through_roll():
  rate = 0.2
  def f(x, tag):
    for _ in range(5):
      x = jnp.sin(x) * 2
    return x, tag, None, {"f": jnp.sin, "n": rate}
  seen = []
  @jax.jit
  def outer(x):
    out = roll(f, FORCED)(x, "tag")
    seen.append(out)
    return out[0], out[3]["n"]
  np.testing.assert_allclose(outer(X)[0], jax.jit(lambda x: f(x, "")[0])(X), rtol=1e-6)
  assert seen[0][1:3] == ("tag", None) and seen[0][3]["f"] is jnp.sin and seen[0][3]["n"] is rate
  with pytest.raises(TypeError, match="not a valid JAX type"):
    roll_jit(lambda x: (x, "tag"))(X)


def test_tracing_errors_name_the_users_function_and_arguments():
  def decide(first, xs):
    return first if xs[1].sum() > 0 else xs[0]
  messages = []
  for jitted in (jax.jit(decide), roll_jit(decide)):
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
      jitted(X, [X, X])
    messages.append(str(error.value))
  assert messages[0] == messages[1] and "xs[1]" in messages[1]


def test_methods_and_explain():
  class Model:
    n = 6
    @functools.partial(roll_jit, static_argnums=0, roll=FORCED)
    def f(self, x):
      for _ in range(self.n):
        x = jnp.sin(x) * 2
      return x
  model = Model()
  assert explain(model.f)(X).rolls[0].trip_count == explain(Model.f)(model, X).rolls[0].trip_count == 6


@pytest.mark.parametrize("call, text", [
    (lambda: roll_jit(3), "callable"), (lambda: roll(3), "callable"), (lambda: explain(3), "callable"),
    (lambda: roll_jit(chain, strategy="scan"), r"roll=RollOptions\(strategy="), (lambda: jaxroll.roll_jaxpr(chain), "make_jaxpr")])
def test_misuse_says_what_to_do(call, text):
  with pytest.raises(TypeError, match=text):
    call()
