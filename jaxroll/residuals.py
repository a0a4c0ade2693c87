"""Residuals made anew: what a loop would read of an earlier one, computed again in its own body.

What a backward pass reads of the forward pass is often a cheap function of other
things that it reads: a comparison, a scaled copy, a mask broadcast, the factor
1 - tanh(x)**2. Where XLA sees a program unrolled it stores none of these, but makes
them again in the fusions that read them. Across the boundary of a loop or of a call
that is kept out of line it can't. So the pass does: the same equations on the same
operands, so the same bits, and so many bytes less to store.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Callable

from jaxroll import compat
from jaxroll.plan import Const, Roll, Xs
from jaxroll.program import Program

# Cheap to compute for every element of the result from one element of each operand.
_CHEAP = frozenset("""
  abs add add_any and bitcast_convert_type broadcast_in_dim clamp convert_element_type copy copy_p div eq expand_dims
  floor ge gt integer_pow iota is_finite le lt max min mul ne neg not one_minus_square or reshape rsqrt select_n
  shift_left shift_right_arithmetic shift_right_logical sign sqrt square squeeze stop_gradient sub xor
""".split())
_DEEPEST = 4  # equations, one on the other, between what is stored and what is made of it
Values = tuple[int, ...]  # one per iteration


@dataclasses.dataclass(frozen=True)
class Remade:
  """A value that a loop's body computes itself, by the equation that made it before.

  Attributes:
    value: the value that the first iteration reads.
    operands: per operand of the equation n, the n-th of the values remade in this body, or -1-k for `inputs[k]` of
      the roll; None for a literal, and for what is not needed.
    input: which of the roll's inputs it stands for, None for a value in between.
  """

  value: int
  operands: tuple[int | None, ...]
  input: int | None


@dataclasses.dataclass(frozen=True)
class Remaking:
  """What of a loop's inputs is remade.

  Attributes:
    roll: the roll, with more inputs where what is remade needs them.
    inputs: indices of those inputs that the body still reads.
    remade: in order.
    saved: bytes that need not be stored, of all iterations.
  """

  roll: Roll
  inputs: tuple[int, ...]
  remade: tuple[Remade, ...] = ()
  saved: int = 0


def remake(program: Program, roll: Roll, inputs: tuple[int, ...], is_scan: bool, is_kept: Callable) -> Remaking:
  """Decides which xs of a loop's body are better made anew.

  Args:
    program: the program.
    roll: the roll.
    inputs: indices of its inputs that the body reads.
    is_scan: whether xs are stacked; a call takes the program's arguments as they are.
    is_kept: of a value, whether something later reads it, so that it has to be stored anyway.
  """
  cut = _Cut(program, roll, inputs, is_scan)
  xs = [i for i in inputs if isinstance(roll.inputs[i], Xs) and min(roll.inputs[i].values) >= 0]
  # What is made last goes first: what it is made of may itself be made of what is made before.
  xs.sort(key=lambda i: -roll.inputs[i].values[0])
  ties = [i for i in xs if cut.replace(i, is_kept) == 0]
  reach = {i: cut.reach(i) for i in xs} if ties else {}
  for i in ties:  # What is no smaller may serve to make others, too.
    served = [other for other in xs if other != i and not reach[i].isdisjoint(reach[other])]
    if not served:
      continue
    trial = cut.copy()
    trial.replace(i, is_kept, least=0)
    for other in served:
      trial.replace(other, is_kept)
    cut = trial if trial.saved > cut.saved else cut
  return cut.result()


class _Node:
  """One value per iteration: to be made of others (`parts`), or to be stored, which costs `bytes`."""

  def __init__(self, key: int, values: Values, size: int, parts: list[_Node | None] | None = None):
    self.key, self.values, self.bytes, self.parts = key, values, size, parts


class _Cut:
  """What one loop's body reads and what it makes of that, while inputs are replaced one after the other.

  Values, one per iteration, have a `key`: a number, the same for those that have the same canonical values.
  """

  def __init__(self, program: Program, roll: Roll, inputs, is_scan: bool):
    self.program, self.roll, self.is_scan = program, roll, is_scan
    self.inputs = list(inputs)
    self.sources = list(roll.inputs)
    self.saved = 0
    self.keys: dict[Values, int] = {}
    self.constants: dict[int, int] = {}  # by key, the value where it is one in all iterations
    self.at: dict[int, int] = {}  # by key, the input that holds them
    self.made: dict[int, _Node] = {}
    self.replaced: dict[int, int] = {}
    self.memo: dict[int, list[Values | None] | None] = {}
    for i in inputs:
      if isinstance(roll.inputs[i], Xs):
        self.at[self._key(roll.inputs[i].values)] = i

  def _key(self, values: Values) -> int:
    canonical = self.program.lists.canonical
    named = tuple([canonical[v] if v >= 0 else v for v in values])
    key = self.keys.setdefault(named, len(self.keys))
    if key == len(self.keys) - 1 and _is_constant(named):
      self.constants[key] = named[0]
    return key

  def copy(self) -> _Cut:
    other = copy.copy(self)
    for name in ("inputs", "sources", "at", "made", "replaced"):
      setattr(other, name, copy.copy(getattr(self, name)))
    return other

  def reach(self, i: int) -> frozenset[int]:
    """The values, by key, of which input `i` might be made."""
    reached: set[int] = set()
    level = [self.roll.inputs[i].values]
    for _ in range(_DEEPEST + 1):
      operands = [o for values in level if min(values) >= 0 for o in self._makers(self._key(values), values) or ()]
      level = [o for o in operands if o is not None and self._key(o) not in self.constants]
      reached.update(map(self._key, level))
    return frozenset(reached)

  def replace(self, i: int, is_kept: Callable, least: int = 1) -> int:
    """Makes input `i` anew if that stores at least so many bytes fewer; how many it does or would; -1 if it can't."""
    values = self.roll.inputs[i].values
    key = self._key(values)
    if self.at.get(key) != i:
      return -1
    size = self.program.nbytes(values[0])
    node = self._remade(key, values, _DEEPEST)
    if node is None or size - node.bytes < least or any(map(is_kept, values)):
      return -1 if node is None else size - node.bytes
    self._take(node)
    del self.at[key]
    self.replaced[key] = i
    self.inputs.remove(i)
    self.saved += (size - node.bytes) * self.roll.trips
    return size - node.bytes

  def _node(self, values: Values, depth: int) -> _Node | None:
    """The cheapest way to have these values in the body; None for a literal, or if there is no way."""
    key = self._key(values)
    if key in self.made or key in self.at or key in self.constants:
      return _Node(key, values, 0)
    size = 0 if not self.is_scan and max(values) < 0 else self.program.nbytes(values[0])
    remade = self._remade(key, values, depth) if depth and size and min(values) >= 0 else None
    return remade if remade and remade.bytes < size else _Node(key, values, size)

  def _remade(self, key: int, values: Values, depth: int) -> _Node | None:
    """These values made by the equations that made them before, of the cheapest operands."""
    operands = self._makers(key, values)
    if operands is None:
      return None
    parts = [None if o is None else self._node(o, depth - 1) for o in operands]
    return _Node(key, values, sum([p.bytes for p in parts if p]), parts)

  def _makers(self, key: int, values: Values) -> list[Values | None] | None:
    if key not in self.memo:
      self.memo[key] = self._operands(values)
    return self.memo[key]

  def _operands(self, values: Values) -> list[Values | None] | None:
    """Per operand of the equations that make these values, the values that it has, None if it is not to be read."""
    lists = self.program.lists
    first = lists.makers[values[0]]
    eqn, which = self.program.eqns[first], values[0] - lists.out_start[first]
    steps = cheap_steps(eqn, which)
    fingerprint = lists.fingerprints[first]
    if steps is None or fingerprint < 0 or max(values) >= self.roll.first_result:
      return None
    makers = [lists.makers[v] for v in values]
    if any([lists.fingerprints[m] != fingerprint or v - lists.out_start[m] != which for m, v in zip(makers, values)]):
      return None
    count = lists.slot_start[first + 1] - lists.slot_start[first]
    slots = list(zip(*[lists.slots[low : low + count] for low in map(lists.slot_start.__getitem__, makers)]))
    if not all(map(_is_constant, slots[len(eqn.invars) :])):  # static operands that differ
      return None
    return [column if read and not (type(atom) is compat.Literal and _is_constant(column)) else None
            for column, atom, read in zip(slots, eqn.invars, _is_read(eqn, steps))]

  def _take(self, node: _Node) -> None:
    """Enters a node among what the body has."""
    if node.key in self.made:
      return
    if node.parts is not None:
      for part in node.parts:
        if part is not None:
          self._take(part)
      self.made[node.key] = node
    elif node.key not in self.at:
      source = Const(self.constants[node.key]) if node.key in self.constants else Xs(node.values)
      if source not in self.sources:
        self.sources.append(source)
      self.at[node.key] = self.sources.index(source)
      if self.at[node.key] not in self.inputs:
        self.inputs.append(self.at[node.key])

  def result(self) -> Remaking:
    nodes = sorted(self.made.values(), key=lambda n: self.program.canonical[n.values[0]])
    place = {n.key: at for at, n in enumerate(nodes)}
    remade = tuple(
        Remade(n.values[0],
               tuple(None if p is None else place[p.key] if p.key in place else -1 - self.at[p.key] for p in n.parts),
               self.replaced.get(n.key))
        for n in nodes)
    roll = dataclasses.replace(self.roll, inputs=tuple(self.sources)) if remade else self.roll
    return Remaking(roll, tuple(sorted(self.inputs)), remade, self.saved)


