"""Small programs that several test modules use."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def weights(n, *shape, seed=0):
  """`n` arrays of a shape, with entries of about 1 / sqrt(rows)."""
  random = np.random.RandomState(seed)
  return [jnp.asarray(random.randn(*shape) / np.sqrt(shape[0]), jnp.float32) for _ in range(n)]


def chain(ws, x):
  """A chain of equal layers with a weight each."""
  for w in ws:
    x = jnp.tanh(x @ w) + x * 0.5
  return x


def dropout_chain(ws, x, key):
  """A chain of layers with dropout, its keys split up front."""
  keys = jax.random.split(key, len(ws))
  for i, w in enumerate(ws):
    x = x + jnp.where(jax.random.bernoulli(keys[i], 0.8, x.shape), jnp.tanh(x @ w), 0.)
  return x


def loss(ws, x):
  return (chain(ws, x) ** 2).mean()


def stacked_loss(w, x):
  """The loss of a residual stream whose layers' weights are the rows of two stacked arrays, `w["a"]` and `w["b"]`."""
  for i in range(len(w["a"])):
    h = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    x = x + jnp.tanh(h @ w["a"][i]) @ w["b"][i]
  return (x ** 2).sum()
