"""Source and output, read by the libraries that defined the families: equal numbers but for the 16 codes.

Skipped where a library is not installed.
"""

from __future__ import annotations

import pytest
import torch

from tests.families.conftest import Outcomes
from tests.families.judges import JUDGES


@pytest.mark.parametrize("name", JUDGES)
def test_the_familys_own_library_reads_the_same_numbers(name: str, outcomes: Outcomes) -> None:
    library, read = JUDGES[name]
    pytest.importorskip(library)
    outcome = outcomes[name]
    before, after = read(outcome.layout, outcome.layout.folder), read(outcome.layout, outcome.output)
    assert before.keys() == after.keys() == {weight.name for weight in outcome.layout.weights}
    for weight, values in before.items():
        codes = torch.from_numpy(outcome.source_tensors[weight].codes.copy()).reshape(values.shape)
        rounded = ((codes & 0x7F) < 0x10) & (codes % 2 == 1)
        assert torch.equal(values[~rounded], after[weight][~rounded]), weight
        # The value is an odd number of steps of 2^-9 of its scale, at most 15, and halving moves it by one step.
        # Two products rounded to float32 differ from that by at most 30 x 2^-24 of the value.
        steps = (codes & 0x0F)[rounded].float()
        moved = (values - after[weight])[rounded].abs() * steps
        torch.testing.assert_close(moved, values[rounded].abs(), rtol=30 * 2.0**-24, atol=0)
