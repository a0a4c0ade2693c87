"""Room on Python's stack for functions that call deeply and often, as tracing does.

CPython keeps the frames of Python's functions in chunks of 16 KiB. A call that finds the chunk in use full makes it
ask the system for another, which it gives back when that call returns. Where thousands of calls begin at such
an end, each of them pays for this: a framework's model, traced some 30 calls deeper or less deep, takes
notably longer or shorter. A frame that is larger than one chunk gets a larger one of its own, and all that
is called from it lies in the rest of that.
"""

from __future__ import annotations

import sys
import types

# Of 8 bytes. Chunks double until a frame fits, so this takes half of 512 KiB, and leaves the other half to what is called:
# about a thousand frames, Python's limit for recursion. Memory that isn't touched is not used.
_SLOTS = 32_000


def roomy(fun: types.FunctionType) -> types.FunctionType:
  """The same function, now with a frame so large that what it calls finds room in one chunk of the stack.

  >>> @roomy
  ... def double(x):
  ...   return 2 * x
  >>> double(3)
  6
  """
  if sys.implementation.name == "cpython":
    fun.__code__ = fun.__code__.replace(co_stacksize=max(_SLOTS, fun.__code__.co_stacksize))
  return fun
