"""`roll_jit` beside `jax.jit`: the same results, errors in the same words, the same warnings."""

import copy
import functools
import gc
import inspect
import itertools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable

import jaxroll
from jaxroll import RollOptions, enabled, explain, roll_jit

X = np.ones(4, np.float32)
NUMBERS = itertools.count()
FORCED = RollOptions(strategy="scan", min_trip_count=2, min_body_eqns=1)
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
SPLIT = jax.NamedSharding(MESH, jax.P("i"))


def add(x, n=1):
  """Adds."""
  return x + n


def decide(first, xs, *, n=0):
  return first if xs[1].sum() > 0 else xs[0]


def generator(x):
  yield x


class Add:
  def __init__(self, n=1):
    self.n = n
  def __call__(self, x):
    return x + self.n
  def __eq__(self, other):
    return self.n == other.n
  def __hash__(self):
    return self.n


class Unhashable(Add):
  __hash__ = None


class Incomparable:
  def __init__(self):
    self.a = np.arange(3)
  def __hash__(self):
    return 1
  def __eq__(self, other):
    return self.a == other.a  # an array, which has no truth value


class WithoutWeakReferences:
  __slots__ = ()
  def __call__(self, x):
    return x + 1


class BrokenRepr(Add):
  def __repr__(self):
    raise ValueError("broken")


