"""Bodies, written in the forms that XLA:CPU compiles and runs best there."""

from __future__ import annotations

from jaxroll import compat
from jaxroll.concatenations import as_choice
from jaxroll.convolutions import canonical
from jaxroll.fingerprint import holds, nested_jaxprs
from jaxroll.nested import map_equations, map_nested
from jaxroll.work import FUSIBLE, size_of

_GATHER = frozenset({"gather"})
_REDUCING = frozenset({"reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"})
_LAYOUT = frozenset({"reshape", "transpose", "squeeze", "expand_dims"})
_CALLS = frozenset({"jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2"})


def for_cpu(jaxpr, *, inlined: bool):
  """A closed jaxpr that does what `jaxpr`, closed or open, does, bit for bit; where nothing is to change, the same object.

  `inlined` says whether XLA inlines the body: then it brings convolutions into form itself.
  """
  memo: dict = {}

  def walk(jaxpr, fuses):
    apart = _read_apart(jaxpr, fuses)
    gathered: set = set()  # variables whose elements are looked up wherever they are read

    def rewrite(eqn):
      reads_gathered = any([type(v) is compat.Var and v in gathered for v in eqn.invars])
      if holds(eqn, _GATHER, memo) or reads_gathered and eqn.primitive.name in FUSIBLE:
        gathered.update(eqn.outvars)
      # A choice would look up an element for each place in the result, and not for its part alone.
      is_apart = not reads_gathered and not apart.isdisjoint(eqn.outvars)
      new = (as_choice(eqn) if is_apart else None) or (None if inlined else canonical(eqn))
      if new is not None:
        return new
      fused = [v not in apart for v in eqn.outvars] if eqn.primitive.name in _CALLS else None
      walked = map_nested(eqn, lambda inner: walk(inner, fused))
      return None if walked is eqn else [walked]

    return map_equations(jaxpr, rewrite)

  return walk(jaxpr, None)


def _read_apart(jaxpr, fuses: list[bool] | None = None) -> set:
  """The variables that are read, as they are or laid out otherwise, by what XLA fuses nothing into: a product, a loop.

  `fuses` says which results of the jaxpr are read by nothing of that kind; by default all may be.
  """
  inner = getattr(jaxpr, "jaxpr", jaxpr)
  results = zip(inner.outvars, fuses or [False] * len(inner.outvars))
  apart = {v for v, is_fused in results if type(v) is compat.Var and not is_fused}
  for eqn in reversed(inner.eqns):
    name = eqn.primitive.name
    if name in _CALLS:
      called, = nested_jaxprs(eqn.params)
      within = _read_apart(called, [v not in apart for v in eqn.outvars])
      arguments = getattr(called, "jaxpr", called).invars
      apart.update([v for v, own in zip(eqn.invars, arguments) if own in within and type(v) is compat.Var])
    elif name in _LAYOUT and not apart.isdisjoint(eqn.outvars) or not (name in FUSIBLE or name in _REDUCING):
      apart.update([v for v in eqn.invars if type(v) is compat.Var])
  return apart


def fused_elements(jaxpr, arguments: list[int]) -> list[int]:
  """How many elements of arrays a closed jaxpr makes straight from each of these arguments, by what XLA fuses with it."""
  elements = [0] * len(arguments)

  def walk(jaxpr, own: list[int | None]) -> list[int | None]:
    """From which of the arguments the jaxpr's own are, laid out otherwise at most, to which of them its results are."""
    names = dict(zip(jaxpr.invars, own))
    for eqn in jaxpr.eqns:
      name = eqn.primitive.name
      read = [None if type(a) is compat.Literal else names.get(a) for a in eqn.invars]
      if all([k is None for k in read]) or eqn.params.get("name") == "fence":
        continue
      if name in _CALLS:
        called, = nested_jaxprs(eqn.params)
        names.update(zip(eqn.outvars, walk(getattr(called, "jaxpr", called), read)))
      elif name in _LAYOUT or name == "broadcast_in_dim":
        names[eqn.outvars[0]] = read[0]
      elif name in FUSIBLE and name != "optimization_barrier":
        for k in {k for k in read if k is not None}:
          elements[k] += sum([size_of(v.aval) for v in eqn.outvars])
    return [None if type(v) is compat.Literal else names.get(v) for v in jaxpr.outvars]

  place = {argument: k for k, argument in enumerate(arguments)}
  walk(jaxpr.jaxpr, [place.get(n) for n in range(len(jaxpr.jaxpr.invars))])
  return elements
