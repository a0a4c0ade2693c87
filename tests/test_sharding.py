"""On several devices a rolled program sends no more than the program as written."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxroll import RollOptions, collect_reports, explain, roll_jit
from jaxroll.where import asks_for_several_devices, is_on_several_devices
from programs import weights

D, LAYERS, STEPS = 16, 4, 12
EAGER = RollOptions(optimize_for="compile")
AUTO = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
P = jax.P
_COLLECTIVE = re.compile(r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_BYTES = {"pred": 1, "f32": 4, "s32": 4, "u32": 4}


def sent(compiled) -> tuple[int, int]:
  """How many collectives run, and the bytes of their results; in the body of a loop, each time that it runs."""
  computations, entry = {}, None
  for line in compiled.as_text().splitlines():
    head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
    if head:
      lines = computations[head[2]] = []
      entry = head[2] if head[1] else entry
    elif line.startswith("  "):
      lines.append(line)

  def walk(name) -> np.ndarray:
    total = np.zeros(2, int)
    for line in computations[name]:
      found = _COLLECTIVE.search(line)
      if found:
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
        total += 1, sum(_BYTES[t] * int(np.prod([int(d) for d in shape.split(",") if d])) for t, shape in shapes)
      body = re.search(r" while\(.*body=%?([\w.\-]+)", line)
      if body:
        total += int(re.search(r'known_trip_count":\{"n":"(\d+)"', line)[1]) * walk(body[1])
      elif " call(" in line:
        total += walk(re.search(r"to_apply=%?([\w.\-]+)", line)[1])
    return total

  return tuple(walk(entry).tolist())


def layers(ps, x):
  for p in ps:
    h = jax.nn.gelu(x @ p["up"] + p["bias"])
    x = x + h @ p["down"]
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
  return x


def recurrence(p, xs):
  h = jnp.zeros((xs.shape[1], D))
  for t in range(STEPS):
    h = jnp.tanh(xs[t] @ p["x"] + h @ p["h"])
  return h


def gradient(f):
  return jax.grad(lambda p, x: (f(p, x) ** 2).mean())


def step(p, x):
  return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradient(layers)(p, x))


LAYER = {"up": weights(1, D, 2 * D)[0], "bias": np.zeros(2 * D, np.float32), "down": weights(1, 2 * D, D)[0]}
CELL = dict(zip("xh", weights(2, D, D)))
FSDP = {"up": P("i"), "bias": P("i"), "down": P("i")}, P("i")
TENSOR = {"up": P(None, "i"), "bias": P("i"), "down": P("i", None)}, P()
BOTH = {"up": P("d", "m"), "bias": P("m"), "down": P("m", "d")}, P("d")
CASES = {
    "fsdp": (step, AUTO, FSDP), "tensor": (step, AUTO, TENSOR), "fsdp and tensor": (step, GRID, BOTH),
    "data recurrence": (gradient(recurrence), AUTO, ({"x": P(), "h": P()}, P(None, "i"))),
    "fsdp recurrence": (gradient(recurrence), AUTO, ({"x": P("i"), "h": P("i")}, P(None, "i"))),
    "tensor recurrence": (gradient(recurrence), AUTO, ({"x": P(None, "i"), "h": P(None, "i")}, P())),
}


def placed(name, mesh, specs):
  """Arguments on the mesh, and their shardings."""
  shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs, is_leaf=lambda s: isinstance(s, P))
  if "recurrence" in name:
    args = CELL, np.ones((STEPS, 8, D), np.float32)
  else:
    args = [LAYER] * LAYERS, np.ones((8, D), np.float32)
    shardings = [shardings[0]] * LAYERS, shardings[1]
  return jax.tree.map(jax.device_put, args, shardings), shardings


@pytest.mark.parametrize("name", CASES)
def test_nothing_more_is_sent(name):
  fun, mesh, specs = CASES[name]
  args, _ = placed(name, mesh, specs)
  plain = jax.jit(fun).lower(*args).compile()
  rolled = roll_jit(fun, roll=EAGER)
  compiled = rolled.lower(*args).compile()
  assert [r.strategy for r in explain(rolled)(*args).rolls] and sent(plain)[0] > 0
  assert sent(compiled)[0] <= sent(plain)[0] and sent(compiled)[1] <= sent(plain)[1]
  for a, b in zip(jax.tree.leaves(plain(*args)), jax.tree.leaves(compiled(*args)), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_scan_would_send_more():
  """What the test above guards against, and that it can tell."""
  fun, mesh, specs = CASES["fsdp recurrence"]
  args, _ = placed("fsdp recurrence", mesh, specs)
  scanned = roll_jit(fun, roll=RollOptions(strategy="scan")).lower(*args).compile()
  assert sent(scanned)[1] > sent(jax.jit(fun).lower(*args).compile())[1]


def test_how_it_is_known_that_there_are_several_devices():
  _, mesh, specs = CASES["fsdp recurrence"]
  args, shardings = placed("fsdp recurrence", mesh, specs)
  host = jax.tree.map(np.asarray, args)
  def strategies(f, args):
    return {"devices" if "devices" in r.reason else r.strategy for r in explain(f, EAGER)(*args).rolls}
  assert "devices" not in strategies(roll_jit(recurrence), host)
  assert strategies(roll_jit(recurrence), args) == {"devices"}
  assert strategies(roll_jit(recurrence, in_shardings=shardings), host) == {"devices"}
  constrained = lambda p, x: recurrence(p, jax.lax.with_sharding_constraint(x, shardings[1]))
  assert strategies(roll_jit(constrained), host) == {"devices"}
  with jax.set_mesh(mesh):
    assert strategies(roll_jit(recurrence), host) == {"devices"}
  one = jax.NamedSharding(jax.make_mesh((1,), ("i",)), P())
  assert not asks_for_several_devices({"in_shardings": one}) and asks_for_several_devices({"out_shardings": (None, P("i"))})
  assert not is_on_several_devices(jax.make_jaxpr(recurrence)(*jax.device_put(host, one)))


@pytest.mark.parametrize("strategy", ["scan", "fence", "call", "inline"])
def test_each_strategy_on_a_mesh_with_explicit_axes(strategy):
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
  def f(x):
    for _ in range(5):
      x = jnp.tanh(jnp.sin(x) * 0.5) + 0.1
    return x
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.linspace(0, 1, 8).reshape(2, 4), P("i"))
    with collect_reports() as reports:
      got = roll_jit(f, roll=RollOptions(strategy=strategy, min_body_eqns=1, strict=True))(x)
    np.testing.assert_allclose(got, jax.jit(f)(x), rtol=1e-6)
  assert [r.strategy for r in reports[0].rolls] == ["fence" if strategy == "call" else strategy]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("strategy", ["scan", "fence"])
def test_axes_that_are_auto_in_a_part_of_the_program(size, strategy):
  mesh = jax.make_mesh((size,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
  options = RollOptions(strategy=strategy, min_trip_count=2, min_body_eqns=1, strict=True)
  def steps(x):
    for k in range(1, 5):
      x = jnp.tanh(x * k) + jnp.sin(x).sum(0)
    return x
  def dropout(x, key):
    for k in range(4):  # each draw is made under auto axes, the rest under explicit ones
      bits = jax.random.bernoulli(jax.random.fold_in(key, k), 0.5, x.shape, out_sharding=P("i"))
      x = jnp.where(bits, x * 2, 0) + jnp.sin(x)
    return x
  with jax.set_mesh(mesh):
    x, key = jax.device_put(jnp.ones((4, 4)), P("i")), jax.random.key(0)
    within = jax.sharding.auto_axes(steps, out_sharding=P("i"))
    for f, args in ((within, (x,)), (jax.grad(lambda x: within(x).sum()), (x,)), (dropout, (x, key))):
      with collect_reports() as reports:
        rolled, plain = roll_jit(f, roll=options)(*args), jax.jit(f)(*args)
      assert any(r.trip_count == 4 for r in reports[0].rolls)
      assert jax.typeof(rolled) == jax.typeof(plain)
      np.testing.assert_allclose(rolled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [4, 1])
def test_pads_with_varying_starts_on_a_mesh_with_explicit_axes(width):
  mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Explicit,))
  options = RollOptions(strategy="scan", min_body_eqns=1, strict=True)
  def f(x):
    for k in range(5):
      x = x + jnp.pad(jnp.sin(x[:, :width]), ((0, 0), (k, 8 - width - k)))
    return x
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.linspace(0, 1, 32).reshape(4, 8), P("i"))
    for g in (f, jax.grad(lambda x: f(x).sum())):
      with collect_reports() as reports:
        rolled, plain = roll_jit(g, roll=options)(x), jax.jit(g)(x)
      assert any(r.trip_count >= 5 for r in reports[0].rolls)
      assert jax.typeof(rolled) == jax.typeof(plain)
      np.testing.assert_allclose(rolled, plain, rtol=1e-6)
