"""Compares jits on programs of the kinds that people compile, each in fresh processes, in turns.

  PYTHONPATH=. python examples/benchmark.py                                   every program, jax.jit against roll_jit
  PYTHONPATH=. python examples/benchmark.py --only grad,decode-12 --repeat 3  some of them, medians of three
  PYTHONPATH=. python examples/benchmark.py --jit jax --jit '{"strategy": "scan"}' --jit '{"optimize_for": "compile"}'
  PYTHONPATH=. python examples/benchmark.py --jit jax --jit '{}' --jit hand    where a hand-written lax.scan exists

Compile is tracing, lowering and XLA's compilation in CPU seconds, which hardly depend on what else the machine does. Run
is the fastest of many. Memory is arguments + results - aliased + temporary. All in one process per program
and jit, so that nothing is cached. Ratios are what carries over to other machines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxroll

PROGRAMS = {}


def program(name: str, donate=()):
  """Registers a maker of `(fun, args)`, or of `(fun, args, the same written with lax.scan)`."""
  def register(make):
    PROGRAMS[name] = (make, donate)
    return make
  return register


class Random:
  """NumPy arrays of random entries: making them compiles nothing."""

  def __init__(self, seed=0):
    self.random = np.random.RandomState(seed)

  def __call__(self, *shape, scale=None):
    scale = shape[0] ** -0.5 if scale is None else scale
    return (self.random.randn(*shape) * scale).astype(np.float32)

  def tokens(self, *shape, vocab=128):
    return self.random.randint(0, vocab, shape).astype(np.int32)


# --- transformers ---

def gpt_params(layers, width, context, vocab=128):
  random = Random()
  one, zero = np.ones(width, np.float32), np.zeros(width, np.float32)
  blocks = [dict(
      scale1=one.copy(), bias1=zero.copy(), qkv=random(width, 3 * width), out=random(width, width), scale2=one.copy(), bias2=zero.copy(),
      up=random(width, 4 * width), up_bias=np.zeros(4 * width, np.float32), down=random(4 * width, width), down_bias=zero.copy())
      for _ in range(layers)]
  return dict(embed=random(vocab, width), position=random(context, width), blocks=blocks, scale=one)


def norm(x, scale, bias=0.):
  mean = x.mean(-1, keepdims=True)
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def dropout(key, x, rate):
  return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.) if rate else x


def block(p, x, key, rate, heads=4):
  batch, length, width = x.shape
  key1, key2 = jax.random.split(key) if rate else (None, None)
  q, k, v = (a.reshape(batch, length, heads, width // heads)
             for a in jnp.split(norm(x, p["scale1"], p["bias1"]) @ p["qkv"], 3, -1))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // heads).astype(np.float32)
  scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
  mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(batch, length, width)
  x = x + dropout(key1, mixed @ p["out"], rate)
  hidden = jax.nn.gelu(norm(x, p["scale2"], p["bias2"]) @ p["up"] + p["up_bias"])
  return x + dropout(key2, hidden @ p["down"] + p["down_bias"], rate)


def gpt_loss(rate, scanned=False):
  """The loss; `scanned` stacks the blocks' parameters inside and runs a hand-written `lax.scan`."""
  def loss(params, tokens, key):
    x = params["embed"][tokens[:, :-1]] + params["position"]
    blocks = params["blocks"]
    keys = jax.random.split(key, len(blocks))
    if scanned:
      stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
      x, _ = lax.scan(lambda x, p: (block(p[0], x, p[1], rate), None), x, (stacked, keys))
    else:
      for i, p in enumerate(blocks):
        x = block(p, x, keys[i] if rate else None, rate)
    logits = jax.nn.log_softmax((x * params["scale"]) @ params["embed"].T)
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()
  return loss


def gpt(layers, width, batch, length, rate, wrap=lambda f: f):
  args = gpt_params(layers, width, length), Random(1).tokens(batch, length + 1), jax.random.PRNGKey(0)
  return wrap(gpt_loss(rate)), args, wrap(gpt_loss(rate, scanned=True))


program("grad")(lambda: gpt(24, 64, 2, 32, 0., jax.grad))
program("grad-dropout")(lambda: gpt(24, 64, 2, 32, 0.1, jax.grad))
program("grad-dropout-12")(lambda: gpt(12, 64, 2, 32, 0.1, jax.grad))
program("grad-dropout-96")(lambda: gpt(96, 64, 2, 32, 0.1, jax.grad))
program("forward")(lambda: gpt(24, 256, 2, 64, 0.))
program("forward-small")(lambda: gpt(24, 64, 2, 32, 0.))
program("forward-dropout")(lambda: gpt(24, 64, 2, 32, 0.1))


def adamw_step(loss):
  def step(params, mean, square, count, tokens, key):
    value, grads = jax.value_and_grad(loss)(params, tokens, key)
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, grads)
    correct1, correct2 = 1 - 0.9 ** count, 1 - 0.999 ** count
    params = jax.tree.map(
        lambda p, m, s: p - 1e-3 * (m / correct1 / (jnp.sqrt(s / correct2) + 1e-8) + 0.01 * p), params, mean, square)
    return params, mean, square, count, value
  return step


