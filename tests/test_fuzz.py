"""A part of `make test-fuzz`: each reader lets only errors of the project out, in bounded memory and time."""

import pytest
from fuzz import fuzzed
from readers import READERS

EACH = 250


@pytest.mark.parametrize("name", READERS)
def test_foreign_bytes_are_read_or_refused(name):
    fuzzed(READERS[name], name, EACH, seed=0)
