"""Every transformation by every model: outside of the roll and inside, alone and in pairs, through the oracle."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback, jet, pallas

from jaxroll import RollOptions, collect_reports, roll, roll_jit
from jaxroll.testing import check_roll, evaluate
from programs import chain, dropout_chain, weights

N = 4
FORCED = RollOptions(strategy="scan", min_trip_count=3, min_body_eqns=1)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
WS = weights(N, 4, 4)


def dropout(ws, x):
  return dropout_chain(ws, x, jax.random.key(3))


def recurrence(ws, x):
  h = jnp.zeros(4)
  for t in range(x.shape[0] * 2):
    h = jnp.tanh(x[t % 3] @ ws[0] + h @ ws[1])
  return h


def branches(ws, x):
  """Layers with a loop, a branch and a rule of their own inside."""
  for w in ws:
    y = lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0]
    x = lax.cond(y.sum() > 0, jnp.tanh, jnp.cos, y) + jax.nn.relu(x)
  return x


MODELS = [chain, dropout, recurrence, branches]


def total(f):
  return lambda ws, x: (f(ws, x) ** 2).sum()


def tangents(ws, x):
  return jax.tree.map(jnp.ones_like, ws), jnp.ones_like(x)


@jax.custom_gradient
def doubled_gradient(x):
  return x * 1., lambda ct: (2 * ct,)


MESH = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))


def wrapped_vjp(f):
  g = jax.custom_vjp(lambda n, ws, x: f(ws, x) * n, nondiff_argnums=(0,))
  g.defvjp(lambda n, ws, x: jax.vjp(lambda ws, x: f(ws, x) * n, ws, x), lambda n, pull, ct: pull(ct * n))
  return functools.partial(g, 2)


def wrapped_jvp(f):
  g = jax.custom_jvp(f)
  g.defjvp(lambda p, t: jax.jvp(f, p, jax.tree.map(lambda a: 2 * a, t)))
  return g


def named(f):
  def g(ws, x):
    return f(ws, checkpoint_name(jnp.sin(x), "kept"))
  return jax.checkpoint(g, policy=jax.checkpoint_policies.save_only_these_names("kept"))


def collective(f):
  def g(ws, x):
    for _ in range(3):
      x = f(ws, x) + lax.psum(x, "b") * 0.01
    return x
  return lambda ws, x: jax.vmap(g, (None, 0), axis_name="b")(ws, jnp.stack([x, x + 1]))


# From functions of (ws, x) to such.
TRANSFORMATIONS = {
    "grad": lambda f: jax.grad(total(f)),
    "value_and_grad": lambda f: jax.value_and_grad(total(f), argnums=(0, 1)),
    "jvp": lambda f: lambda ws, x: jax.jvp(f, (ws, x), tangents(ws, x)),
    "vjp": lambda f: lambda ws, x: (lambda out, pull: pull(out))(*jax.vjp(f, ws, x)),
    "linearize": lambda f: lambda ws, x: jax.linearize(f, ws, x)[1](*tangents(ws, x)),
    "linear_transpose": lambda f: lambda ws, x: jax.linear_transpose(
        lambda y: jax.jvp(lambda x: f(ws, x), (x,), (y,))[1], x)(f(ws, x)),
    "jacfwd": lambda f: lambda ws, x: jax.jacfwd(lambda x: f(ws, x))(x),
    "jacrev": lambda f: lambda ws, x: jax.jacrev(lambda x: f(ws, x))(x),
    "vmap": lambda f: lambda ws, x: jax.vmap(f, (None, 0))(ws, jnp.stack([x, x + 1])),
    "vmap_weights": lambda f: lambda ws, x: jax.vmap(f, (0, None), out_axes=-1)([jnp.stack([w, w]) for w in ws], x),
    "vmap_vmap": lambda f: lambda ws, x: jax.vmap(jax.vmap(f, (None, 0)), (None, 1))(
        ws, jnp.stack([jnp.stack([x, -x])] * 2, 1)),
    "jit": lambda f: lambda ws, x: jax.jit(f)(ws, x),
    "checkpoint": lambda f: jax.grad(total(jax.checkpoint(f))),
    "checkpoint_names": lambda f: jax.grad(total(named(f))),
    "custom_jvp": lambda f: jax.grad(total(wrapped_jvp(f))),
    "custom_vjp": lambda f: jax.grad(total(wrapped_vjp(f))),
    "custom_gradient": lambda f: jax.grad(total(lambda ws, x: f(ws, doubled_gradient(x))), argnums=1),
    "scan": lambda f: lambda ws, x: lax.scan(lambda c, _: (c + f(ws, x).sum(), c), 0., None, length=3),
    "while_loop": lambda f: lambda ws, x: lax.fori_loop(0, lax.stop_gradient(x).size, lambda i, c: c + f(ws, x).sum(), 0.),
    "switch": lambda f: lambda ws, x: lax.switch(jnp.int32(x[0, 0] > 9), [f, lambda ws, x: f(ws, x + 1)], ws, x),
    "map": lambda f: lambda ws, x: lax.map(lambda y: f(ws, y), jnp.stack([x, x + 1])),
    "associative_scan": lambda f: lambda ws, x: lax.associative_scan(jnp.add, f(ws, x)),
    "axis_name": collective,
    "shard_map": lambda f: lambda ws, x: jax.shard_map(
        lambda ws, x: lax.psum(f(ws, x[0]), "i"), mesh=MESH, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P())(
            ws, jnp.stack([x] * 2)),
    "hessian": lambda f: lambda ws, x: jax.hessian(lambda x: f(ws, x).sum())(x),
    "grad_grad": lambda f: jax.grad(lambda ws, x: sum(g.sum() for g in jax.tree.leaves(jax.grad(total(f))(ws, x)))),
    "vmap_grad": lambda f: lambda ws, x: jax.vmap(jax.grad(total(f)), (None, 0))(ws, jnp.stack([x, x + 1])),
    "grad_vmap": lambda f: jax.grad(lambda ws, x: total(jax.vmap(f, (None, 0)))(ws, jnp.stack([x, x + 1]))),
    "jit_grad_checkpoint": lambda f: lambda ws, x: jax.jit(jax.grad(total(jax.checkpoint(f))))(ws, x),
}
QUICK = {"hessian", "grad_grad", "shard_map", "jacfwd", "jacrev"}  # dear to check: with the plainest model only


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
def test_transformed(model, name):
  if name in QUICK and model is not chain:
    pytest.skip("checked with the plainest model only")
  fun = TRANSFORMATIONS[name](model)
  # The roll around the transformed function: bit for bit.
  report = check_roll(fun, WS, X, grad=False, vmap=False, compiled=False)
  assert report.rolls
  # The transformation around the rolled function: the sum over a shared weight's uses is in another order.
  with collect_reports() as reports:
    got = outcomes(TRANSFORMATIONS[name](roll(model, FORCED)))
  assert any(r.rolls for r in reports)
  for a, b in zip(outcomes(fun), got, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def outcomes(fun):
  """Its results under `jax.jit`, one primitive at a time."""
  leaves, tree = jax.tree.flatten((WS, X))
  closed = jax.make_jaxpr(jax.jit(lambda *leaves: fun(*jax.tree.unflatten(tree, leaves))))(*leaves)
  return evaluate(closed, *leaves)


def layer(x, i=0):
  return jnp.sin(x @ jnp.eye(4)) * 2


def within(context):
  """Layers, each in a context of its own."""
  def f(x):
    for _ in range(N):
      with context():
        x = layer(x)
    return x
  return f


def repeat(layer):
  def f(x):
    for i in range(N):
      x = layer(x, i)
    return x
  return f


def double_kernel(x_ref, o_ref):
  o_ref[...] = x_ref[...] * 2


def referenced(x):
  ref = jax.new_ref(x)
  for i in range(N):
    ref[i % 3] = layer(ref[i % 3])
  return jax.freeze(ref)


def half(x):
  return np.asarray(x) / 2


@contextlib.contextmanager
def debug_key_reuse():
  with jax.enable_checks(False), jax.debug_key_reuse(True):  # with both, JAX refuses any scan over keys
    yield


SCOPES = {
    "named_scope": lambda: jax.named_scope("layer"), "matmul_precision": lambda: jax.default_matmul_precision("float32"),
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"), "checking_leaks": jax.checking_leaks,
    "x64": lambda: jax.enable_x64(True), "debug_nans": lambda: jax.debug_nans(True),
    "debug_key_reuse": debug_key_reuse, "enable_checks": lambda: jax.enable_checks(True)}
PROGRAMS = {
    **{name: within(scope) for name, scope in SCOPES.items()},
    "pure_callback": repeat(lambda x, i: jax.pure_callback(half, jax.typeof(x), layer(x))),
    "io_callback": repeat(lambda x, i: io_callback(half, jax.typeof(x), layer(x))),
    "io_callback_ordered": repeat(lambda x, i: io_callback(half, jax.typeof(x), layer(x), ordered=True)),
    "jet": lambda x: jet.jet(repeat(layer), (x,), ((x, x * 0),)),
    "pallas": repeat(lambda x, i: layer(pallas.pallas_call(
        double_kernel, out_shape=jax.ShapeDtypeStruct(X.shape, X.dtype), interpret=True)(x))),
    "references": referenced,
}
# Not rolled: what has effects or holds references, and types that JAX would narrow outside of their context.
KEPT = {"x64", "io_callback", "io_callback_ordered", "pallas", "references"}


def same(got, expected):
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROGRAMS)
def test_contexts_around_layers_and_effects_in_them(name):
  with collect_reports() as reports:
    got = roll_jit(PROGRAMS[name], roll=FORCED)(X)
  assert bool(reports[0].rolls) != (name in KEPT)
  same(got, jax.jit(PROGRAMS[name])(X))


@pytest.mark.parametrize("name", SCOPES)
def test_contexts_around_the_whole(name):
  model = lambda ws, x: dropout(ws, x)
  with SCOPES[name](), collect_reports() as reports:
    same(roll_jit(model, roll=FORCED)(WS, X), jax.jit(model)(WS, X))
  assert bool(reports and reports[0].rolls) == (name != "debug_key_reuse")


@pytest.mark.parametrize("strategy", ["auto", "scan", "fence", "call"])
def test_reuse_of_keys_is_found_as_under_jit(strategy):
  def model(key, x, again):
    for k in jax.random.split(key, 8):
      x = jnp.tanh(x * jax.random.bernoulli(k, 0.9, x.shape)) + jax.random.uniform(k if again else jax.random.clone(k))
    return x.sum()

  gradient = roll_jit(jax.value_and_grad(model, 1), roll=RollOptions(strategy=strategy, min_body_eqns=1), static_argnums=2)
  with debug_key_reuse():
    with pytest.raises(jax.errors.KeyReuseError):
      gradient(jax.random.key(0), X, True)
    same(gradient(jax.random.key(0), X, False), jax.value_and_grad(model, 1)(jax.random.key(0), X, False))


def test_jet_of_a_rolled_function():
  f = lambda rolled: lambda x: jet.jet(rolled(repeat(layer)), (x,), ((x, x * 0),))
  same(jax.jit(f(lambda g: roll(g, FORCED)))(X), jax.jit(f(lambda g: g))(X))


@pytest.mark.parametrize("ordered", [False, True])
def test_callbacks_of_layers_all_come(ordered):
  seen = []
  def f(x):
    for i in range(N):
      x = layer(x)
      jax.debug.callback(lambda i, y: seen.append((int(i), y.item())), i, x[0, 0], ordered=ordered)
    return x
  def calls(jit):
    seen.clear()
    jax.block_until_ready(jit(lambda x: f(x))(X))
    jax.effects_barrier()
    return list(seen) if ordered else sorted(seen)
  expected = calls(jax.jit)
  got = calls(functools.partial(roll_jit, roll=FORCED))
  assert [i for i, _ in got] == [i for i, _ in expected] == list(range(N))
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1, 9])
def test_checkify(scale):
  def f(x):
    for _ in range(N):
      x = layer(x)
      checkify.check(jnp.all(x < 5), "too large: {}", x.max())
    return x
  plain, rolled = (checkify.checkify(jit(f)) for jit in (jax.jit, functools.partial(roll_jit, roll=FORCED)))
  inside = roll_jit(checkify.checkify(f), roll=FORCED)
  x = jnp.full((3, 4), 0.1) * scale
  (error, out), others = plain(x), (rolled(x), inside(x))
  for other_error, other in others:
    assert other_error.get() == error.get()
    same(other, out)
