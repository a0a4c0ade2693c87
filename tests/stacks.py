"""For models that somebody else's library builds: a step rolls, and is what it was."""

import jax

from jaxroll import RollOptions
from jaxroll.testing import bits_differ, check_roll


def check_stack(fun, *args, layers, rolls=1, options=None, **checks):
  """Asserts that `fun`'s layers roll, and that the rolled function is the same by `check_roll`.

  Args:
    layers: how many equal ones there are. One may stand apart at either end.
    rolls: in how many rolls they are to be found: a gradient goes through them twice.
    options: a `RollOptions`.
    **checks: for `check_roll`.
  """
  report = check_roll(fun, *args, options=options or RollOptions(), **checks)
  stacks = [r for r in report.rolls if layers - 2 <= r.trip_count <= layers]
  assert len(stacks) >= rolls and report.eqns_after < report.eqns_before / 2, str(report)
  return report


def check_same(expected, got):
  """Asserts that two pytrees have the same structure, and arrays of the same bits."""
  assert jax.tree.structure(expected) == jax.tree.structure(got)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got)):
    assert not bits_differ(a, b), f"{jax.tree_util.keystr(path)} {bits_differ(a, b)}"
