"""Text of any origin in sentences."""

import pytest

from effuse.core.errors import shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("plain, Größe 3 µm", "plain, Größe 3 µm"),
        ("two\nlines\tand\rmore", "two lines and more"),
        ("\x1b[2K\x1b[1G", r"\x1b[2K\x1b[1G"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\udc80.png", r"\udc80.png"),  # a file name that is not UTF-8
    ],
)
def test_control_characters_become_escapes(words, line):
    assert shown(words) == line and line.isprintable() and line.encode()


def test_long_text_is_cut():
    assert shown("x" * 50, 10) == "xxxxxxx..." and shown("x" * 10, 10) == "x" * 10
