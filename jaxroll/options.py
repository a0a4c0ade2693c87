"""The options of the pass, validated when made."""

from __future__ import annotations

import dataclasses
import os

STRATEGIES = ("auto", "scan", "fence", "call", "inline", "off")
AIMS = ("balanced", "compile", "run")
RANDOM_BITS = ("auto", "keep", "rbg")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollOptions:
  """What the pass may do. Immutable and hashable.

  Attributes:
    strategy: ``'auto'`` lets the cost model choose for each repeat. The others
      are for every repeat: ``'scan'``, one ``jax.lax.scan``; ``'fence'``, a call of
      one function per iteration with a barrier between them, so that XLA fuses within
      iterations only; ``'call'``, calls that XLA keeps out of line (on a mesh with
      explicit axes: ``'fence'``); ``'inline'``, calls that XLA inlines, which saves
      lowering alone; ``'off'``, nothing is rolled.
    optimize_for: what ``'auto'`` aims at. ``'balanced'``: compile as fast as can be
      with run time and memory not notably worse; ``'compile'``: compile fastest,
      whatever is copied; ``'run'``: no copy at all.
    max_copy_bytes: the most bytes that one scan may copy per run, None for no bound.
    min_trip_count: the fewest iterations that make a roll, at least 2.
    min_body_eqns: the fewest equations (nested ones counted) in a roll's body,
      at least 1.
    random_bits: how the bits of `jax.random`'s default generator, threefry, are made.
      ``'auto'``: as measures best on the platform, always the bits that `jax.random` gives;
      ``'keep'``: by JAX's own code; ``'rbg'``: by XLA's own generator, which compiles fastest
      but *changes the random stream*. Keys of other generators are left alone.
    strict: raise an internal error of the pass instead of warning and compiling
      the program as written. ``None`` asks the environment: ``JAXROLL_STRICT=1``.

  Raises:
    ValueError: a value is not one of the choices; the message names both.

  >>> RollOptions(strategy='scan', min_trip_count=4).min_trip_count
  4
  >>> RollOptions(strategy='unroll')
  Traceback (most recent call last):
    ...
  ValueError: RollOptions.strategy is 'unroll'; choose one of 'auto', 'scan', 'fence', 'call', 'inline', 'off'
  """

  strategy: str = "auto"
  optimize_for: str = "balanced"
  max_copy_bytes: int | None = None
  min_trip_count: int = 3
  min_body_eqns: int = 4
  random_bits: str = "auto"
  strict: bool | None = None

  def __post_init__(self):
    for name, choices in (("strategy", STRATEGIES), ("optimize_for", AIMS), ("random_bits", RANDOM_BITS)):
      value = getattr(self, name)
      if value not in choices:
        raise ValueError(f"RollOptions.{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")
    for name, least in (("min_trip_count", 2), ("min_body_eqns", 1), ("max_copy_bytes", 0)):
      value = getattr(self, name)
      if name == "max_copy_bytes" and value is None:
        continue
      if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"RollOptions.{name} is {value!r}; choose an integer of at least {least}")
    if self.strict not in (None, True, False):
      raise ValueError(f"RollOptions.strict is {self.strict!r}; choose one of None, True, False")

  @property
  def is_strict(self) -> bool:
    """``strict``, or what the environment says where that is ``None``."""
    return _env("JAXROLL_STRICT") in ("1", "true", "on") if self.strict is None else bool(self.strict)

  @property
  def is_off(self) -> bool:
    """Whether the pass is disabled, here or by ``JAXROLL=off`` in the environment."""
    return self.strategy == "off" or _env("JAXROLL") in ("off", "0", "false")


def _env(name: str) -> str:
  return os.environ.get(name, "").strip().lower()