def outcome(case, jit):
  """What a case gives under a jit: results or error, and warnings with the file that they point to."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
      result = "gives", repr(case(jit))
    except Exception as error:
      result = "raises", type(error).__name__, str(error)
  seen = [(str(w.message), w.category, w.filename) for w in caught]
  return re.sub(r"0x[0-9a-f]+", "0x", str((result, seen)))


FUNCTIONS = (
    add, lambda x: x, Add(), Add().__call__, abs, jnp.sin, jax.jit(add), functools.partial(add),
    functools.partial(functools.partial(add), n=2), functools.partial(lambda x: x))


def static_name_unhashable(jit):
  return jit(add, static_argnames="n")(X, n=[1])


def under_new_name(f):
  f.__name__ = f"f{next(NUMBERS)}"  # by which JAX's caches know it from the same one of another case
  return f


def static_incomparable(jit):
  calls = []
  def f(a, x, b, y):
    calls.append(None)
    return x * a.a[1] + y * b.a[2]
  f, c = jit(under_new_name(f), static_argnums=(0, 2)), Incomparable()
  return f(c, X, c, X), f(c, X, b=c, y=X), f._cache_size(), len(calls)


def statics_compared(jit):
  f = jit(under_new_name(lambda x, c: x), static_argnums=1)
  f(X, Incomparable())
  return f(X, Incomparable())


def donated_buffer_is_gone(jit):
  f, a = jit(add, donate_argnames="x"), jnp.ones(3)
  f(a)
  return a.is_deleted(), f(a)


def unused_arguments(jit):
  return [len(jit(lambda x, y: x, keep_unused=keep).lower(X, X).compile().input_shardings[0]) for keep in (False, True)]


def inlined(jit):
  f = jit(add, inline=True)
  return jax.make_jaxpr(lambda x: f(x))(X)


def options_of_nested(jit):
  g = jit(add, compiler_options={"xla_embed_ir_in_hlo": True})
  return jit(lambda x: g(x))(X)


def names(jit):
  attributes = "__name__", "__qualname__", "__module__", "__doc__", "__annotations__"
  return [[getattr(jit(f), a, None) for a in attributes] for f in FUNCTIONS]


def reprs(jit):
  f = jit(add)
  before = repr(f)
  del f.__wrapped__
  return before, repr(f), f(X), repr(jit(BrokenRepr())), repr(jit(jnp.sin))


def attributes(jit):
  def f(x):
    return x
  f.mine = 3
  return jit(f).mine, jit(f).__wrapped__ is f, isinstance(jit(f), jax.stages.Wrapped)


def pickled(jit):
  f = pickle.loads(pickle.dumps(jit(add, static_argnums=1)))
  return f(X, 2), f, f.__wrapped__ is add, pickle.loads(pickle.dumps(jit(functools.partial(add, n=3), inline=True)))(X)


def copied(jit):
  f = jit(add)
  return copy.copy(f)(X), copy.deepcopy(f)(X), copy.deepcopy(f) is f


def cache_sizes(jit):
  f = jit(lambda x: x)
  sizes = []
  for x in (X, X[:2], X, None):
    f(x)
    sizes.append(f._cache_size())
  f.clear_cache()
  return [*sizes, f._cache_size()]


def traces_of_one_function(jit):
  calls = []
  def f(x):
    calls.append(None)
    return x
  counts = []
  for call in (lambda: jit(f)(2), lambda: jit(f)(3), lambda: jit(f, keep_unused=True)(3), lambda: jax.eval_shape(f, 3),
               lambda: jit(functools.partial(f))(2), lambda: jit(f)(X)):
    call()
    counts.append(len(calls))
  return counts


def traces_of_equal_functions(jit):
  calls = []
  class Counted(Add):
    def __call__(self, x):
      calls.append(None)
      return x + self.n
  f, g, h = jit(Counted(5)), jit(Counted(5)), jit(Counted(6))
  return f(X), g(X), h(X), len(calls)


def traces_of_methods(jit):
  calls = []
  class M:
    def f(self, x):
      calls.append(None)
      return x
    g = jit(f, static_argnums=0)
  m = M()
  f, f_again = jit(m.f), jit(m.f)
  return f(X), f_again(X), m.g(X), M.g(m, X), len(calls)


def functions_are_collected(jit):
  def f(x):
    return x
  jit(f)(X)
  alive = weakref.ref(f)
  del f
  gc.collect()
  return alive() is None


def called_directly_without_jit(jit):
  seen = []
  with jax.disable_jit():
    jit(lambda x: seen.append(type(x)))(X)
  return seen


def called_anew_without_jit(jit):
  calls = []
  def f(x):
    calls.append(x.shape)
    return x * 2
  g = jit(f)
  g(X)
  with jax.disable_jit():
    for _ in range(2):
      jax.eval_shape(lambda x: g(x), X)
  return calls


def captured_arrays_are_freed_at_once(jit):
  def call(fun, *args):
    x = jnp.array(X)
    jit(lambda *args: fun(x, *args))(*args)
    return weakref.ref(x)
  def noisy(x, key):
    for k in jax.random.split(key, 4):
      x = x * jax.random.uniform(k, x.shape) + jnp.sin(x)
    return x
  key = jax.random.key(0)
  gc.collect()
  gc.disable()
  try:
    return [freed() is None for freed in (call(lambda x: x), call(add, X), call(noisy, key))]
  finally:
    gc.enable()


def named_partial(jit):
  f = functools.partial(add)
  f.__name__ = "mine"
  return jit(f).__getstate__()["function_name"], jit(f).lower(X).as_text().split("\n")[0]


def refused_retrace(jit):
  with jax.no_tracing():
    return jit(lambda x: x)(X)


def leak_checked(jit):
  with jax.checking_leaks():
    return jit(lambda x: x + 1)(X)


def leaked_tracer(jit):
  seen = []
  jit(lambda x: seen.append(x + 1))(X)
  return seen[0] + 1


def nan_found(jit):
  with jax.debug_nans(True):
    return jit(lambda x: jnp.log(-x))(X)


def reference_argument(jit):
  ref = jax.new_ref(jnp.zeros(3))
  jit(lambda r, x: r.__setitem__(..., x))(ref, X[:3])
  jit(lambda x: ref.__setitem__(0, x))(5.)
  return ref[...]


def references_alias(jit):
  ref = jax.new_ref(jnp.zeros(3))
  return jit(lambda a, b: None)(ref, ref)


def ahead_of_time(jit):
  lowered = jit(add, donate_argnums=0).lower(X)
  traced = jit(add).trace(X)
  return (lowered.args_info, lowered.out_info, lowered.in_tree, traced.fun_name, traced.out_info, traced.jaxpr,
          traced.lower().compile()(X), jit(add).eval_shape(X))


def serialized(jit):
  exported = jax.export.export(jit(add))(X)
  loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(jit(add).lower(X).compile()))
  return jax.export.deserialize(exported.serialize()).call(X), exported.fun_name, loaded(X)


CASES = [
    static_name_unhashable, static_incomparable, statics_compared, donated_buffer_is_gone, unused_arguments, inlined,
    options_of_nested, names, reprs, attributes, pickled, copied, cache_sizes, traces_of_one_function,
    traces_of_equal_functions, traces_of_methods,
    functions_are_collected, captured_arrays_are_freed_at_once, called_directly_without_jit, called_anew_without_jit,
    named_partial, refused_retrace, leak_checked, leaked_tracer, nan_found,
    reference_argument, references_alias, ahead_of_time, serialized,
    # Static and donated arguments.
    lambda jit: jit(add, static_argnums=1)(X, [1]),
    lambda jit: jit(lambda x, n: x, static_argnums=1)(X),
    lambda jit: jit(add, static_argnums=3),
    lambda jit: jit(add, static_argnums=1.5),
    lambda jit: jit(add, static_argnames="missing"),
    lambda jit: jit(add, static_argnames=iter(["n"]))(X, n=2),
    lambda jit: jit(add, static_argnums=-1)(X, 3),
    lambda jit: jit(lambda f, x: f(x), static_argnums=0)(jnp.sin, X),
    lambda jit: jit(add, donate_argnums=3),
    lambda jit: jit(add, donate_argnames="missing"),
    lambda jit: jit(add, donate_argnums=0, static_argnums=0),
    lambda jit: jit(lambda x, y: y.sum(), donate_argnums=0)(jnp.ones(3), jnp.ones(5)),
    # Devices, shardings, compiler options.
    lambda jit: jit(add, device=jax.devices()[0])(X),
    lambda jit: jit(add, backend="cpu")(X),
    lambda jit: jit(add, backend="none such")(X),
    lambda jit: jit(add, backend="cpu", device=jax.devices()[0]),
    lambda jit: jit(add, device="cpu")(X),
    lambda jit: jit(add, in_shardings=(SPLIT, None), out_shardings=SPLIT)(X, X).sharding,
    lambda jit: jit(add, in_shardings=(SPLIT, SPLIT))(X, n=X),
    lambda jit: jit(add, in_shardings=(SPLIT, SPLIT, SPLIT))(X, X),
    lambda jit: jit(add, out_shardings=(SPLIT, SPLIT))(X),
    lambda jit: jit(add, in_shardings=jax.experimental.layout.Layout((0,))),
    lambda jit: jit(add, compiler_options={"none such": True})(X),
    # What can be jitted.
    lambda jit: jit(None),
    lambda jit: jit(3),
    lambda jit: jit(generator),
    lambda jit: jit(staticmethod(add)),
    lambda jit: jit(classmethod(add)),
    lambda jit: jit()(add)(X),
    lambda jit: jit(none_such=1),
    lambda jit: jit(add, none_such=1),
    lambda jit: jit(WithoutWeakReferences()) and 1,
    lambda jit: jit(WithoutWeakReferences())(X),
    lambda jit: jit(Unhashable())(X),
    lambda jit: jit(np.sin)(X),
    lambda jit: [jit(f)(X) for f in FUNCTIONS],
    lambda jit: [jit(f).lower(X).as_text().split("\n")[0] for f in FUNCTIONS],
    lambda jit: [str(inspect.signature(jit(f))) for f in (add, decide, Add(), functools.partial(add, n=2))],
    # Arguments and results.
    lambda jit: (jit(lambda: 3)(), jit(lambda x: None)(X), jit(lambda x: ())(X), jit(lambda: {})()),
    lambda jit: jit(lambda *a, **k: (a, k))(X, 2, z=None, y=(1., None)),
    lambda jit: jit(lambda x, /, y=1, *, z=2: x + y + z, static_argnames=("y", "z"))(X, z=3),
    lambda jit: [o.weak_type for o in jit(lambda x, y: (x, x + y, 3, 2.0, True))(1, 2)],
    lambda jit: jit(add)(X, X, X),
    lambda jit: jit(add)("text"),
    lambda jit: jit(decide)({"a": "text"}, n=1),
    lambda jit: jit(lambda x: "text")(X),
    lambda jit: jit(lambda x: {"a": (x, object)})(X),
    lambda jit: jit(jax.new_ref)(X),
    # Errors in the function.
    lambda jit: jit(decide)(X, [X, X]),
    lambda jit: jit(decide, static_argnums=0)(3, [X, X]),
    lambda jit: jit(decide, static_argnames="n")(X, xs=[X, X], n=3),
    lambda jit: jit(functools.partial(decide, X))([X, X]),
    lambda jit: jit(lambda x: np.asarray(x))(X),
    lambda jit: jit(lambda x: {}["missing"])(X),
    lambda jit: jit(lambda x: [0, 1][x])(1),
]


@pytest.mark.parametrize("k", range(len(CASES)), ids=lambda k: CASES[k].__name__.strip("<>") + str(k))
def test_same_as_jit(k):
  case = CASES[k]
  expected = outcome(case, jax.jit)
  assert outcome(case, functools.partial(roll_jit, roll=FORCED)) == expected
  with enabled(FORCED):
    assert outcome(case, jax.jit) == expected


def test_explain_is_not_misled_by_copied_attributes():
  inner = roll_jit(add, roll=FORCED)
  @functools.wraps(inner)
  def outer(x):
    for _ in range(6):
      x = jnp.sin(inner(x))
    return x
  for f in (outer, jax.jit(outer)):
    assert explain(f, FORCED)(X).eqns_before == 12


_CACHED = """
import os, sys
import jax
from programs import dropout_chain, loss, weights
from jaxroll import RollOptions, roll_jit
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
ws, x = weights(6, 4, 4), jax.numpy.ones((3, 4))
for strategy in ("scan", "fence"):
  roll_jit(jax.grad(loss), roll=RollOptions(strategy=strategy, min_body_eqns=1))(ws, x)
