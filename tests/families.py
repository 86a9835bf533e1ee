"""Every environment family, for tests of what all of them promise; reasoning-gym's are skipped where that is not installed."""

import importlib.util

import pytest

from rl.environments import EnvironmentName

_NEEDS_REASONING_GYM = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None,
                                          reason="pip install -e '.[reasoning-gym]', which wants a C compiler")
_MARKS = {EnvironmentName.REASONING_GYM: _NEEDS_REASONING_GYM}
FAMILIES = [pytest.param(name, marks=_MARKS.get(name, ())) for name in EnvironmentName]
