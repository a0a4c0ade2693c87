"""Trains a small GPT on English text, and shows what `roll_jit` saves compared with `jax.jit`.

The model is written the plain way: its layers are a list of dictionaries of arrays, the forward pass is a Python
`for` loop over that list with dropout in every layer, and the AdamW update is a `jax.tree.map` over all the arrays.
Tracing unrolls all of this into some 11,000 equations, most of them the same few hundred again and again, and XLA has
to work through every one. `roll_jit` finds the repeats and spares XLA most of that work. Nothing in the model knows
about it: the two runs differ in the name of the jit, and print the same losses.

The text is the reference documentation that comes with Python itself, so nothing is downloaded. Needs jax, numpy and
jaxroll; from a checkout,

  PYTHONPATH=. python examples/train_gpt.py                            about two minutes on two cores
  PYTHONPATH=. python examples/train_gpt.py --jit roll --steps 1000    only roll_jit, longer
  PYTHONPATH=. python examples/train_gpt.py --help                     all the options
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np


# --- the model ---

@dataclasses.dataclass(frozen=True)
class Config:
  """The sizes of the model. `vocab` is the number of different characters, `dropout` the share that is dropped."""

  vocab: int
  layers: int = 24
  width: int = 64
  heads: int = 4
  context: int = 64
  dropout: float = 0.1

  def __post_init__(self):
    if self.width % self.heads:
      raise ValueError(f"a width of {self.width} does not divide into {self.heads} heads")
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout is {self.dropout}; choose at least 0 and less than 1")


def init_params(key, config: Config) -> dict:
  """Random parameters: a dictionary of arrays, with a list of such dictionaries for the layers."""
  keys = iter(jax.random.split(key, 3 + 4 * config.layers))
  width = config.width
  residual = (2 * config.layers) ** -0.5  # so that the sum of what all the layers add stays of size one

  def normal(rows, columns, scale):
    return scale * jax.random.normal(next(keys), (rows, columns))

  def norm():
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

  def dense(size_in, size_out, scale=1.0):
    return {"weight": normal(size_in, size_out, scale * size_in**-0.5), "bias": jnp.zeros(size_out)}

  def layer():
    return {
        "attention_norm": norm(), "qkv": dense(width, 3 * width), "project": dense(width, width, residual),
        "mlp_norm": norm(), "up": dense(width, 4 * width), "down": dense(4 * width, width, residual)}

  return {
      "characters": normal(config.vocab, width, 1.0),
      "positions": normal(config.context, width, 0.1),
      "layers": [layer() for _ in range(config.layers)],
      "norm": norm(),
      "head": dense(width, config.vocab, 0.1)}


def layer_norm(p, x):
  centered = x - x.mean(-1, keepdims=True)
  return centered * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def dense(p, x):
  return x @ p["weight"] + p["bias"]


def dropout(x, rate, key):
  """`x` with some elements zeroed and the others scaled up; `x` itself where there is no key."""
  if key is None or rate == 0:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), 0)


def attention(p, x, config: Config, key):
  batch, length, width = x.shape
  qkv = dense(p["qkv"], x).reshape(batch, length, config.heads, -1)
  q, k, v = jnp.split(qkv, 3, axis=-1)
  scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) * q.shape[-1] ** -0.5
  past = jnp.tril(jnp.ones((length, length), bool))
  weights = jax.nn.softmax(jnp.where(past, scores, -1e30))
  weights = dropout(weights, config.dropout, key)
  return dense(p["project"], jnp.einsum("bhqk,bkhc->bqhc", weights, v).reshape(batch, length, width))


def mlp(p, x):
  return dense(p["down"], jax.nn.gelu(dense(p["up"], x)))


def loss_fn(params, text, config: Config, key=None):
  """The mean cross-entropy of the next character, in nats.

  Args:
    params: what `init_params` made.
    text: integers of shape (batch, at most context + 1), a character each.
    config: the sizes.
    key: a key for dropout. Without one nothing is dropped.
  """
  x = params["characters"][text[:, :-1]]
  x = x + params["positions"][:x.shape[1]]
  keys = [None] * config.layers if key is None else jax.random.split(key, config.layers)
  for p, layer_key in zip(params["layers"], keys):
    key1, key2, key3 = [None] * 3 if key is None else jax.random.split(layer_key, 3)
    x = x + dropout(attention(p, layer_norm(p["attention_norm"], x), config, key1), config.dropout, key2)
    x = x + dropout(mlp(p, layer_norm(p["mlp_norm"], x)), config.dropout, key3)
  log_probs = jax.nn.log_softmax(dense(params["head"], layer_norm(params["norm"], x)))
  return -jnp.take_along_axis(log_probs, text[:, 1:, None], axis=-1).mean()


# --- the training step ---

def adamw_init(params) -> dict:
  """The optimizer's state before the first step."""
  return {
      "step": jnp.zeros((), jnp.int32),
      "mean": jax.tree.map(jnp.zeros_like, params),
      "square": jax.tree.map(jnp.zeros_like, params)}