def train(layers, width, batch, length, rate):
  loss, (params, tokens, key), scanned = gpt(layers, width, batch, length, rate)
  zeros = lambda: jax.tree.map(np.zeros_like, params)
  return adamw_step(loss), (params, zeros(), zeros(), np.float32(0), tokens, key), adamw_step(scanned)


program("train", donate=(0, 1, 2))(lambda: train(24, 64, 2, 32, 0.))
program("train-dropout", donate=(0, 1, 2))(lambda: train(24, 64, 2, 32, 0.1))
program("train-wide", donate=(0, 1, 2))(lambda: train(12, 512, 4, 128, 0.))


def decode(layers, width=768, length=128, heads=12):
  """One token of a transformer with a cache of keys and values."""
  params = gpt_params(layers, width, length)
  cache = [dict(k=np.zeros((1, length, heads, width // heads), np.float32),
                v=np.zeros((1, length, heads, width // heads), np.float32)) for _ in range(layers)]

  def step(cache, params, token, at):
    x = params["embed"][token][:, None] + params["position"][at]
    new = []
    for p, c in zip(params["blocks"], cache):
      q, k, v = (a.reshape(1, 1, heads, -1) for a in jnp.split(norm(x, p["scale1"], p["bias1"]) @ p["qkv"], 3, -1))
      c = dict(k=lax.dynamic_update_slice(c["k"], k, (0, at, 0, 0)), v=lax.dynamic_update_slice(c["v"], v, (0, at, 0, 0)))
      new.append(c)
      scores = jnp.einsum("bqhd,bkhd->bhqk", q, c["k"]) / np.sqrt(width // heads).astype(np.float32)
      scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
      x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), c["v"]).reshape(1, 1, width) @ p["out"]
      x = x + jax.nn.gelu(norm(x, p["scale2"], p["bias2"]) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]
    return new, (x[:, 0] * params["scale"]) @ params["embed"].T

  return step, (cache, params, np.zeros(1, np.int32), np.int32(5))


program("decode-12", donate=(0,))(lambda: decode(12))
program("decode-24", donate=(0,))(lambda: decode(24))


# --- others ---

@program("convnet")
def convnet(blocks=16, channels=16, batch=4, size=32):
  random = Random()
  params = [dict(a=random(3, 3, channels, channels, scale=0.1), b=random(3, 3, channels, channels, scale=0.1),
                 scale=np.ones(channels, np.float32)) for _ in range(blocks)]

  def conv(x, k):
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

  def loss(params, x):
    for p in params:
      x = x + conv(jax.nn.relu(conv(x * p["scale"], p["a"])), p["b"])
    return (x ** 2).mean()

  return jax.grad(loss), (params, random(batch, size, size, channels, scale=1.))


@program("heat")
def heat(steps=30, size=64):
  """The heat equation on a torus by finite differences, one step after the other."""
  def run(x):
    for _ in range(steps):
      x = x + 0.1 * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) + jnp.roll(x, 1, 1) + jnp.roll(x, -1, 1) - 4 * x)
    return x

  return run, (Random()(size, size),)


@program("control")
def control(steps=60, size=64):
  """The gradient of a simulation's last state by what drove it at each step."""
  def loss(drive, x):
    for t in range(steps):
      x = x + 0.05 * (jnp.sin(x) * drive[t] - x)
    return (x * x).mean()

  make = Random()
  return jax.grad(loss), (make(steps), make(size))


@program("lstm")
def lstm(steps=64, layers=2, width=64, batch=8):
  random = Random()
  params = [dict(x=random(width, 4 * width), h=random(width, 4 * width), b=np.zeros(4 * width, np.float32)) for _ in range(layers)]

  def cell(p, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c

  def loss(params, x):
    zero = jnp.zeros((batch, width))
    carries, total = [(zero, zero) for _ in params], 0.
    for t in range(steps):
      h = x[:, t]
      for k, p in enumerate(params):
        carries[k] = cell(p, carries[k], h)
        h = carries[k][0]
      total = total + (h ** 2).mean()
    return total

  def scanned(params, x):
    def step(carries, x):
      h, new = x, []
      for p, carry in zip(params, carries):
        new.append(cell(p, carry, h))
        h = new[-1][0]
      return new, (h ** 2).mean()
    zero = jnp.zeros((batch, width))
    return lax.scan(step, [(zero, zero) for _ in params], x.swapaxes(0, 1))[1].sum()

  return jax.grad(loss), (params, random(batch, steps, width, scale=1.)), jax.grad(scanned)


@program("recurrence")
def recurrence():
  return lstm(steps=24, layers=1, width=16, batch=4)


@program("nothing")
def nothing(equations=20_000):
  random = np.random.RandomState(0)
  ops = [jnp.sin, jnp.cos, jnp.tanh, lambda x: x @ x.T, lambda x: x.sum(0) + x, lambda x: x * 0.9]
  choice = random.randint(0, len(ops), equations)

  def fun(x):
    for k in choice:
      x = ops[k](x)
    return x

  return fun, (np.eye(4, dtype=np.float32) * 0.1,)


@program("dropouts")
def dropouts(count=200, shapes=20):
  """Dropouts of many shapes that form no chain."""
  random = Random()
  arrays = [random(8 + k, 64 * (1 + k % 4)) for k in range(shapes)]

  def fun(arrays, key):
    keys = jax.random.split(key, count)
    return sum(jnp.tanh(dropout(keys[i], arrays[i % shapes] * i, 0.3)).sum() for i in range(count))

  return fun, (arrays, jax.random.PRNGKey(0))


@program("flax")
def flax_transformer(layers=12, width=64, batch=2, length=32, vocab=128):
  import flax.linen as nn

  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
      x = x + nn.SelfAttention(4)(nn.LayerNorm()(x), mask)
      return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))

  class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
      x = nn.Embed(vocab, width)(tokens)
      for _ in range(layers):
        x = Block()(x)
      return nn.Dense(vocab)(nn.LayerNorm()(x))

  tokens = Random(1).tokens(batch, length + 1)
  model = Model()
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :-1])
  random = Random()
  params = jax.tree.map(lambda s: random(*s.shape, scale=0.1), shapes)

  def loss(params, tokens):
    logits = jax.nn.log_softmax(model.apply(params, tokens[:, :-1]))
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

  return jax.grad(loss), (params, tokens)


