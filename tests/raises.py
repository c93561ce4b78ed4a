"""An expectation of an error by its code, which stays when the words of its message change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deepinfer_prep.errors import PrepError


@contextmanager
def raises_code(code: str) -> Iterator[pytest.ExceptionInfo[PrepError]]:
    """Like `pytest.raises`, for an error of this package with this code."""
    with pytest.raises(PrepError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
