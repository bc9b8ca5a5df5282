"""Records of a run without times, which no two runs share."""

from typing import Any

from effuse.runs.records import RoundRecord


def timeless(record: RoundRecord) -> dict[str, Any]:
    """A line of rounds.jsonl without seconds, its clients' included."""
    found = {key: value for key, value in record.to_json().items() if key != "seconds"}
    if (clients := found.get("clients")) is not None:
        found["clients"] = {k: {key: v for key, v in c.items() if key != "seconds"} for k, c in clients.items()}
    return found
