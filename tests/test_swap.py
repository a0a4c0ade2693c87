import os
import pathlib
import re
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

import jaxroll
from jaxroll import RollOptions, collect_reports, enabled
from programs import chain, weights

WS = weights(6, 4, 4)
X = np.ones((3, 4), np.float32)
FORCED = RollOptions(strategy="scan", min_body_eqns=1)
PLAIN = jax.jit


def rolls(jit):
  """How many rolls a jit makes of a function that nobody has traced yet."""
  with collect_reports() as reports:
    jit(lambda ws, x: chain(ws, x))(WS, X)
  return [r.trip_count for report in reports for r in report.rolls]


@pytest.fixture(autouse=True)
def restored():
  yield
  jaxroll.disable()
  assert jax.jit is PLAIN


def test_enable_and_disable():
  assert rolls(jax.jit) == []
  jaxroll.enable(FORCED)
  held = jax.jit
  assert jax.jit is not PLAIN and held.__doc__ == PLAIN.__doc__ and rolls(jax.jit) == [6]
  jaxroll.enable(RollOptions(strategy="off"))
  assert rolls(jax.jit) == []
  jaxroll.disable()
  jaxroll.disable()
  assert jax.jit is PLAIN and rolls(held) == []


def test_contexts_nest():
  with enabled(FORCED):
    outer = jax.jit
    with enabled(RollOptions(strategy="off")):
      assert rolls(jax.jit) == []
    assert jax.jit is outer and rolls(jax.jit) == [6]
    jaxroll.enable()
    with pytest.raises(KeyError), enabled():
      raise KeyError
    assert rolls(jax.jit) == [6]
  assert jax.jit is outer
  jaxroll.disable()
  assert jax.jit is PLAIN


def test_a_context_is_for_its_own_thread():
  seen = []
  with enabled(FORCED):
    thread = threading.Thread(target=lambda: seen.append(rolls(jax.jit)))
    thread.start()
    thread.join()
  assert seen == [[]]
  jaxroll.enable(FORCED)
  thread = threading.Thread(target=lambda: seen.append(rolls(jax.jit)))
  thread.start()
  thread.join()
  assert seen[1] == [6]


def test_jax_itself_gets_the_original():
  """JAX's own modules look `jax.jit` up where it was exchanged."""
  with enabled(FORCED):
    for module in ("jax.experimental.mine", "jax._src.numpy", "jaxlib.mine"):
      made = eval("jit(f)", {"jit": jax.jit, "f": chain, "__name__": module})
      assert not hasattr(made, "__jaxroll__")
    for module in ("jaxopt", "flax.linen", "__main__"):
      assert hasattr(eval("jit(f)", {"jit": jax.jit, "f": chain, "__name__": module}), "__jaxroll__")


def test_another_replacement_on_top_survives():
  with enabled(FORCED):
    below = jax.jit
    jax.jit = above = lambda *args, **kwargs: below(*args, **kwargs)
  try:
    assert jax.jit is above and rolls(jax.jit) == []
  finally:
    jax.jit = PLAIN


SCRIPT = """
import atexit, functools, pickle, sys
import jax, jax.numpy as jnp
from jax import jit

class Mine: pass
pickle.loads(pickle.dumps(Mine()))  # finds __main__

def layers(x, n):
  for _ in range(n):
    x = jnp.tanh(x @ x) * 2 + jnp.sin(x)
  return x

@jit
def bare(x): return layers(x, 30)
@functools.partial(jax.jit, static_argnames="n")
def partial(x, n): return layers(x, n)
@jax.jit(donate_argnums=())
def called(x): return layers(x, 31)
@jax.jit
def small(x): return x

x = jnp.eye(4)
bare(x), partial(x, n=32), called(x), small(x)
print(sys.argv[1:], __name__, __package__, sys.path[0])
if "--fail" in sys.argv: raise KeyError("mine")
if "--exit" in sys.argv: sys.exit(5)
"""


def test_a_program_runs_rolled_without_being_changed(tmp_path):
  package = tmp_path / "package"
  package.mkdir()
  (package / "__init__.py").write_text("")
  (package / "run.py").write_text("from . import __name__ as package\n" + SCRIPT)
  (tmp_path / "script.py").write_text(SCRIPT)
  root = pathlib.Path(jaxroll.__file__).parent.parent
  def run(*arguments):
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-m", "jaxroll", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr

  # Two programs at a time keep the test short.
  results = {}
  threads = [threading.Thread(target=lambda key=key, args=args: results.update({key: run(*args)})) for key, args in {
      "exit": ("--min-trip-count=4", "script.py", "-m", "--exit"), "fail": ("-m", "package.run", "--fail")}.items()]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for key, status, package_name in (("exit", 5, "None"), ("fail", 1, "package")):
    returncode, out, err = results[key]
    assert returncode == status, err
    arguments = ["-m", "--exit"] if key == "exit" else ["--fail"]
    assert out.strip() == f"{arguments} __main__ {package_name} {tmp_path}"
    assert "jaxroll: rolled 3 of 4 traced functions" in err
    for name, trips in (("bare", 30), ("partial", 32), ("called", 31)):
      assert re.search(rf"^{name} at (script|run)\.py:\d+: .* s\n +\w+ +{trips} x ", err, re.M), err
  error = results["fail"][2]
  assert "KeyError: 'mine'" in error and "jaxroll/__main__" not in error and error.count('  File "') == 1


@pytest.mark.parametrize("arguments, message", [
    ([], "name a script"), (["--strategy=unroll", "x.py"], "choose one of"), (["missing.py"], "can't open"),
    (["-m", "missing.module"], "can be run"), (["-m", "jax"], "can be run")])
def test_wrong_command_lines(arguments, message, monkeypatch, capsys):
  from jaxroll import __main__ as command
  monkeypatch.setattr(sys, "argv", ["jaxroll", *arguments])
  with pytest.raises(SystemExit) as stop:
    command.main()
  assert message in f"{stop.value} {capsys.readouterr().err}" and jax.jit is PLAIN