def adamw(params, grads, state, rate, warmup=10, beta1=0.9, beta2=0.99, decay=0.1):
  """The parameters and the state after one step of AdamW; vectors (norms and biases) do not decay."""
  step = state["step"] + 1
  rate = rate * jnp.minimum(step / warmup, 1)
  mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["mean"], grads)
  square = jax.tree.map(lambda s, g: beta2 * s + (1 - beta2) * g**2, state["square"], grads)

  def update(p, m, s):
    direction = m / (1 - beta1**step) / (jnp.sqrt(s / (1 - beta2**step)) + 1e-8)
    return p - rate * (direction + decay * p if p.ndim > 1 else direction)

  return jax.tree.map(update, params, mean, square), {"step": step, "mean": mean, "square": square}


def make_train_step(config: Config, rate: float = 2e-3):
  """A function to jit: (params, state, text, key) -> (params, state, loss). Each step draws its own dropout."""

  def train_step(params, state, text, key):
    step_key = jax.random.fold_in(key, state["step"])
    loss, grads = jax.value_and_grad(loss_fn)(params, text, config, step_key)
    params, state = adamw(params, grads, state, rate)
    return params, state, loss

  return train_step


# --- the text ---

def read_text() -> tuple[np.ndarray, list[str]]:
  """Python's own documentation as an array of character numbers, and the characters that these number."""
  from pydoc_data.topics import topics

  text = "\n\n".join(topics[name] for name in sorted(topics))
  characters = sorted(set(text))
  number = {character: i for i, character in enumerate(characters)}
  return np.array([number[character] for character in text], np.int32), characters


def excerpts(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
  """Pieces of this length, a row each."""
  return text[starts[:, None] + np.arange(length)]


# --- the command ---

def main(arguments: list[str] | None = None) -> None:
  import _measure  # what only the command needs: the model can be imported from anywhere

  arguments = sys.argv[1:] if arguments is None else arguments
  args = parse(arguments, _measure)
  text, characters = read_text()
  try:
    config = Config(len(characters), args.layers, args.width, args.heads, args.context, args.dropout)
  except ValueError as error:
    raise SystemExit(f"train_gpt.py: {error}")
  frequencies = np.bincount(text) / len(text)
  print(f"A GPT of {config.layers} layers, width {config.width}, dropout {config.dropout}, trained for {args.steps} "
        f"steps on {args.batch} x {config.context} of {len(text):,} characters.")
  print("To guess by each character's frequency alone would be a loss of "
        f"{-frequencies @ np.log(frequencies):.2f}.\n", flush=True)

  _measure.run(__file__, arguments, args, lambda run: train(run, args, config, text))


def train(run, args, config: Config, text: np.ndarray):
  """Compiles, trains and evaluates under one jit. Returns `run`, a `_measure.Run`, with the numbers in it."""
  init_key, dropout_key = jax.random.split(jax.random.key(args.seed))
  choose = np.random.default_rng(args.seed)
  length = config.context + 1
  training, heldout = np.split(text, [len(text) * 9 // 10])
  batches = [excerpts(training, choose.integers(0, len(training) - length, args.batch), length)
             for _ in range(args.steps)]

  params = init_params(init_key, config)
  state = adamw_init(params)
  arrays = jax.tree.leaves(params)
  run.about = f"{sum(array.size for array in arrays):,} parameters in {len(arrays)} arrays"

  train_step = make_train_step(config, args.rate)
  step = run.compile(train_step, params, state, batches[0], dropout_key, donate_argnums=(0, 1))
  for batch in batches:
    params, state, loss = run.step(step, params, state, batch, dropout_key)
    run.tell(loss, args.steps)

  evaluate = run.wrap(lambda params, pieces: loss_fn(params, pieces, config))
  starts = np.linspace(0, len(heldout) - length, 64).astype(int)
  run.heldout = float(evaluate(params, excerpts(heldout, starts, length)))
  return run


def parse(arguments: list[str], measure) -> argparse.Namespace:
  """The command's options; `measure` is `_measure`, which has those that all the examples share."""
  parser = argparse.ArgumentParser(
      description="Trains a small GPT on Python's documentation under jax.jit and roll_jit, and compares the two.",
      formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  model = parser.add_argument_group("the model")
  model.add_argument("--layers", type=measure.count, default=24, help="transformer layers: repeats of the same code")
  model.add_argument("--width", type=measure.count, default=64, help="features per character")
  model.add_argument("--heads", type=measure.count, default=4, help="attention heads; their number divides the width")
  model.add_argument("--context", type=measure.count, default=64, help="characters in a piece of text")
  model.add_argument("--dropout", type=float, default=0.1, help="the share of activations that training drops")
  training = parser.add_argument_group("the training")
  training.add_argument("--batch", type=measure.count, default=4, help="pieces of text in a step")
  training.add_argument("--steps", type=measure.count, default=80, help="training steps")
  training.add_argument("--rate", type=float, default=2e-3, help="AdamW's learning rate, after 10 steps of warm-up")
  training.add_argument("--seed", type=int, default=0, help="for the parameters, the pieces of text and dropout")
  measure.add_options(parser)
  return parser.parse_args(arguments)


if __name__ == "__main__":
  main()
