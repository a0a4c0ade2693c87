"""The options of the pass, validated when made."""

from __future__ import annotations

import dataclasses
import os

STRATEGIES = ("auto", "scan", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RollOptions:
  """What the pass may do. Immutable and hashable.

  Attributes:
    strategy: ``'auto'`` rolls a repeat where the cost model expects it to pay,
      ``'scan'`` rolls every repeat that it can into ``jax.lax.scan``, ``'off'``
      leaves every program as it is.
    min_trip_count: the fewest iterations that make a roll, at least 2.
    min_body_eqns: the fewest equations (nested ones counted) in a roll's body,
      at least 1.
    strict: raise an internal error of the pass instead of warning and compiling
      the program as written. ``None`` asks the environment: ``JAXROLL_STRICT=1``.

  Raises:
    ValueError: a value is not one of the choices; the message names both.

  >>> RollOptions(strategy='scan', min_trip_count=4).min_trip_count
  4
  >>> RollOptions(strategy='unroll')
  Traceback (most recent call last):
    ...
  ValueError: RollOptions.strategy is 'unroll'; choose one of 'auto', 'scan', 'off'
  """

  strategy: str = "auto"
  min_trip_count: int = 3
  min_body_eqns: int = 4
  strict: bool | None = None

  def __post_init__(self):
    if self.strategy not in STRATEGIES:
      choices = ", ".join(map(repr, STRATEGIES))
      raise ValueError(f"RollOptions.strategy is {self.strategy!r}; choose one of {choices}")
    for name, least in (("min_trip_count", 2), ("min_body_eqns", 1)):
      value = getattr(self, name)
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
