"""Random programs with planted repeats and planted near-repeats.

A program is a few *layers* of one body, a short random sequence of operations over a pool of values
of one shape and dtype, laid out as one of several structures: a chain, two chains of which the
second reads what the first made, interleaved chains, nested ones, independent updates. Some stand
within a `scan`, a `cond`, a `checkpoint`, a custom derivative. In about half
of them one layer is spoiled: it differs from the others in one way that the pass must notice.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class GeneratedProgram:
  """A function, its arguments, and what it was made of.

  Attributes:
    fun: a function of `args`.
    args: pytrees of NumPy arrays and PRNG keys.
    description: one line: structure, shape, dtype, operations, what was spoiled.
    planted: how often the body occurs in a row as it is, 0 if something was spoiled.
    ulps: a tolerance for comparisons where sums may be taken in another order: random programs amplify
      what is rounded differently, most of all where they round to bfloat16 in between.
  """

  fun: Callable
  args: tuple
  description: str
  planted: int
  ulps: float


def random_program(seed: int) -> GeneratedProgram:
  """The random program of this seed.

  Args:
    seed: an integer of 0 to 2 ** 32 - 1. Equal seeds give equal programs, under every JAX version.

  >>> random_program(3).description == random_program(3).description
  True
  """
  return _Maker(np.random.RandomState(seed)).program()


@dataclasses.dataclass(frozen=True)
class _Step:
  """One operation: its name, positions of its operands in the pool, a literal."""

  op: str
  reads: tuple[int, int]
  c: float


@dataclasses.dataclass(frozen=True)
class _Body:
  """Operations, and which pool values are the next streams. `kept` is handed out of the layer."""

  steps: tuple[_Step, ...]
  picks: tuple[int, ...]
  kept: int

  def apply(self, streams, layer: "_Layer"):
    pool = list(streams)
    for step in self.steps:
      a, b = (pool[r] for r in step.reads)
      pool.append(_OPS[step.op].fun(layer, step.c, a, b))
    return [pool[p] for p in self.picks], pool[self.kept]


@dataclasses.dataclass
class _Layer:
  """What a layer reads of its own."""

  shape: tuple[int, ...]
  dtype: Any
  index: int
  weight: Any = None
  bias: Any = None
  table: Any = None
  columns: Any = None
  const: Any = None
  literal: Any = None
  extra: Any = None
  key: Any = None
  flag: Any = None


@dataclasses.dataclass(frozen=True)
class _Op:
  """`fun(layer, c, a, b)`, for dtypes of `kinds`, and what it needs: 'rank', 'four', 'square' or a layer's field."""

  fun: Callable
  kinds: str = "fc"
  needs: str = ""


def _custom_vjp(c):
  f = jax.custom_vjp(lambda x: x * 0.5)
  f.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * c,))
  return f


def _custom_vjp_with_residual(c, factor):
  f = jax.custom_vjp(lambda x, y: x * y)
  f.defvjp(lambda x, y: (x * y, (x, y)), lambda r, g: (g * r[1] * c, g * r[0] * factor))
  return f


def _custom_jvp(c):
  f = jax.custom_jvp(jnp.sin)
  f.defjvp(lambda p, t: (jnp.sin(p[0]), t[0] * c))
  return f


def _shifted(a):
  return jnp.concatenate([a[..., 1:], a[..., :1]], -1)


def _halves(a):
  left, right = jnp.split(a, 2, axis=-1)
  return jnp.concatenate([right, left * 0.5], -1)


def _named(a):
  with jax.named_scope("layer"):
    return a - a * 0.25


def _inner_scan(a, b):
  return lax.scan(lambda h, x: (h * 0.5 + x, h), a, jnp.stack([a, b]))[0]


def _padded(a, i):
  return jnp.pad(a[..., :2], [(0, 0)] * (a.ndim - 1) + [(i, 9 - i)])[..., 4:8]


