import pytest

from jaxroll import RollOptions


@pytest.mark.parametrize("bad, choices", [
    (dict(strategy="unroll"), "'auto', 'scan', 'fence', 'call', 'inline', 'off'"),
    (dict(optimize_for="speed"), "'balanced', 'compile', 'run'"),
    (dict(min_trip_count=1), "at least 2"),
    (dict(min_trip_count=True), "at least 2"),
    (dict(min_body_eqns=0), "at least 1"),
    (dict(max_copy_bytes=-1), "at least 0"),
    (dict(strict="yes"), "None, True, False"),
])
def test_bad_values_are_named_with_the_choices(bad, choices):
  with pytest.raises(ValueError) as error:
    RollOptions(**bad)
  (name, value), = bad.items()
  assert name in str(error.value) and repr(value) in str(error.value) and choices in str(error.value)


def test_options_are_keyword_only_frozen_and_hashable():
  with pytest.raises(TypeError):
    RollOptions("scan")
  options = RollOptions(strategy="scan")
  with pytest.raises(AttributeError):
    options.strategy = "off"
  assert hash(options) == hash(RollOptions(strategy="scan"))


def test_environment_switches(monkeypatch):
  monkeypatch.delenv("JAXROLL_STRICT", raising=False)
  assert not RollOptions().is_strict and RollOptions(strict=True).is_strict
  monkeypatch.setenv("JAXROLL_STRICT", "1")
  assert RollOptions().is_strict and not RollOptions(strict=False).is_strict
  assert not RollOptions().is_off and RollOptions(strategy="off").is_off
  monkeypatch.setenv("JAXROLL", "off")
  assert RollOptions().is_off
