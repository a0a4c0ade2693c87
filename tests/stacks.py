"""For models that somebody else's library builds: a step rolls, and is what it was."""

import jax

from jaxroll import RollOptions
from jaxroll.testing import check_roll
from jaxroll.testing.check import far_apart


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
  """Asserts that two compiled pytrees are the same: integers and keys bit for bit, numbers but for the last digits.

  XLA may fuse, and so round, what makes a number of random bits differently; another random stream is far off.
  """
  assert jax.tree.structure(expected) == jax.tree.structure(got)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(got)):
    difference = far_apart(a, b, ulps=8)
    assert not difference, f"{jax.tree_util.keystr(path)} {difference}"