# --- measuring ---

def measure(name: str, jit: str) -> dict:
  """One program under one jit, in this process."""
  make, donate = PROGRAMS[name]
  fun, args, *hand = make()
  args = jax.tree.map(jnp.asarray, args)
  jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))  # start the backend
  if jit in ("jax", "hand"):
    jitted = jax.jit(fun if jit == "jax" else hand[0], donate_argnums=donate)
  else:
    jitted = jaxroll.roll_jit(fun, roll=jaxroll.RollOptions(**json.loads(jit)), donate_argnums=donate)
  clock, wall = [time.process_time()], time.perf_counter()
  traced = jitted.trace(*args)
  clock.append(time.process_time())
  lowered = traced.lower()
  clock.append(time.process_time())
  compiled = lowered.compile()
  clock.append(time.process_time())
  wall = time.perf_counter() - wall
  memory = compiled.memory_analysis()
  times = []
  deadline = time.perf_counter() + 4
  while len(times) < 5 or (len(times) < 200 and time.perf_counter() < deadline):
    fresh = [jax.tree.map(jnp.copy, a) if i in donate else a for i, a in enumerate(args)]
    jax.block_until_ready(fresh)
    start = time.perf_counter()
    jax.block_until_ready(compiled(*fresh))
    times.append(time.perf_counter() - start)
  return dict(
      trace=clock[1] - clock[0], lower=clock[2] - clock[1], compile=clock[3] - clock[2], first=clock[3] - clock[0],
      wall=wall, run=min(times[1:]), temp=memory.temp_size_in_bytes, eqns=len(traced.jaxpr.jaxpr.eqns),
      memory=memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
      + memory.temp_size_in_bytes, jax=jax.__version__)


def main():
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--only", default="", help="programs, by comma: " + ", ".join(PROGRAMS))
  parser.add_argument("--jit", action="append", help="'jax', 'hand' or JSON of RollOptions; the first is the reference")
  parser.add_argument("--repeat", type=int, default=1, help="processes per program and jit; medians are shown")
  parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.one:
    print("ROW " + json.dumps(measure(*options.one)))
    return
  jits = options.jit or ["jax", "{}"]
  print("| program | jit | top eqns | trace s | lower s | XLA s | compile, reference / this | run ms (/ ref.) "
        "| memory MB (/ ref.) | temp MB (/ ref.) |")
  print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
  for name in options.only.split(",") if options.only else PROGRAMS:
    rows = {jit: [] for jit in jits}
    for _ in range(options.repeat):
      for jit in jits:
        child = subprocess.run([sys.executable, __file__, "--one", name, jit], capture_output=True, text=True)
        found = [line[4:] for line in child.stdout.splitlines() if line.startswith("ROW ")]
        if found:
          rows[jit].append(json.loads(found[0]))
        else:
          print(f"| {name} | {jit} | {(child.stderr.strip().splitlines() or ['died'])[-1][:100]} | | | | | | | |", flush=True)
    reference = None
    for jit, found in rows.items():
      if not found:
        continue
      row = {key: statistics.median(r[key] for r in found) for key in found[0] if key != "jax"}
      reference = reference or row
      per = lambda key: row[key] / max(reference[key], 1e-9)
      print(f"| {name} | {jit} | {row['eqns']:.0f} | {row['trace']:.2f} | {row['lower']:.2f} | {row['compile']:.2f} "
            f"| {1 / per('compile'):.2f} XLA, {1 / per('first'):.2f} all | {row['run'] * 1e3:.2f} ({per('run'):.2f}) "
            f"| {row['memory'] / 1e6:.1f} ({per('memory'):.3f}) | {row['temp'] / 1e6:.2f} ({per('temp'):.2f}) |", flush=True)


if __name__ == "__main__":
  main()