def _same_with_rule(fun):
  f = jax.custom_jvp(fun)
  f.defjvp(lambda p, t: jax.jvp(fun, p, t))
  return f


# How a whole program is wrapped, given its arguments.
_WITHIN = {
    "": lambda fun, args: fun(args),
    "jit": lambda fun, args: jax.jit(fun)(args),
    "scan": lambda fun, args: lax.scan(lambda c, x: (c + x, fun(args)), 0., jnp.ones(2))[1],
    "cond": lambda fun, args: lax.cond(args["flag"], fun, lambda args: fun({**args, "x": args["x"][::-1]}), args),
    "checkpoint": lambda fun, args: jax.checkpoint(fun)(args),
    "custom_jvp": lambda fun, args: _same_with_rule(fun)(args),
    "scan of checkpoint": lambda fun, args: lax.scan(
        lambda c, x: (c, jax.checkpoint(fun)(args)), 0, None, length=2)[1],
}


def _while(a):
  return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] ^ s[0].astype(s[1].dtype)), (0, a))[1]


def _rotated(a, n):
  return (a << n) | lax.shift_right_logical(a, jnp.asarray(32 - n, a.dtype))


_OPS = {
    "tanh": _Op(lambda l, c, a, b: jnp.tanh(a)), "sin": _Op(lambda l, c, a, b: jnp.sin(a), "f"),
    "neg": _Op(lambda l, c, a, b: -a, "fci"), "scale": _Op(lambda l, c, a, b: a * c),
    "shift": _Op(lambda l, c, a, b: a + c), "divide": _Op(lambda l, c, a, b: a / (2 + c)),
    "rsub": _Op(lambda l, c, a, b: c - a), "exp": _Op(lambda l, c, a, b: jnp.exp(-a * a), "f"),
    "sqrt": _Op(lambda l, c, a, b: jnp.sqrt(jnp.abs(a) + c * c), "f"),
    "conj": _Op(lambda l, c, a, b: jnp.conj(a) * 0.5, "c"),
    "relu": _Op(lambda l, c, a, b: jax.nn.relu(a), "f"), "silu": _Op(lambda l, c, a, b: jax.nn.silu(a), "f"),
    "softplus": _Op(lambda l, c, a, b: jax.nn.softplus(a), "f"),
    "softmax": _Op(lambda l, c, a, b: jax.nn.softmax(a), "f", "rank"),
    "center": _Op(lambda l, c, a, b: a - a.mean(-1, keepdims=True), "fc", "four"),
    "norm": _Op(lambda l, c, a, b: a / jnp.sqrt(1 + jnp.sum(a * a)), "f"),
    "flip": _Op(lambda l, c, a, b: a[..., ::-1], "fci", "rank"),
    "shifted": _Op(lambda l, c, a, b: _shifted(a), "fci", "rank"),
    "halves": _Op(lambda l, c, a, b: _halves(a), "f", "four"),
    "jnp_roll": _Op(lambda l, c, a, b: jnp.roll(a, 1, -1), "fci", "four"),
    "transpose": _Op(lambda l, c, a, b: a.T, "fci", "square"),
    "cumsum": _Op(lambda l, c, a, b: jnp.cumsum(a, -1) * 0.5, "f", "rank"),
    "sort": _Op(lambda l, c, a, b: jnp.sort(a, -1), "fi", "rank"),
    "clip": _Op(lambda l, c, a, b: jnp.clip(a, -1, 1), "f"),
    "where": _Op(lambda l, c, a, b: jnp.where(a > c, a, b), "fi"),
    "cast": _Op(lambda l, c, a, b: jnp.asarray(a, jnp.bfloat16).astype(l.dtype), "f"),
    "one": _Op(lambda l, c, a, b: a + jnp.ones_like(b)),
    "zeros": _Op(lambda l, c, a, b: a * jnp.zeros(l.shape, l.dtype)),
    "iota": _Op(lambda l, c, a, b: a + jnp.arange(4, dtype=l.dtype), "fi", "four"),
    "jit": _Op(lambda l, c, a, b: jax.jit(lambda x, y: jnp.tanh(x) * c + y)(a, b)),
    "jit_literal": _Op(lambda l, c, a, b: jax.jit(lambda x: jnp.sin(x * l.literal) + c)(a), "f", "literal"),
    "jit_int": _Op(lambda l, c, a, b: jax.jit(lambda x: jax.jit(lambda y: y ^ l.index)(x) + l.index)(a), "i"),
    "jit_slice": _Op(lambda l, c, a, b: jax.jit(lambda x, t: x + t[l.index])(a, l.table), "fci", "table"),
    "remat_literal": _Op(
        lambda l, c, a, b: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x) * l.literal))(a), "f", "literal"),
    "pad": _Op(lambda l, c, a, b: a + _padded(a, l.index), "f", "four"),
    "write": _Op(lambda l, c, a, b: a + l.table.at[l.index].set(b).sum(0) * 0.1, "f", "table"),
    "jit_const": _Op(lambda l, c, a, b: jax.jit(lambda x: x + l.const)(a), "fci", "const"),
    "vjp": _Op(lambda l, c, a, b: _custom_vjp(c)(a), "f"),
    "vjp2": _Op(lambda l, c, a, b: _custom_vjp_with_residual(c, 0.5)(jnp.tanh(a), b), "f"),
    "jvp": _Op(lambda l, c, a, b: _custom_jvp(c)(a), "f"),
    "remat": _Op(lambda l, c, a, b: jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x) * c))(a), "f"),
    "remat_weight": _Op(lambda l, c, a, b: jax.checkpoint(lambda x, w: jnp.tanh(x + w))(a, l.bias), "f", "bias"),
    "scan": _Op(lambda l, c, a, b: _inner_scan(a, b)), "named": _Op(lambda l, c, a, b: _named(a)),
    "fori": _Op(lambda l, c, a, b: lax.fori_loop(0, 2, lambda i, x: x * c + i, a), "f"),
    "cond": _Op(lambda l, c, a, b: lax.cond(l.flag, lambda x: x * 0.5, lambda x: x + c, a), "fc", "flag"),
    "add": _Op(lambda l, c, a, b: a + b, "fci"), "sub": _Op(lambda l, c, a, b: a - b, "fci"),
    "mul": _Op(lambda l, c, a, b: jnp.tanh(a) * b, "fc"), "max": _Op(lambda l, c, a, b: jnp.maximum(a, b), "fi"),
    "mix": _Op(lambda l, c, a, b: a * c + b * (1 - c)),
    "attend": _Op(lambda l, c, a, b: jax.nn.softmax(a @ b.T) @ a, "f", "square"),
    "matmul": _Op(lambda l, c, a, b: a @ l.weight, "fc", "weight"),
    "matmul_t": _Op(lambda l, c, a, b: jnp.einsum("...i,ji->...j", a, l.weight), "f", "weight"),
    "bias": _Op(lambda l, c, a, b: a + l.bias, "fci", "bias"),
    "gate": _Op(lambda l, c, a, b: a * l.bias, "fc", "bias"),
    "table": _Op(lambda l, c, a, b: a + l.table[l.index], "fci", "table"),
    "column": _Op(lambda l, c, a, b: a * l.columns[..., l.index], "fc", "columns"),
    "const": _Op(lambda l, c, a, b: a + l.const, "fci", "const"),
    "literal": _Op(lambda l, c, a, b: a * l.literal + b, "f", "literal"),
    "literal_int": _Op(lambda l, c, a, b: a ^ jnp.asarray(l.index * 7 + 1, l.dtype), "i"),
    "extra": _Op(lambda l, c, a, b: a * 0.5 + l.extra * 0.5, "f", "extra"),
    "extra_int": _Op(lambda l, c, a, b: a + l.extra, "i", "extra"),
    "dropout": _Op(lambda l, c, a, b: jnp.where(jax.random.bernoulli(l.key, 0.5, l.shape), a * 2, 0), "f", "key"),
    "noise": _Op(lambda l, c, a, b: a + 0.1 * jax.random.uniform(l.key, l.shape, l.dtype), "f", "key"),
    "bits": _Op(lambda l, c, a, b: a ^ jax.random.bits(l.key, l.shape).astype(l.dtype), "i", "key"),
    "xor": _Op(lambda l, c, a, b: a ^ b, "i"), "imul": _Op(lambda l, c, a, b: a * 3 + b, "i"),
    "rotate": _Op(lambda l, c, a, b: _rotated(a, 5), "i"), "mod": _Op(lambda l, c, a, b: a % 97, "i"),
    "while": _Op(lambda l, c, a, b: _while(a), "i"), "popcount": _Op(lambda l, c, a, b: lax.population_count(a), "i")}

