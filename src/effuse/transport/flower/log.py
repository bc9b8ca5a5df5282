"""A site's log, which only its owner may read: its sentences may name patients and paths."""

import logging
import logging.handlers
import os
import time
from pathlib import Path
from typing import Any

from effuse.core.errors import shown

LOG_BYTES, LOG_FILES = 1 << 20, 3  # of site.log: size at which it is rotated, and how many older ones are kept


class PrivateFile(logging.handlers.RotatingFileHandler):
    """A log that only its owner may read."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600))


class PlainLines(logging.Formatter):
    """Lines without control characters, those of a traceback too."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(shown(line) for line in super().format(record).split("\n"))


def log_in(folder: Path) -> logging.Logger:
    """The site's log; each site has its own logger, so that two sites in one process have separate logs."""
    handler = PrivateFile(folder / "site.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES, delay=True)
    form = PlainLines("%(asctime)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    form.converter = time.gmtime
    handler.setFormatter(form)
    log = logging.Logger("effuse.site")
    log.addHandler(handler)
    return log