def _is_constant(values: Values) -> bool:
  """Whether it is one value in all iterations."""
  return values.count(values[0]) == len(values)


def cheap_steps(eqn, which: int):
  """How to compute result `which` of an equation: cheap equations, those within it if it is a call, else itself.

  Returns:
    The arguments of a call's jaxpr, None for another equation; the equations; the variable of the result.
    None if it is not cheap.
  """
  if eqn.primitive.name != "jit" and len(eqn.outvars) == 1 and _is_cheap(eqn):
    return None, [eqn], eqn.outvars[0]
  if eqn.primitive.name != "jit" or not compat.may_inline(eqn):
    return None
  inner = eqn.params["jaxpr"].jaxpr
  result = inner.outvars[which]
  if type(result) is compat.Literal:
    return None
  needed, steps = {result}, []
  for e in reversed(inner.eqns):
    if len(e.outvars) == 1 and e.outvars[0] in needed:
      if not _is_cheap(e):
        return None
      steps.append(e)
      needed.update(a for a in e.invars if type(a) is not compat.Literal)
  made = {e.outvars[0] for e in steps}
  if result not in made or not needed <= made | set(inner.invars) or len(steps) > _DEEPEST:
    return None
  return inner.invars, steps[::-1], result


def _is_cheap(eqn) -> bool:
  """Whether the equation, or all within it if it is a call such as that of `jax.nn.relu`, is cheap."""
  name = eqn.primitive.name
  if name in ("jit", "custom_jvp_call"):
    inner = eqn.params["jaxpr" if name == "jit" else "call_jaxpr"].jaxpr.eqns
    return (name != "jit" or compat.may_inline(eqn)) and len(inner) <= _DEEPEST and all(map(_is_cheap, inner))
  return name in _CHEAP


