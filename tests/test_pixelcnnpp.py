"""The example model `pixelcnnpp.py`: that it is what it says, and that all its rows of blocks are rolled."""

import jax
import numpy as np
import pixelcnnpp as model
import pytest

from jaxroll import RollOptions
from jaxroll.pipeline import roll_jaxpr
from jaxroll.testing import check_roll

CONFIG = model.Config(blocks=2, filters=3, mixtures=2)
PIXELS = np.random.RandomState(0).randint(0, 256, (1, 8, 8, 3)).astype(np.uint8)
SCAN = RollOptions(strategy="scan", min_trip_count=2, min_body_eqns=50, strict=True)


def make_params(config=CONFIG):
  shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0), config))
  random = np.random.RandomState(1)
  return jax.tree.map(lambda s: random.randn(*s.shape).astype(np.float32), shapes)


def loss_and_gradient(params, pixels, key):
  return jax.value_and_grad(model.loss_fn)(params, pixels, CONFIG, key)


def check_rows(report, resolutions):
  """Of the blocks of the last row the backward pass meets one first: nothing came after it, so it is odd."""
  rows = [r for r in report.rolls if r.body_eqns >= 50]  # others draw the masks
  forward, backward = rows[: 2 * resolutions], rows[2 * resolutions :]
  assert [r.trip_count for r in forward] == [2] * resolutions + [2] + [3] * (resolutions - 1)
  assert [r.trip_count for r in backward] == [2] + [3] * (resolutions - 2) + [2] + [2] * resolutions
  assert [r.carries for r in forward] == [3] * 2 * resolutions  # the two streams and the key
  assert [r.carries for r in backward] == [2] * 2 * resolutions  # their cotangents
  assert all(r.reverse for r in backward)
  # Nothing is stacked but parameters, and a few residuals of the blocks that are odd or at an end.
  assert [r.feeds.count("stack") for r in forward] == [15] * resolutions + [18] * resolutions
  assert all(r.feeds.count("stack") <= 6 < len(r.feeds) for r in backward)
  # What the up pass left is read as it lies.
  assert all("ys" in feed for r in forward[resolutions:] for feed in r.feeds if feed != "stack")


def test_all_twelve_rows_of_blocks_are_rolled():
  closed = jax.make_jaxpr(loss_and_gradient)(make_params(), PIXELS, jax.random.key(3))
  check_rows(roll_jaxpr(closed, SCAN)[1], 3)


def test_the_rolled_gradient_is_the_same_bits(monkeypatch):
  monkeypatch.setattr(model, "RESOLUTIONS", 2)
  report = check_roll(loss_and_gradient, make_params(), PIXELS[:, :4, :4], jax.random.key(3), options=SCAN,
                      grad=False, vmap=False, compiled=False)
  check_rows(report, 2)


def test_a_pixel_depends_on_those_before_it_alone():
  forward = jax.jit(lambda images: model.forward(make_params(), images, CONFIG))
  images = PIXELS / np.float32(127.5) - 1
  changed = images.copy()
  changed[:, 3, 5] += 0.5
  differs = np.asarray(forward(images) != forward(changed)).any(axis=(0, 3))
  before = np.arange(8)[:, None] * 8 + np.arange(8) <= 3 * 8 + 5
  assert not differs[before].any()
  assert differs[3, 6] and differs[4, 5] and differs[4, 4]


def test_probabilities_sum_to_the_marginal():
  """Over all levels of blue: whatever its mean and scale, red and green are as probable as before."""
  random = np.random.RandomState(2)
  out = random.randn(1, 1, 1, 20).astype(np.float32)
  other = out.copy().reshape(20)
  other[2:].reshape(3, 3, 2)[2, :2] += random.randn(2, 2)  # blue's mean and the logarithm of its scale
  images = np.full((1, 1, 256, 3), [0.2, -0.6, 0], np.float32)
  images[..., 2] = np.arange(256) / 127.5 - 1
  totals = [float(np.exp(model.mixture_log_likelihood(np.broadcast_to(o, (1, 1, 256, 20)), images)).sum())
            for o in (out, other)]
  assert totals[0] == pytest.approx(totals[1], rel=1e-4) and 0 < totals[0] < 1
