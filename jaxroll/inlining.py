"""Calls written out, where what they call also stands written out.

A layer may be a jitted function in one place and stand by itself in another, and a
helper that JAX inlines is written out by one version of JAX and is a call for the
next. They are one repeat only if both are written alike.

What a `checkpoint` or a custom derivative wraps is not the same as what stands by
itself, and stays a call: a gradient taken of the rolled program would differ.
"""

from __future__ import annotations

import numpy as np

from jaxroll import compat
from jaxroll.fingerprint import Fingerprinter

_SHORTEST, _LONGEST = 2, 2000  # equations of functions that are looked for
_PLACES = 16  # at which one function is looked for


def write_out(closed, fingerprinter: Fingerprinter):
  """The closed jaxpr with calls written out whose equations also stand there by themselves, or the same object."""
  for _ in range(3):  # what is written out may call others
    eqns = closed.jaxpr.eqns
    called = [e.params["jaxpr"] for e in eqns if e.primitive.name == "jit" and compat.may_inline(e)]
    calls = {id(j): j for j in called if _SHORTEST <= len(j.jaxpr.eqns) <= _LONGEST}
    calls = {k: j for k, j in calls.items() if _is_simple(j)}
    if not calls:
      return closed
    codes: dict = {}
    text = _codes(eqns, codes)
    chosen = {k for k, jaxpr in calls.items() if _stands(jaxpr, eqns, text, codes, fingerprinter)}
    added = sum(len(e.params["jaxpr"].jaxpr.eqns) for e in eqns if e.params and id(e.params.get("jaxpr")) in chosen)
    if not chosen or added > 2 * len(eqns) + 1000:
      return closed
    closed = _written_out(closed, chosen)
  return closed


def _is_simple(closed) -> bool:
  """Whether each result is made within, and no constants are closed over."""
  jaxpr = closed.jaxpr
  made = {v for e in jaxpr.eqns for v in e.outvars}
  return (not closed.consts and len(set(map(id, jaxpr.outvars))) == len(jaxpr.outvars)
          and all(type(v) is not compat.Literal and v in made for v in jaxpr.outvars))


def _codes(eqns, codes: dict) -> bytes:
  """The primitives as fixed-width numbers, for fast search."""
  return np.asarray([codes.setdefault(e.primitive, len(codes)) for e in eqns], np.int32).tobytes()


def _stands(jaxpr, eqns, text: bytes, codes: dict, fingerprinter: Fingerprinter) -> bool:
  """Whether the jaxpr's equations stand among these in a row."""
  inner = jaxpr.jaxpr.eqns
  if any(e.primitive not in codes for e in inner):
    return False
  wanted, fingerprints, at = _codes(inner, codes), None, -1
  for _ in range(_PLACES):
    at = text.find(wanted, at + 1)
    while at >= 0 and at % 4:
      at = text.find(wanted, at + 1)
    if at < 0:
      return False
    fingerprints = fingerprints or _fingerprints(inner, fingerprinter)
    if min(fingerprints) >= 0 and _fingerprints(eqns[at // 4 : at // 4 + len(inner)], fingerprinter) == fingerprints:
      return True
  return False


def _fingerprints(eqns, fingerprinter: Fingerprinter) -> list[int]:
  return [fingerprinter.equation(e)[0] for e in eqns]


def _written_out(closed, chosen: set[int]):
  """The jaxpr with the calls of these jaxprs written out, under variables of their own."""
  own = [(n, v) for n, eqn in enumerate(closed.jaxpr.eqns) if eqn.params and id(eqn.params.get("jaxpr")) in chosen
         for e in eqn.params["jaxpr"].jaxpr.eqns for v in e.outvars if type(v) is not compat.DropVar]
  fresh = dict(zip(own, compat.fresh_vars([v.aval for _, v in own])))
  eqns = []
  for n, eqn in enumerate(closed.jaxpr.eqns):
    if not eqn.params or id(eqn.params.get("jaxpr")) not in chosen:
      eqns.append(eqn)
      continue
    inner = eqn.params["jaxpr"].jaxpr
    names = dict(zip(inner.invars, eqn.invars))
    results = {v: out for v, out in zip(inner.outvars, eqn.outvars) if type(out) is not compat.DropVar}
    for e in inner.eqns:
      read = [a if type(a) is compat.Literal else names[a] for a in e.invars]
      for v in e.outvars:
        if type(v) is not compat.DropVar:
          names[v] = results.get(v, fresh[n, v])
      eqns.append(compat.called_from(eqn, e.replace(invars=read, outvars=[names.get(v, v) for v in e.outvars])))
  return compat.replace_eqns(closed, eqns)
