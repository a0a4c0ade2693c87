"""jaxroll: repeated code in JAX programs, rolled into loops before XLA compiles it."""

import os as _os

from jaxroll import compat as _compat
from jaxroll.api import collect_reports, explain, roll, roll_jit
from jaxroll.exempt import no_roll
from jaxroll.options import RollOptions
from jaxroll.pipeline import RollError, roll_jaxpr
from jaxroll.report import Refusal, RollRecord, RollReport
from jaxroll.swap import disable, enable, enabled

__all__ = [
    "Refusal", "RollError", "RollOptions", "RollRecord", "RollReport", "collect_reports", "disable", "enable",
    "enabled", "explain", "no_roll", "roll", "roll_jaxpr", "roll_jit"]
from jaxroll._version import __version__

_compat.hide_frames(_os.path.dirname(__file__))