# Few shapes, and fewer for rarer dtypes, so that the oracle's compiled primitives are used again.
_SHAPES = ((3, 4),) * 6 + ((4, 4),) * 2 + ((),) * 2 + ((4,), (0, 4))
_RARE_SHAPES = ((3, 4), (3, 4), ())
_DTYPES = ("float32",) * 11 + ("int32",) * 2 + ("uint32", "bfloat16", "complex64")
_RULES = ("vjp", "vjp2", "jvp")  # their literal is in the derivative alone
_LITERALS = (0.5, 0.9, -0.25, 1.5, 0.0, 1.0)
_STRUCTURES = ("chain",) * 6 + ("there_and_back",) * 3 + ("interleaved", "nested", "leaves", "leaves_by_op")
_SPOILS = ("literal", "operand", "cast", "operation", "rule", "skip", "pick", "weight", "key", "body", "use", "swap")


class _Maker:
  """Draws one program."""

  def __init__(self, random: np.random.RandomState):
    self.random = random
    self.dtype = jnp.dtype(self.one_of(_DTYPES))
    self.shape = self.one_of(_SHAPES if self.dtype == jnp.float32 else _RARE_SHAPES)
    self.kind = {"i": "i", "u": "i", "c": "c"}.get(self.dtype.kind, "f")
    self.n = int(random.randint(2, 9))
    self.streams = int(self.one_of((1, 1, 1, 2, 2, 3)))
    self.structure = self.one_of(_STRUCTURES)
    self.weights = self.one_of(("list", "list", "stacked", "unstacked", "shared", "alternate", "const", "none"))
    self.keys = self.one_of(("none", "none", "split", "array", "presplit", "fold", "hash", "shared"))
    self.literals = self.one_of(("same", "index", "steps", "any"))
    self.spoil = self.one_of(_SPOILS) if self.chance(0.5) else ""
    self.spoiled = int(random.randint(self.n))
    self.way = self.one_of((0, 0, 1, 2)), int(random.randint(3))

  def one_of(self, options):
    return options[self.random.randint(len(options))]

  def chance(self, p: float) -> bool:
    return bool(self.random.rand() < p)

  def array(self, *shape) -> np.ndarray:
    if self.kind == "i":
      return self.random.randint(0, 1000, shape).astype(self.dtype)
    x = self.random.randn(*shape) * 0.7
    return np.asarray(x + 1j * self.random.randn(*shape) if self.kind == "c" else x).astype(self.dtype)

  # ops and bodies

  def ops(self, extra: bool) -> list[str]:
    four = len(self.shape) > 0 and self.shape[-1] == 4
    has = {
        "": True, "rank": len(self.shape) > 0, "four": four, "square": self.shape == (4, 4),
        "weight": four and self.weights != "none", "bias": self.weights != "none", "table": True, "columns": True,
        "const": True, "literal": True, "flag": True, "key": self.keys != "none", "extra": extra}
    return [name for name, op in _OPS.items() if self.kind in op.kinds and has[op.needs]]

  def body(self, streams: int, extra: bool = False) -> _Body:
    names = self.ops(extra)
    own = [n for n in names if _OPS[n].needs not in ("", "rank", "four", "square", "flag")]  # differ per layer
    steps: list[_Step] = []
    for k in range(self.random.randint(1, 8)):
      size = streams + k
      latest = size - 1 if self.chance(0.7) else int(self.random.randint(size))
      name = self.one_of(own) if self.chance(0.3) else self.one_of(names)
      if self.spoil == "rule" and self.kind == "f" and k == 0:
        name = self.one_of(_RULES)
      steps.append(_Step(name, (latest, int(self.random.randint(size))), self.one_of(_LITERALS)))
    size = streams + len(steps)
    picks = [size - 1, *(int(self.random.randint(size)) for _ in range(streams - 1))]
    if self.chance(0.3):
      self.random.shuffle(picks)
    return _Body(tuple(steps), tuple(picks), int(self.random.randint(streams, size)))

  def near(self, body: _Body) -> _Body:
    """The body with one thing changed."""
    steps, at = list(body.steps), int(self.random.randint(len(body.steps)))
    step, picks = steps[at], body.picks
    size = len(self.inputs) + at
    if self.spoil == "literal":
      steps[at] = dataclasses.replace(step, c=step.c + 0.125)
    elif self.spoil == "rule":
      steps[0] = dataclasses.replace(steps[0], c=steps[0].c + 0.125)
    elif self.spoil == "operand":
      steps[at] = dataclasses.replace(step, reads=(int(self.random.randint(size)), int(self.random.randint(size))))
    elif self.spoil == "operation":
      steps[at] = dataclasses.replace(step, op=self.one_of([n for n in self.ops(False)]))
    elif self.spoil == "cast" and self.kind == "f":
      steps[at] = dataclasses.replace(step, op="cast")
    elif self.spoil == "skip":
      steps[at] = dataclasses.replace(step, op="add", reads=(step.reads[0], 0))
    elif self.spoil == "pick":
      picks = tuple(int(self.random.randint(len(self.inputs) + len(steps))) for _ in picks)
    elif self.spoil == "swap" and at + 1 < len(steps):
      steps[at], steps[at + 1] = (dataclasses.replace(steps[at], op=steps[at + 1].op),
                                  dataclasses.replace(steps[at + 1], op=step.op))
    elif self.spoil == "body":
      return self.body(len(self.inputs))
    kept = int(self.random.randint(size + 1)) if self.spoil == "use" else body.kept
    return _Body(tuple(steps), picks, kept)

  # arguments

  def arguments(self) -> dict:
    n, four = self.n, 4
    self.inputs = [self.array(*self.shape) for _ in range(self.streams)]
    args: dict[str, Any] = {"x": list(self.inputs), "table": self.array(n, *self.shape)}
    args["columns"] = self.array(*self.shape, n)
    args["flag"] = np.bool_(self.chance(0.5))
    count = {"list": n, "alternate": (n + 1) // 2, "const": 0, "none": 0}.get(self.weights, 1)
    stack = (n,) if self.weights in ("stacked", "unstacked") else ()
    scale = 1 if self.kind == "i" else np.asarray(0.6, self.dtype)
    args["w"] = [self.array(*stack, four, four) * scale for _ in range(count)]
    args["b"] = [self.array(*stack, *self.shape) for _ in range(count)]
    self.const_w = [self.array(four, four) * scale for _ in range(n)]
    self.const_b = [self.array(*self.shape) for _ in range(n)]
    if self.chance(0.3):  # equal constants, not the same object
      self.const_b = [self.const_b[0].copy() for _ in range(n)]
    if self.keys != "none":
      seed = int(self.random.randint(1000))
      raw = self.chance(0.3)
      key = jax.random.PRNGKey(seed) if raw else jax.random.key(seed)
      args["key"] = jax.random.split(key, n) if self.keys == "array" else key
    if self.chance(0.1):  # signed zeros and NaNs
      for x in self.inputs:
        x[...] = np.where(self.random.rand(*x.shape) < 0.5, x, -x * 0)
    return args

  def layer(self, args: dict, i: int, state: dict) -> _Layer:
    """What layer `i` reads; `state` carries the key from layer to layer."""
    spoiled = i == self.spoiled
    j = (i + 1) % self.n if spoiled and self.spoil == "weight" else i
    weight = bias = None
    if self.weights == "list":
      weight, bias = args["w"][j], args["b"][j]
    elif self.weights == "alternate":
      weight, bias = args["w"][i // 2], args["b"][i // 2]
    elif self.weights == "stacked":
      weight, bias = args["w"][0][j], args["b"][0][j]
    elif self.weights == "unstacked":
      if "unstacked" not in state:
        order = self.way[1] and slice(None, None, -1) or slice(None)
        state["unstacked"] = list(zip(jnp.unstack(args["w"][0])[order], list(args["b"][0])[order]))
      weight, bias = state["unstacked"][j]
    elif self.weights == "shared":
      weight, bias = args["w"][0], args["b"][0]
    elif self.weights == "const":
      weight, bias = self.const_w[j], self.const_b[j]
    literal = {"same": 0.5, "index": float(i), "steps": 0.125 * (i + 1), "any": float(self.const_scalars[i])}
    return _Layer(self.shape, self.dtype, i, weight, bias, args["table"], args["columns"], self.const_b[j],
                  literal[self.literals], key=self.key(args, i, state, spoiled and self.spoil == "key"),
                  flag=args["flag"])

  def key(self, args: dict, i: int, state: dict, reuse: bool):
    if self.keys == "none":
      return None
    if reuse and "last" in state:
      return state["last"]
    if self.keys == "split":
      state["key"], sub = jax.random.split(state.get("key", args["key"]))
    elif self.keys == "array":
      sub = args["key"][i]
    elif self.keys == "presplit":
      if "keys" not in state:
        state["keys"] = jax.random.split(args["key"], self.n)
      sub = state["keys"][i]
    elif self.keys in ("fold", "hash"):
      sub = jax.random.fold_in(args["key"], i if self.keys == "fold" else (i * 2654435761) % 2**31)
    else:
      sub = args["key"]
    state["last"] = sub
    return sub

  # structures

  def program(self) -> GeneratedProgram:
    args = self.arguments()
    self.const_scalars = np.round(self.random.rand(self.n), 3)
    body = self.body(self.streams)
    second = self.body(self.streams, extra=self.structure == "there_and_back")
    bodies = [body] * self.n
    if self.spoil:
      bodies[self.spoiled] = self.near(body)
    emit = getattr(self, self.structure)
    accumulate = self.one_of(("", "", "weak", "array", "scalar"))
    returned = self.one_of(("streams", "streams", "list", "stack", "concatenate", "some", "last", "total"))
    odd = self.one_of(("", "", "", "input", "twice", "constant", "unused"))
    within = "" if self.chance(0.5) else self.one_of(tuple(_WITHIN))
    weak_start = self.shape == () and self.dtype == jnp.float32 and self.chance(0.5)

    def plain(args):
      streams = [0.0, *args["x"][1:]] if weak_start else list(args["x"])
      streams, kept = emit(args, streams, bodies, second)
      results = list(streams) if returned in ("streams", "list", "some") else [streams[0]]
      if returned in ("list", "some"):
        results += kept if returned == "list" else kept[1::2]
      elif returned == "stack":
        results.append(jnp.stack(kept))
      elif returned == "concatenate" and self.shape:
        results.append(jnp.concatenate(kept))
      elif returned == "total":
        total = kept[0]
        for k in kept[1:]:
          total = total + k
        results.append(total)
      if accumulate:
        total = {"weak": 0, "array": args["x"][0], "scalar": jnp.zeros((), self.dtype)}[accumulate]
        for k in kept:
          total = total + (jnp.sum(k, dtype=self.dtype) if accumulate == "scalar" else k)
        results.append(total)
      if odd == "input":
        results += [args["x"][0], args["table"]]
      elif odd == "twice":
        results += [results[0], results[0]]
      elif odd == "constant":
        results += [2.5, np.int32(3)]
      elif odd == "unused":
        _ = results[0] * 2
      return tuple(results)

    fun = lambda args: _WITHIN[within](plain, args)
    what = f"spoiled {self.spoil} of layer {self.spoiled}" if self.spoil else "not spoiled"
    steps = " ".join(f"{s.op}{list(s.reads)}" for s in body.steps)
    description = (
        f"{self.structure} n={self.n} {self.dtype}{list(self.shape)} streams={self.streams} weights={self.weights} "
        f"keys={self.keys} literals={self.literals} returned={returned} accumulate={accumulate or None} "
        f"odd={odd or None} within={within or None}, {what}; body: {steps} -> {list(body.picks)} kept {body.kept}")
    rounds = any(s.op == "cast" for b in (*bodies, second) for s in b.steps)
    ulps = 16 if self.dtype == jnp.bfloat16 else 1 << 17 if rounds else 4096
    return GeneratedProgram(fun, (args,), description, 0 if self.spoil else self.n, ulps)

  def chain(self, args, streams, bodies, second):
    kept, state = [], {}
    for i, body in enumerate(bodies):
      streams, out = body.apply(streams, self.layer(args, i, state))
      kept.append(out)
    return streams, kept

  def there_and_back(self, args, streams, bodies, second):
    """A second chain that reads the first one's outputs in one of three orders, over its layers in either."""
    streams, kept = self.chain(args, streams, bodies, second)
    order = (kept[::-1], kept, kept[:1] * self.n)[self.way[0]]
    indices = range(self.n)[:: (1, 1, -1)[self.way[1]]]
    outs, state = [], {}
    for i, extra in zip(indices, order):
      layer = dataclasses.replace(self.layer(args, i, state), extra=extra)
      streams, out = second.apply(streams, layer)
      outs.append(out)
    return streams, outs

  def interleaved(self, args, streams, bodies, second):
    """Two chains of their own, a step of one and a step of the other in turn."""
    others, kept, state = list(streams), [], {}
    for i, body in enumerate(bodies):
      layer = self.layer(args, i, state)
      streams, out = body.apply(streams, layer)
      others, _ = second.apply(others, layer)
      kept.append(out)
    return [*streams, others[0]], kept

  def nested(self, args, streams, bodies, second):
    """Blocks of three steps with something between them."""
    kept, state = [], {}
    for i, body in enumerate(bodies):
      layer = self.layer(args, i, state)
      for _ in range(3):
        streams, out = body.apply(streams, layer)
      streams, _ = second.apply(streams, layer)
      kept.append(out)
    return streams, kept

  def leaves(self, args, streams, bodies, second):
    """Independent updates, as of an optimizer, leaf after leaf."""
    state: dict = {}
    outs = [body.apply(streams, self.layer(args, i, state)) for i, body in enumerate(bodies)]
    return [new[0] for new, _ in outs], [out for _, out in outs]

  def leaves_by_op(self, args, streams, bodies, second):
    """Independent updates, an operation over all leaves after the other."""
    state: dict = {}
    layers = [self.layer(args, i, state) for i in range(self.n)]
    pools = [list(streams) for _ in bodies]
    for k in range(max(len(body.steps) for body in bodies)):
      for pool, body, layer in zip(pools, bodies, layers):
        if k < len(body.steps):
          step = body.steps[k]
          pool.append(_OPS[step.op].fun(layer, step.c, *[pool[r] for r in step.reads]))
    return [p[b.picks[0]] for p, b in zip(pools, bodies)], [p[b.kept] for p, b in zip(pools, bodies)]
