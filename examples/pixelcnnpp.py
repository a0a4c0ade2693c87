"""Trains PixelCNN++ on two photographs, and shows what `roll_jit` saves compared with `jax.jit`.

The model is that of Salimans et al. 2017 (arXiv 1701.05517): a density over images that predicts each pixel from those
above it and to its left. An up pass of three resolutions, each a row of gated residual blocks with dropout, is followed
by a down pass that takes up the up pass's results, the last one first. Every block advances two streams, one that has
seen the rows above and one that has also seen the pixels to the left. All of it is plain Python: `for` loops over
resolutions and blocks, lists that are appended to and popped from, a key that is split before each dropout. At the
paper's depth, 5 blocks per resolution, a training step traces to some 17,000 equations. Weights are normalized as
in the paper; that they are initialized without looking at data, and one rate for all steps, is simpler than there.

The photographs come with scikit-learn, so nothing is downloaded. Needs jax, numpy, jaxroll, scikit-learn and pillow
(`pip install '.[examples]'`); from a checkout,

  PYTHONPATH=. python examples/pixelcnnpp.py                 some minutes on two cores
  PYTHONPATH=. python examples/pixelcnnpp.py --counts        only how long the programs are, before and after
  PYTHONPATH=. python examples/pixelcnnpp.py --help          all the options
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


# --- the model ---

@dataclasses.dataclass(frozen=True)
class Config:
  """The sizes of the model. `blocks` is per resolution, `dropout` the share that is dropped."""

  blocks: int = 5
  filters: int = 32
  mixtures: int = 10
  dropout: float = 0.5

  def __post_init__(self):
    if not 0 <= self.dropout < 1:
      raise ValueError(f"dropout is {self.dropout}; choose at least 0 and less than 1")


RESOLUTIONS = 3
DOWN, DOWN_RIGHT = (2, 3), (2, 2)  # the kernels of the two streams: rows, columns


def init_params(key, config: Config) -> dict:
  """Random parameters: nested dictionaries and lists; a weight is a direction, its length and a bias."""
  filters = config.filters

  def weight(kernel, channels_in, channels_out, scale=1.0):
    nonlocal key
    key, sub = jax.random.split(key)
    return {
        "direction": 0.05 * jax.random.normal(sub, (*kernel, channels_in, channels_out)),
        "scale": scale * jnp.ones(channels_out), "bias": jnp.zeros(channels_out)}

  def block(kernel, skips):
    p = {"first": weight(kernel, 2 * filters, filters), "second": weight(kernel, 2 * filters, 2 * filters, 0.1)}
    if skips:
      p["skip"] = weight((1, 1), 2 * skips * filters, filters)
    return p

  def resize():
    return {"above": weight(DOWN, filters, filters), "left": weight(DOWN_RIGHT, filters, filters)}

  def up():
    return {"above": block(DOWN, 0), "left": block(DOWN_RIGHT, 1)}

  def down():
    return {"above": block(DOWN, 1), "left": block(DOWN_RIGHT, 2)}

  return {
      "above": weight((2, 3), 4, filters), "row": weight((1, 3), 4, filters), "column": weight((2, 1), 4, filters),
      "up": [[up() for _ in range(config.blocks)] for _ in range(RESOLUTIONS)],
      "shrink": [resize() for _ in range(RESOLUTIONS - 1)],
      "down": [[down() for _ in range(config.blocks + (level > 0))] for level in range(RESOLUTIONS)],
      "grow": [resize() for _ in range(RESOLUTIONS - 1)],
      "out": weight((1, 1), filters, 10 * config.mixtures)}


def conv(p, x, padding, stride=1, dilation=1):
  """A convolution with a normalized weight; a `dilation` of the input makes it a transposed one."""
  direction = p["direction"]
  kernel = p["scale"] * direction * lax.rsqrt(jnp.sum(direction**2, (0, 1, 2)) + 1e-12)
  x = lax.conv_general_dilated(
      x, kernel, (stride, stride), padding, (dilation, dilation), dimension_numbers=("NHWC", "HWIO", "NHWC"))
  return x + p["bias"]


def shifted_conv(p, x, stride=1):
  """Each result sees its own row and those above. It sees the pixels to its right if the kernel is an odd number wide."""
  rows, columns, *_ = p["direction"].shape
  right = columns // 2 if columns % 2 else 0
  return conv(p, x, [(rows - 1, 0), (columns - 1 - right, right)], stride)


def shifted_upsampling(p, x):
  """Twice the rows and columns; as in `shifted_conv`, nothing is seen below, or to the right with an even width."""
  rows, columns, *_ = p["direction"].shape
  right = columns // 2 if columns % 2 else 0
  return conv(p, x, [(rows - 1, 1), (columns - 1 - right, right + 1)], dilation=2)


def shift_down(x):
  return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))


def shift_right(x):
  return jnp.pad(x[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0)))


def concat_elu(x):
  return jax.nn.elu(jnp.concatenate([x, -x], -1))


def split(key):
  """Two keys from one, or none from none."""
  return (None, None) if key is None else jax.random.split(key)


def dropout(x, rate, key):
  """`x` with some elements zeroed and the others scaled up; `x` itself where there is no key."""
  if key is None or rate == 0:
    return x
  kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), 0)


def gated_block(p, x, skip, rate, key):
  """A residual block; `skip`, if there is one, joins in between the block's two convolutions."""
  h = shifted_conv(p["first"], concat_elu(x))
  if skip is not None:
    h = h + shifted_conv(p["skip"], concat_elu(skip))
  h = dropout(concat_elu(h), rate, key)
  value, gate = jnp.split(shifted_conv(p["second"], h), 2, -1)
  return x + value * jax.nn.sigmoid(gate)


