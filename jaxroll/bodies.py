"""Bodies, written in the forms that XLA:CPU compiles and runs best there."""

from __future__ import annotations

from jaxroll.concatenations import as_choice
from jaxroll.convolutions import canonical
from jaxroll.nested import map_equations, map_nested


def for_cpu(jaxpr, *, inlined: bool):
  """A closed jaxpr that does what `jaxpr`, closed or open, does, bit for bit; where nothing is to change, the same object.

  `inlined` says whether XLA inlines the body: then it brings convolutions into form itself.
  """
  def rewrite(eqn):
    new = as_choice(eqn) or (None if inlined else canonical(eqn))
    if new is not None:
      return new
    walked = map_nested(eqn, lambda inner: for_cpu(inner, inlined=inlined))
    return None if walked is eqn else [walked]

  return map_equations(jaxpr, rewrite)
