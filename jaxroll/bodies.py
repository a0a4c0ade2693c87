"""Bodies, written in the forms that XLA:CPU compiles and runs best there."""

from __future__ import annotations

from jaxroll import compat
from jaxroll.concatenations import as_choice
from jaxroll.convolutions import canonical
from jaxroll.nested import map_equations, map_nested
from jaxroll.work import FUSIBLE, holds

_GATHER = frozenset({"gather"})


def for_cpu(jaxpr, *, inlined: bool):
  """A closed jaxpr that does what `jaxpr`, closed or open, does, bit for bit; where nothing is to change, the same object.

  `inlined` says whether XLA inlines the body: then it brings convolutions into form itself.
  """
  memo: dict = {}

  def walk(jaxpr):
    gathered: set = set()  # variables whose elements are looked up wherever they are read

    def rewrite(eqn):
      reads_gathered = any([type(v) is compat.Var and v in gathered for v in eqn.invars])
      if holds(eqn, _GATHER, memo) or reads_gathered and eqn.primitive.name in FUSIBLE:
        gathered.update(eqn.outvars)
      # A choice would look up an element for each place in the result, and not for its part alone.
      new = (None if reads_gathered else as_choice(eqn)) or (None if inlined else canonical(eqn))
      if new is not None:
        return new
      walked = map_nested(eqn, walk)
      return None if walked is eqn else [walked]

    return map_equations(jaxpr, rewrite)

  return walk(jaxpr)