def forward(params, images, config: Config, key=None):
  """What parametrizes the mixture of each pixel, of shape (batch, rows, columns, 10 * mixtures).

  Args:
    params: what `init_params` made.
    images: of shape (batch, rows, columns, 3), from -1 to 1; rows and columns are multiples of 4.
    config: the sizes.
    key: a key for dropout. Without one nothing is dropped.
  """
  x = jnp.concatenate([images, jnp.ones_like(images[..., :1])], -1)  # the ones tell what is padding
  above = shift_down(shifted_conv(params["above"], x))
  left = shift_down(shifted_conv(params["row"], x)) + shift_right(shifted_conv(params["column"], x))
  aboves, lefts = [above], [left]

  for level, blocks in enumerate(params["up"]):
    if level > 0:
      p = params["shrink"][level - 1]
      above, left = shifted_conv(p["above"], above, stride=2), shifted_conv(p["left"], left, stride=2)
      aboves.append(above)
      lefts.append(left)
    for p in blocks:
      key, sub = split(key)
      above = gated_block(p["above"], above, None, config.dropout, sub)
      key, sub = split(key)
      left = gated_block(p["left"], left, above, config.dropout, sub)
      aboves.append(above)
      lefts.append(left)

  above, left = aboves.pop(), lefts.pop()
  for level, blocks in enumerate(params["down"]):
    if level > 0:
      p = params["grow"][level - 1]
      above, left = shifted_upsampling(p["above"], above), shifted_upsampling(p["left"], left)
    for p in blocks:
      key, sub = split(key)
      above = gated_block(p["above"], above, aboves.pop(), config.dropout, sub)
      key, sub = split(key)
      left = gated_block(p["left"], left, jnp.concatenate([above, lefts.pop()], -1), config.dropout, sub)
  return shifted_conv(params["out"], jax.nn.elu(left))


def mixture_log_likelihood(out, images):
  """The log-probability of each pixel under a mixture of discretized logistics, in nats.

  Args:
    out: of shape (batch, rows, columns, 10 * mixtures): per component its logit, and for each color a mean, a logarithm
      of the scale, and one of the three coefficients by which a color's mean depends on the colors before it.
    images: of shape (batch, rows, columns, 3), 256 levels from -1 to 1.

  Returns:
    An array of shape (batch, rows, columns).
  """
  mixtures = out.shape[-1] // 10
  logits, rest = out[..., :mixtures], out[..., mixtures:].reshape(*out.shape[:-1], 3, 3, mixtures)
  means, log_scales, coefficients = rest[..., 0, :], jnp.maximum(rest[..., 1, :], -7), jnp.tanh(rest[..., 2, :])
  x = images[..., None]
  red, green = x[..., 0, :], x[..., 1, :]
  means = jnp.stack([
      means[..., 0, :], means[..., 1, :] + coefficients[..., 0, :] * red,
      means[..., 2, :] + coefficients[..., 1, :] * red + coefficients[..., 2, :] * green], -2)

  centered, per_scale = x - means, jnp.exp(-log_scales)
  high, middle, low = (per_scale * (centered + half) for half in (1 / 255, 0, -1 / 255))
  mass = jax.nn.sigmoid(high) - jax.nn.sigmoid(low)
  log_density = middle - log_scales - 2 * jax.nn.softplus(middle)
  # Where a level's mass is too small to be had as a difference, it is the density times the level's width.
  inside = jnp.where(mass > 1e-5, jnp.log(jnp.maximum(mass, 1e-12)), log_density - np.log(127.5))
  # The darkest level takes all that is below it, the brightest all that is above.
  log_mass = jnp.where(x < -0.999, jax.nn.log_sigmoid(high), jnp.where(x > 0.999, -jax.nn.softplus(low), inside))
  return jax.nn.logsumexp(log_mass.sum(-2) + jax.nn.log_softmax(logits), -1)


