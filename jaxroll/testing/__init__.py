"""Tests of the pass, for this project's test-suite and for its users': rolled equals original.

`check_roll` checks a function, `evaluate` and `bits_differ` are the oracle it rests on,
`random_program` makes programs to check, and ``python -m jaxroll.testing`` checks thousands.
"""

from jaxroll.testing.check import RollMismatch, check_roll
from jaxroll.testing.generate import GeneratedProgram, random_program
from jaxroll.testing.oracle import bits_differ, evaluate

__all__ = ["GeneratedProgram", "RollMismatch", "bits_differ", "check_roll", "evaluate", "random_program"]