roll_jit(lambda ws, x: dropout_chain(ws, x, jax.random.key(1)))(weights(30, 4, 4), x)
print(sorted(name for name in os.listdir(sys.argv[1]) if not name.endswith("atime")))
"""


def test_the_persistent_cache_hits_in_another_process(tmp_path):
  path = os.pathsep.join(map(str, (pathlib.Path(jaxroll.__file__).parent.parent, pathlib.Path(__file__).parent)))
  entries = [
      subprocess.run([sys.executable, "-c", _CACHED, str(tmp_path)], capture_output=True, text=True, check=True,
                     env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
  assert entries[0] == entries[1] and entries[0].count("jit_loss") == 2


def test_cache_misses_are_explained_once(caplog):
  def explained(jit):
    def f(x):
      return jit(lambda y: y + 1)(x)
    g = jit(f)
    caplog.clear()
    with jax.explain_cache_misses(True), caplog.at_level("WARNING", logger="jax"):
      g(X), g(X[:2])
    text = "\n".join(r.getMessage() for r in caplog.records)
    return re.sub(r"id=\d+|:\d+:\d+|\n *but seen another.*\n.*preventing caching\?", "", text)
  expected = explained(jax.jit)
  assert expected.count("TRACING CACHE MISS") == 4
  assert explained(functools.partial(roll_jit, roll=FORCED)) == expected