def loss_fn(params, pixels, config: Config, key=None):
  """The mean negative log-likelihood of a color of a pixel, in bits.

  Args:
    params: what `init_params` made.
    pixels: uint8 of shape (batch, rows, columns, 3); rows and columns are multiples of 4.
    config: the sizes.
    key: a key for dropout. Without one nothing is dropped.
  """
  images = pixels.astype(jnp.float32) / 127.5 - 1
  return -mixture_log_likelihood(forward(params, images, config, key), images).mean() / (3 * np.log(2))


# --- the training step ---

def adam_init(params) -> dict:
  """The optimizer's state before the first step."""
  return {
      "step": jnp.zeros((), jnp.int32),
      "mean": jax.tree.map(jnp.zeros_like, params),
      "square": jax.tree.map(jnp.zeros_like, params)}


def adam(params, grads, state, rate, beta1=0.95, beta2=0.9995):
  """The parameters and the state after one step of Adam."""
  step = state["step"] + 1
  mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["mean"], grads)
  square = jax.tree.map(lambda s, g: beta2 * s + (1 - beta2) * g**2, state["square"], grads)
  correct1, correct2 = 1 - beta1**step, 1 - beta2**step
  params = jax.tree.map(
      lambda p, m, s: p - rate * (m / correct1) / (jnp.sqrt(s / correct2) + 1e-8), params, mean, square)
  return params, {"step": step, "mean": mean, "square": square}


def make_train_step(config: Config, rate: float = 1e-3):
  """A function to jit: (params, state, pixels, key) -> (params, state, loss). Each step draws its own dropout."""

  def train_step(params, state, pixels, key):
    step_key = jax.random.fold_in(key, state["step"])
    loss, grads = jax.value_and_grad(loss_fn)(params, pixels, config, step_key)
    params, state = adam(params, grads, state, rate)
    return params, state, loss

  return train_step


# --- the photographs ---

def read_photographs() -> list[np.ndarray]:
  """The two photographs of scikit-learn, uint8 arrays of shape (rows, columns, 3)."""
  try:
    from sklearn.datasets import load_sample_image

    return [load_sample_image(name) for name in ("china.jpg", "flower.jpg")]
  except ImportError as error:
    raise SystemExit(
        f"pixelcnnpp.py: cannot read the photographs to train on: {error}.\nThey come with scikit-learn, which reads them "
        "with pillow:\n\n  pip install scikit-learn pillow\n")


def crops(photographs: list[np.ndarray], random: np.random.Generator, number: int, size: int) -> np.ndarray:
  """Square pieces of the photographs, uint8 of shape (number, size, size, 3)."""
  pieces = []
  for _ in range(number):
    photograph = photographs[random.integers(len(photographs))]
    row, column = (random.integers(n - size + 1) for n in photograph.shape[:2])
    pieces.append(photograph[row : row + size, column : column + size])
  return np.stack(pieces)


# --- the command ---

def main(arguments: list[str] | None = None) -> None:
  import _measure  # what only the command needs: the model can be imported from anywhere

  arguments = sys.argv[1:] if arguments is None else arguments
  args = parse(arguments, _measure)
  try:
    config = Config(args.blocks, args.filters, args.mixtures, args.dropout)
  except ValueError as error:
    raise SystemExit(f"pixelcnnpp.py: {error}")
  if args.size % 2 ** (RESOLUTIONS - 1):
    raise SystemExit(f"pixelcnnpp.py: a size of {args.size} can't be halved {RESOLUTIONS - 1} times")
  if args.counts:
    print_counts(_measure, args, config)
    return
  photographs = read_photographs()
  print(f"PixelCNN++ of {config.blocks} blocks per resolution, {config.filters} filters, dropout {config.dropout}, trained "
        f"for {args.steps} steps on {args.batch} crops of {args.size} x {args.size} pixels of two photographs.\nThe loss is "
        "in bits per color of a pixel: 8 for one who knows nothing.\n", flush=True)

  _measure.run(__file__, arguments, args, lambda run: train(run, args, config, photographs))


