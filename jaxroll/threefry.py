"""Threefry, JAX's default random-number generator, in a form that XLA:CPU compiles and runs fast.

JAX gives XLA:CPU the generator (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", 2011) as a loop over rounds on two arrays. Written as straight-line code it
fuses into one kernel, bit for bit the same, which runs several times faster. Between
fences that kernel is the same for all draws of one shape, and XLA compiles equal
kernels once; without them it would be fused into, and computed again by, whatever
makes the key and reads the bits.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxroll import compat, exempt
from jaxroll.nested import REWRITABLE, map_equations, map_nested

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def spell_out(closed, mode: str, platform: str | None, *, fenced: bool = True):
  """The closed jaxpr with its draws rewritten, and how many were; the same object if none.

  Args:
    closed: a closed jaxpr.
    mode: a `RollOptions.random_bits`. ``'keep'`` changes nothing. ``'auto'`` writes threefry as
      straight-line code on CPU, where JAX's own form is slow: the bits are the same. ``'rbg'``
      draws from XLA's own generator: the bits are others.
    platform: where the program will run.
    fenced: whether to put fences around each draw, as is best where there are many or where their bits are read
      more than once. The hash of a key's derivation gets one in any case, or each reader would compute its own.
  """
  if mode == "keep" or (mode == "auto" and platform != "cpu"):
    return closed, 0
  speller = _Speller(mode, lambda values: compat.fence(values, platform), fenced)
  return speller.walk(closed), speller.count


class _Speller:
  """One walk over a jaxpr and those within it."""

  def __init__(self, mode: str, fence, fenced: bool):
    self.mode, self.fence, self.fenced, self.count = mode, fence, fenced, 0
    self.memo: dict = {}  # by id of a jaxpr; holds both, so that ids stay theirs
    self.shared: dict = {}  # one jitted function per kind of draw, which lowering emits once

  def walk(self, jaxpr):
    """A closed jaxpr that does the same, or the same object."""
    found = self.memo.get(id(jaxpr))
    if found is None:
      found = self.memo[id(jaxpr)] = (map_equations(jaxpr, self._equation), jaxpr)
    return found[0]

  def _equation(self, eqn):
    """What stands for an equation, None for itself."""
    if exempt.is_exempt(eqn):
      return None
    name = eqn.primitive.name
    if name in REWRITABLE:
      walked = map_nested(eqn, self.walk)
      return None if walked is eqn else [walked]
    if name == "threefry2x32" and self.mode == "auto" and compat.is_static(eqn):
      self.count += 1
      with compat.context(eqn):
        return compat.splice(eqn, self._function(("threefry2x32",), lambda *args: threefry(*args)))
    raw = compat.threefry_function(eqn) if name in ("random_bits", "random_split", "random_fold_in") else None
    if raw is None or (self.mode == "rbg" and name != "random_bits"):
      return None
    self.count += 1
    with compat.context(eqn):
      key = (name, *eqn.params.items(), *(v.aval for v in eqn.invars), compat.context_key(eqn))
      if self.mode == "rbg":
        fun = self._function(key, functools.partial(_rbg, width=eqn.params["bit_width"], shape=eqn.params["shape"]))
      else:
        fun = self._function(key, raw)
      def apply(operands):
        out, = fun([jax.random.key_data(operands[0]), *operands[1:]])
        return [out if name == "random_bits" else jax.random.wrap_key_data(out, impl=compat.key_impl(operands[0]))]
      return compat.splice(eqn, apply)

  def _function(self, key, raw):
    """The shared function of a list of operands."""
    found = self.shared.get(key)
    if found is None:
      around = self.fence if self.fenced else list  # and not `self`, which holds this function
      after_hash = self.fence if key[0] in ("random_split", "random_fold_in") else list

      def draw(operands):
        outs = raw(*around(operands))
        return around(outs if isinstance(outs, (tuple, list)) else [outs])

      draw.__name__ = key[0]
      found = self.shared[key] = jax.jit(draw if self.mode == "rbg" else _spelled(draw, after_hash))
    return found


def _spelled(draw, after_hash):
  def spelled(operands):
    closed = jax.make_jaxpr(draw)(operands)
    return jax.core.eval_jaxpr(_spell_rounds(closed, after_hash).jaxpr, closed.consts, *operands)

  spelled.__name__ = draw.__name__
  return spelled


def _spell_rounds(closed, after_hash):
  """The closed jaxpr of one draw with straight-line rounds, and what `after_hash` makes of their results."""
  def spell(eqn):
    name = eqn.primitive.name
    if name == "threefry2x32":
      return compat.splice(eqn, lambda operands: after_hash(threefry(*operands)))
    if name == "iota_2x32_shape" and math.prod(eqn.params["shape"]) < 1 << 32:
      return compat.splice(eqn, lambda _: _counts(eqn.params["shape"]))
    return [map_nested(eqn, lambda jaxpr: _spell_rounds(jaxpr, after_hash))] if name == "jit" else None

  return map_equations(closed, spell)


def _counts(shape: tuple[int, ...]) -> list:
  """High and low halves of 0, 1, 2, ... in row-major order, fewer than 2^32."""
  low = jnp.zeros(shape, np.uint32)
  for axis, stride in enumerate(np.cumprod((1, *shape[:0:-1]))[::-1].tolist()):
    low = low + lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(stride)
  return [jnp.zeros(shape, np.uint32), low]


def threefry(key1, key2, x1, x2) -> list:
  """The hash Threefry-2x32 of 20 rounds.

  Args:
    key1, key2: the two halves of the key, uint32.
    x1, x2: the two halves of the counts, uint32; all four broadcast.

  Returns:
    Two uint32 arrays of the broadcast shape.

  >>> zero = np.uint32(0)
  >>> [hex(int(x)) for x in threefry(zero, zero, zero, zero)]
  ['0x6b200159', '0x99ba4efe']
  """
  keys = (key1, key2, key1 ^ key2 ^ np.uint32(0x1BD11BDA))
  shape = jnp.broadcast_shapes(*map(jnp.shape, (key1, key2, x1, x2)))
  # Each constant broadcast once, and no operation of jax.numpy: this is traced for each kind of draw.
  key_of = functools.cache(lambda i: jnp.broadcast_to(keys[i], shape))
  constant = functools.cache(lambda value: lax.full(shape, value, np.uint32))
  x1, x2 = lax.add(jnp.broadcast_to(x1, shape), key_of(0)), lax.add(jnp.broadcast_to(x2, shape), key_of(1))
  for i in range(5):
    for r in _ROTATIONS[i % 2]:
      x1 = lax.add(x1, x2)
      rotated = lax.bitwise_or(lax.shift_left(x2, constant(r)), lax.shift_right_logical(x2, constant(32 - r)))
      x2 = lax.bitwise_xor(x1, rotated)
    x1, x2 = lax.add(x1, key_of((i + 1) % 3)), lax.add(lax.add(x2, key_of((i + 2) % 3)), constant(i + 1))
  return [x1, x2]


def _rbg(data, *, width: int, shape: tuple[int, ...]):
  """Bits from XLA's generator; `data` is uint32[..., 2], raw threefry keys."""
  def draw(key):
    return lax.rng_bit_generator(jnp.tile(key, 2), shape, dtype=np.dtype(f"uint{width}"))[1]

  for _ in range(data.ndim - 1):
    draw = jax.vmap(draw)
  return draw(data)
