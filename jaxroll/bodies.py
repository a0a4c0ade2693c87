"""Bodies, written in the forms that XLA:CPU compiles and runs best there."""

from __future__ import annotations

from jaxroll import compat
from jaxroll.concatenations import as_choice
from jaxroll.convolutions import canonical
from jaxroll.nested import map_nested


def for_cpu(jaxpr, *, inlined: bool):
  """A closed jaxpr that does what `jaxpr`, closed or open, does, bit for bit; where nothing is to change, the same object.

  `inlined` says whether XLA inlines the body: then it brings convolutions into form itself.
  """
  closed = compat.as_closed(jaxpr)
  eqns, changed = [], False
  for eqn in closed.jaxpr.eqns:
    new = as_choice(eqn) or (None if inlined else canonical(eqn))
    if new is None:
      walked = map_nested(eqn, lambda inner: for_cpu(inner, inlined=inlined))
      new = None if walked is eqn else [walked]
    eqns += [eqn] if new is None else new
    changed |= new is not None
  return compat.replace_eqns(closed, eqns) if changed else jaxpr
