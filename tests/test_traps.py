"""The ways in which a rolled program could go wrong, one a test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, roll_jaxpr, roll_jit
from jaxroll.testing import check_roll
from programs import chain, loss, weights

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(6, 4, 4)
FORCED = RollOptions(strategy="scan", min_body_eqns=1, strict=True)


def scaled(scale, kind):
  """The identity, whose gradient is scaled."""
  if kind == "jvp":
    f = jax.custom_jvp(lambda x: x * 1.)
    f.defjvp(lambda p, t: (p[0] * 1., t[0] * scale))
  else:
    f = jax.custom_vjp(lambda x: x * 1.)
    f.defvjp(lambda x: (x * 1., None), lambda _, ct: (ct * scale,))
  return f


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("scales", [(1, 2, 3, 4, 5, 6), (1, 1, 1, 2, 2, 2), (1, 1, 1, 1, 1, 1)])
def test_1_equal_primals_with_different_rules_do_not_merge(kind, scales):
  def f(x):
    for s in scales:
      x = jnp.sin(scaled(float(s), kind)(x))
    return x.sum()
  report = check_roll(f, X)
  assert [r.trip_count for r in report.rolls if r.depth == 0] == {6: [], 2: [3, 3], 1: [6]}[len(set(scales))]
  # The gradient of the rolled function is the one of the function as written.
  expected = jax.jit(jax.grad(f))(X)
  np.testing.assert_allclose(roll_jit(jax.grad(f), roll=FORCED)(X), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.grad(roll_jit(f, roll=FORCED))(X), expected, rtol=1e-6)


def test_2_arrays_closed_over_by_nested_jaxprs():
  arrays = [np.full(4, i, np.float32) for i in range(6)]
  def f(x):
    for a in arrays:
      x = jax.jit(lambda y: jnp.sin(y) + a)(x)
    return x
  check_roll(f, X)


@pytest.mark.parametrize("start", [0., 0, np.float32(0), jnp.zeros(())])
def test_3_weakly_typed_first_carry(start):
  def f(xs):
    total = start
    for x in xs:
      total = total * 0.5 + x
    return total
  check_roll(f, [np.float32(i) for i in range(6)])


def test_3_weak_results_stay_weak():
  def f(x):
    for _ in range(5):
      x = x * 2 + 1
    return x
  closed = jax.make_jaxpr(f)(1.)
  rolled, _ = roll_jaxpr(closed, FORCED)
  assert rolled is not closed and rolled.out_avals[0].weak_type and closed.out_avals[0].weak_type


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_3_key_chains(make):
  def f(key, x):
    for _ in range(5):
      key, sub = jax.random.split(key)
      x = x + jax.random.normal(sub, x.shape)
    return key, x
  assert [r.trip_count for r in check_roll(f, make(3), X).rolls if r.depth == 0] == [5]


def test_5_ordered_prints_come_out_in_order(capfd):
  def f(x):
    for i in range(5):
      x = jnp.sin(x) * 2
      jax.debug.print("layer {}: {}", i, x.sum(), ordered=True)
    return x
  jax.block_until_ready(jax.jit(f)(X))
  jax.effects_barrier()
  expected = capfd.readouterr().out
  jax.block_until_ready(roll_jit(f, roll=FORCED)(X))
  jax.effects_barrier()
  assert capfd.readouterr().out == expected and expected.count("layer") == 5


def test_5_mutable_references_are_left_alone():
  def f(x):
    ref = jax.new_ref(jnp.zeros(4))
    for i in range(5):
      ref[...] = ref[...] * 2 + x[0]
    return ref[...]
  np.testing.assert_array_equal(roll_jit(f, roll=FORCED)(X), jax.jit(f)(X))


def test_6_results_that_are_inputs_literals_or_duplicates():
  def f(ws, x):
    y = chain(ws, x)
    return x, y, y, 3, 2.5, ws[0], jnp.zeros((0, 4))
  check_roll(f, WS, X, rolls=[6])


def test_6_zero_size_arrays_integers_and_complex():
  def f(x):
    for _ in range(5):
      x = x * x + x
    return x
  for x in (np.zeros((0, 4), np.float32), np.arange(5), np.array([1 + 2j, 0.5j], np.complex64), np.arange(3, dtype=np.uint8)):
    check_roll(f, x, rolls=[5])


def test_6_signed_zeros_and_nan():
  def f(x):
    for _ in range(5):
      x = -x * 1.
    return x
  check_roll(f, np.array([0., -0., np.nan, np.inf], np.float32), rolls=[5], grad=False)


def test_6_unused_results_and_dead_layers():
  def f(ws, x):
    for w in ws:
      jnp.cos(x @ w)
      x = jnp.tanh(x @ w)
    return x
  check_roll(f, WS, X, rolls=[6])


def test_6_float0_tangents():
  def f(x, n):
    for _ in range(5):
      x = x * n
    return x
  program = lambda x, n: jax.jvp(f, (x, n), (x, np.zeros((), jax.dtypes.float0)))
  check_roll(program, X, np.int32(2), grad=False)


def test_6_x64(x64):
  report = check_roll(jax.value_and_grad(loss), [np.asarray(w, np.float64) for w in WS], np.asarray(X, np.float64))
  assert [r.trip_count for r in report.rolls] == [6, 5]


def test_7_name_scopes_stay():
  def f(ws, x):
    for w in ws:
      with jax.named_scope("my_layer"):
        x = jnp.tanh(x @ w)
    return x
  for strategy in ("scan", "fence"):
    text = roll_jit(f, roll=RollOptions(strategy=strategy, min_body_eqns=1)).lower(WS, X).compile().as_text()
    assert "my_layer/tanh" in text


def test_7_source_locations_are_the_users():
  lowered = roll_jit(chain, roll=FORCED).lower(WS, X)
  text = lowered.as_text(debug_info=True)
  assert "programs.py" in text and "jaxroll/rewrite.py" not in text.replace("\\", "/")


@pytest.mark.parametrize("strategy", ["scan", "fence", "call", "auto"])
def test_8_sharded_parameters(strategy):
  mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "i"))
  ws = [jax.device_put(w, spec) for w in weights(6, 16, 16)]
  x = np.ones((8, 16), np.float32)
  plain, rolled = jax.jit(jax.grad(loss)), roll_jit(jax.grad(loss), roll=RollOptions(strategy=strategy, min_body_eqns=1))
  for a, b in zip(plain(ws, x), rolled(ws, x)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_8_explicit_sharding():
  mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
  with jax.set_mesh(mesh):
    ws = [jax.device_put(w, jax.P(None, None)) for w in weights(6, 16, 16)]
    x = jax.device_put(np.ones((8, 16), np.float32), jax.P("i", None))
    for strategy in ("scan", "fence"):
      rolled = roll_jit(chain, roll=RollOptions(strategy=strategy, min_body_eqns=1))
      out, expected = rolled(ws, x), jax.jit(chain)(ws, x)
      assert out.sharding == expected.sharding
      np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_8_shard_map():
  mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  def f(x):
    def local(x):
      for _ in range(5):
        x = jnp.sin(x) + jax.lax.psum(x, "i") * 0.1
      return x
    return jax.shard_map(local, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))(x)
  x = np.arange(16, dtype=np.float32)
  np.testing.assert_allclose(roll_jit(f, roll=FORCED)(x), jax.jit(f)(x), rtol=1e-5)


def test_10_symbolic_shapes():
  rolled = roll_jit(chain, roll=FORCED)
  b, = jax.export.symbolic_shape("b")
  shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in WS], jax.ShapeDtypeStruct((b, 4), np.float32)
  exported = jax.export.export(rolled)(*shapes)
  np.testing.assert_allclose(exported.call(WS, X), jax.jit(chain)(WS, X), rtol=1e-5)


def test_12_an_internal_error_warns_once_and_compiles_the_original(monkeypatch):
  import jaxroll.pipeline
  def broken(*args):
    raise ZeroDivisionError("planted")
  monkeypatch.setattr(jaxroll.pipeline, "find_rolls", broken)
  options = RollOptions(strategy="scan", min_body_eqns=1, strict=False)
  fresh = lambda ws, x: chain(ws, x)  # whose traces are not cached
  with pytest.warns(RuntimeWarning, match="planted") as caught:
    out = roll_jit(fresh, roll=options)(WS, X)
  assert len(caught) == 1
  np.testing.assert_array_equal(out, jax.jit(chain)(WS, X))
  with pytest.raises(ZeroDivisionError):
    roll_jit(fresh, roll=FORCED)(WS, X)


def test_12_a_wrong_type_is_noticed(monkeypatch):
  import jaxroll.pipeline
  closed = jax.make_jaxpr(chain)(WS, X)
  monkeypatch.setattr(jaxroll.pipeline, "evaluate", lambda *args: [jnp.zeros((3, 4), jnp.int32)])
  with pytest.raises(jaxroll.RollError, match="result types differ"):
    roll_jaxpr(closed, FORCED)
