"""What an export tells of where its images were made."""

import json
from types import SimpleNamespace

from effuse.tools.export import _made


def test_provenance_tells_no_path(tmp_path):
    """Exports are passed on: of the run its name is told, and of the recipe no name of a file."""
    run = tmp_path / "anna" / "run"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text(json.dumps({"recipe": {}, "classes": ["a"]}))
    recipe = {"data": "folder(path='wards', side=4)", "model": "pretrained(folder='berlin')", "rounds": "2"}
    told = _made(run, SimpleNamespace(saved=lambda: recipe, algorithm=None))
    assert told["run"] == "run" and told["classes"] == ["a"]
    assert told["recipe"] == {"data": "folder(path='...', side=4)", "model": "pretrained(folder='...')", "rounds": "2"}
    assert "anna" not in json.dumps(told)
