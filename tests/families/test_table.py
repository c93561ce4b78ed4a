"""The table in docs/families.md says what conversions do, cell by cell."""

from __future__ import annotations

from tests.families.conftest import Outcomes
from tests.families.table import read_table, table


def test_the_documents_table_is_what_conversions_give(outcomes: Outcomes) -> None:
    assert read_table() == table(outcomes), "run tests/families/table.py to write it anew"
