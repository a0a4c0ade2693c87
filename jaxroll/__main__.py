"""Runs a Python program with `jax.jit` rolled, without changing it.

    python -m jaxroll [options] script.py [arguments]
    python -m jaxroll [options] -m package.module [arguments]

The options are those of `RollOptions`, such as --optimize-for=compile. At exit it is
said on stderr what was rolled in which function, and what that took.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import importlib.util
import io
import os
import sys
import types

import jax

from jaxroll import api, swap
from jaxroll.options import RollOptions
from jaxroll.report import RollReport

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_FUNCTIONS = 20  # of which the summary tells
_ROLLS = 5  # of each of them


class Summary:
  """What was rolled in this process.

  >>> summary = Summary()
  >>> summary.add(RollReport(eqns_before=3, eqns_after=3, function="f at f.py:1", seconds={"find": 0.1}))
  >>> print(summary)
  jaxroll: rolled 0 of 1 traced functions; the pass took 0.1 s, XLA's compiler 0.0 s
  """

  def __init__(self):
    self.reports: list[RollReport] = []
    self.compile_seconds = 0.

  def add(self, report: RollReport) -> None:
    self.reports.append(report)

  def add_event(self, event: str, seconds: float, **_) -> None:
    if event == _COMPILE_EVENT:
      self.compile_seconds += seconds

  def __str__(self) -> str:
    by_function: dict[str, list[RollReport]] = {}
    for report in self.reports:
      by_function.setdefault(report.function, []).append(report)
    rolled = {name: reports for name, reports in by_function.items() if any(r.rolls for r in reports)}
    seconds = sum(map(_seconds, self.reports))
    lines = [f"jaxroll: rolled {len(rolled)} of {len(by_function)} traced functions; the pass took {seconds:.1f} s, "
             f"XLA's compiler {self.compile_seconds:.1f} s"]
    for name, reports in sorted(rolled.items(), key=lambda item: -max(r.size_before for r in item[1]))[:_FUNCTIONS]:
      largest = max(reports, key=lambda r: r.size_before)
      times = f", traced {len(reports)} times" if len(reports) > 1 else ""
      lines.append(f"{name}: {largest.size_before:,} equations -> {largest.size_after:,}, "
                   f"{sum(map(_seconds, reports)):.2f} s{times}")
      lines += [f"  {r.strategy:<6} {r.trip_count:>4} x {r.body_size:,} equations from {r.location}: {r.reason}"
                for r in largest.rolls[:_ROLLS]]
      if len(largest.rolls) > _ROLLS:
        lines.append(f"  ... and {len(largest.rolls) - _ROLLS} more rolls")
    if len(rolled) > _FUNCTIONS:
      lines.append(f"... and {len(rolled) - _FUNCTIONS} more functions")
    lines += sorted({f"{r.function}: the pass gave up: {r.error}" for r in self.reports if r.error})
    return "\n".join(lines)


def _seconds(report: RollReport) -> float:
  return sum(seconds for stage, seconds in report.seconds.items() if stage != "trace")


def main() -> None:
  """Parses the command line and becomes the program that it names."""
  options, program, is_module = _parse(sys.argv[1:])
  summary = Summary()
  sys.argv[:] = program
  module, code = (_module if is_module else _script)(program[0])
  api.listeners_everywhere.append(summary.add)
  jax.monitoring.register_event_duration_secs_listener(summary.add_event)
  atexit.register(lambda: print(summary, file=sys.stderr))
  sys.modules["__main__"] = module
  swap.enable(options)
  try:
    exec(code, module.__dict__)
  except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next  # without this frame
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def _parse(arguments: list[str]) -> tuple[RollOptions, list[str], bool]:
  """The options, the program with its arguments, and whether it is a module."""
  parser = argparse.ArgumentParser(
      prog="python -m jaxroll", usage="%(prog)s [options] (script.py | -m package.module) [arguments]",
      description="Runs a Python program with jax.jit rolled. The options are those of jaxroll.RollOptions.",
      allow_abbrev=False)
  names = [f.name for f in dataclasses.fields(RollOptions) if f.name != "strict"]
  for name in names:
    is_text = isinstance(getattr(RollOptions, name), str)
    parser.add_argument("--" + name.replace("_", "-"), type=str if is_text else int, default=getattr(RollOptions, name))
  parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
  parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
  given = parser.parse_args(arguments)
  program = given.module or given.program
  if not program:
    parser.error("name a script, or a module with -m")
  try:
    return RollOptions(**{name: getattr(given, name) for name in names}), program, bool(given.module)
  except ValueError as error:
    parser.error(str(error))


def _script(path: str) -> tuple[types.ModuleType, types.CodeType]:
  """The module and code of a script, as ``python path`` makes them."""
  path = os.path.abspath(path)
  try:
    with io.open_code(path) as file:
      code = compile(file.read(), path, "exec", dont_inherit=True)
  except OSError as error:
    sys.exit(f"python -m jaxroll: can't open {path!r}: {error}")
  if not sys.flags.safe_path:
    sys.path[0] = os.path.dirname(os.path.realpath(path))
  module = types.ModuleType("__main__")
  module.__file__ = path
  return module, code


def _module(name: str) -> tuple[types.ModuleType, types.CodeType]:
  """The module and code of a module or package, as ``python -m name`` makes them."""
  try:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
      spec = importlib.util.find_spec(name + ".__main__")
    code = spec.loader.get_code(spec.name)
  except (AttributeError, ModuleNotFoundError) as error:
    sys.exit(f"python -m jaxroll: no module {name!r} that can be run: {error}")
  module = importlib.util.module_from_spec(spec)
  module.__name__ = "__main__"
  sys.argv[0] = spec.origin
  return module, code


if __name__ == "__main__":
  main()
