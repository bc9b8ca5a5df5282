"""Every reader of foreign bytes: only errors of the project come out, in bounded memory and time."""

import pytest
from fuzz import fuzzed
from readers import READERS


@pytest.mark.parametrize("name", READERS)
def test_foreign_bytes_are_read_or_refused(name, pytestconfig):
    n, seed = pytestconfig.getoption("--fuzz"), pytestconfig.getoption("--seed")
    fuzzed(READERS[name], name, n, seed)