def _is_read(eqn, steps) -> list[bool]:
  """Per operand of an equation, whether these steps of it read it."""
  arguments, within, _ = steps
  read = {a for e in within for a in e.invars if type(a) is not compat.Literal}
  return [True] * len(eqn.invars) if arguments is None else [a in read for a in arguments]


def operands(program: Program, value: int) -> dict[int, int]:
  """The operands needed to remake a value, by their position in the equation that makes it; literals left out."""
  e = program.maker(value)
  eqn, slots = program.eqns[e], program.slots[program.slot_start[e] :]
  is_read = _is_read(eqn, cheap_steps(eqn, value - int(program.out_start[e])))
  return {k: int(slots[k]) for k, a in enumerate(eqn.invars) if is_read[k] and type(a) is not compat.Literal}


def alone(program: Program, value: int):
  """An open jaxpr that computes one value of `operands`."""
  e = program.maker(value)
  atoms = program.eqns[e].invars
  read = operands(program, value)
  arguments = dict(zip(read, compat.fresh_vars([atoms[k].aval for k in read])))
  remade = Remade(value, tuple(-1 - k if k in read else None for k in range(len(atoms))), None)
  eqns = equations(program, (remade,), arguments)
  return compat.open_jaxpr(program.jaxpr, arguments.values(), eqns[-1].outvars, eqns)


def equations(program: Program, remade: tuple[Remade, ...], of_input: dict) -> list:
  """The equations that compute what is remade, from the variables of the body's inputs.

  Those of the inputs that are remade are entered into `of_input`.
  """
  eqns, made = [], []
  for r in remade:
    eqn = program.eqns[program.maker(r.value)]
    which = r.value - int(program.out_start[program.maker(r.value)])
    arguments, steps, result = cheap_steps(eqn, which)
    atoms = [a if o is None else made[o] if o >= 0 else of_input[-1 - o] for a, o in zip(eqn.invars, r.operands)]
    names = dict(zip(arguments or (), atoms))
    for e, new in zip(steps, compat.fresh_vars([e.outvars[0].aval for e in steps])):
      read = atoms if arguments is None else [a if type(a) is compat.Literal else names[a] for a in e.invars]
      names[e.outvars[0]] = new
      e = e.replace(invars=read, outvars=[new])
      eqns.append(e if arguments is None else compat.called_from(eqn, e))
    made.append(names[result])
    if r.input is not None:
      of_input[r.input] = made[-1]
  return eqns