def train(run, args, config: Config, photographs: list[np.ndarray]):
  """Compiles, trains and evaluates under one jit. Returns `run`, a `_measure.Run`, with the numbers in it."""
  init_key, dropout_key = jax.random.split(jax.random.key(args.seed))
  random = np.random.default_rng(args.seed)
  splits = [np.split(photograph, [photograph.shape[1] * 3 // 4], axis=1) for photograph in photographs]
  training, heldout = zip(*splits)
  batches = [crops(training, random, args.batch, args.size) for _ in range(args.steps)]

  params = jax.jit(init_params, static_argnums=1)(init_key, config)
  state = adam_init(params)
  arrays = jax.tree.leaves(params)
  run.about = f"{sum(array.size for array in arrays):,} parameters in {len(arrays)} arrays"

  train_step = make_train_step(config, args.rate)
  step = run.compile(train_step, params, state, batches[0], dropout_key, donate_argnums=(0, 1))
  for batch in batches:
    params, state, loss = run.step(step, params, state, batch, dropout_key)
    run.tell(loss, args.steps)

  evaluate = run.wrap(lambda params, pixels: loss_fn(params, pixels, config))
  run.heldout = float(evaluate(params, crops(heldout, random, 16, args.size)))
  return run


def print_counts(measure, args, config: Config) -> None:
  """How long the programs are, as written and rolled; compiles nothing."""
  params = jax.eval_shape(lambda: init_params(jax.random.key(0), config))
  state = jax.eval_shape(adam_init, params)
  pixels = jax.ShapeDtypeStruct((args.batch, args.size, args.size, 3), np.uint8)
  key = jax.eval_shape(lambda: jax.random.key(0))

  def loss(params, pixels, key):
    return loss_fn(params, pixels, config, key)

  programs = {
      "loss": (loss, params, pixels, key), "loss and gradient": (jax.value_and_grad(loss), params, pixels, key),
      "training step": (make_train_step(config), params, state, pixels, key)}
  print(f"{'':<34}{'at top level':>14}{'all equations':>15}{'jaxpr lines':>13}{'StableHLO lines':>17}")
  for name, (fun, *inputs) in programs.items():
    for jit, jit_name in measure.JITS.items():
      counts = measure.count_program(measure.Run(jit, args.strategy, args.optimize_for).wrap(fun), *inputs)
      print(f"{name if jit == 'jax' else '':<22}{jit_name:<12}" + "{:>14,}{:>15,}{:>13,}{:>17,}".format(*counts))


def parse(arguments: list[str], measure) -> argparse.Namespace:
  """The command's options; `measure` is `_measure`, which has those that all the examples share."""
  parser = argparse.ArgumentParser(
      description="Trains PixelCNN++ on two photographs under jax.jit and roll_jit, and compares the two.",
      formatter_class=argparse.ArgumentDefaultsHelpFormatter)
  model = parser.add_argument_group("the model")
  model.add_argument("--blocks", type=measure.count, default=5, help="blocks per resolution: repeats of the same code")
  model.add_argument("--filters", type=measure.count, default=32, help="features per pixel; the paper has 160")
  model.add_argument("--mixtures", type=measure.count, default=10, help="logistics in a pixel's mixture")
  model.add_argument("--dropout", type=float, default=0.5, help="the share of activations that training drops")
  training = parser.add_argument_group("the training")
  training.add_argument("--size", type=measure.count, default=32, help="rows and columns of a crop, a multiple of 4")
  training.add_argument("--batch", type=measure.count, default=4, help="crops in a step")
  training.add_argument("--steps", type=measure.count, default=20, help="training steps")
  training.add_argument("--rate", type=float, default=1e-3, help="Adam's learning rate")
  training.add_argument("--seed", type=int, default=0, help="for the parameters, the crops and dropout")
  training.add_argument("--counts", action="store_true",
                        help="train nothing: print how long the programs are, as written and rolled")
  measure.add_options(parser)
  return parser.parse_args(arguments)


if __name__ == "__main__":
  main()
