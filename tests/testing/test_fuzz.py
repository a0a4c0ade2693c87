"""Some hundreds of random programs, rolled and compared bit for bit."""

import pytest

from jaxroll.testing.__main__ import check_program, fuzz, main
from jaxroll.testing.generate import random_program


@pytest.mark.parametrize("chunk", range(6))
def test_random_programs(chunk):
  outcomes = fuzz(range(30 * chunk, 30 * chunk + 30), grad_every=2, compiled_every=0)
  wrong = [f"seed {o.seed}: {o.description}\n{o.error}" for o in outcomes if o.error]
  assert not wrong, "\n".join(wrong)
  repeats = [o for o in outcomes if o.planted >= 4]
  rolled = [o for o in repeats if o.rolls]
  assert len(rolled) >= len(repeats) // 2 > 0, [o.description for o in repeats if not o.rolls]


@pytest.mark.parametrize("seed", [7, 11])
def test_random_program_compiled(seed):
  assert check_program(seed, compiled=True).error == ""


def test_programs_are_deterministic_and_differ():
  assert random_program(5).description == random_program(5).description
  assert len({random_program(seed).description for seed in range(50)}) == 50


def test_command(capsys):
  assert main(["--programs", "6", "--seed", "100", "--start", "2", "--grad", "0", "--compiled", "0"]) == 0
  assert "done: 4 programs" in capsys.readouterr().out
