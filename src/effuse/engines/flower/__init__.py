"""Real federations: Flower carries the messages, effuse does everything else; nothing of Flower's API leaves this folder."""

import importlib.util

from effuse.core.errors import RunError


def require() -> None:
    """Refuse to begin where the extra is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise RunError("federations over a network need Flower, which is not installed; run pip install 'effuse[flower]'")
