"""The documentation site: it builds without a warning, has every name, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from effuse.core.registry import registry
from effuse.core.spec import Spec
from effuse.tools.names import KINDS, named

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow("builds some thirty pages; links are tested elsewhere")
def test_the_site_builds_with_every_name(tmp_path):
    """`strict` in mkdocs.yml makes any warning an error: a dead link or anchor, or a page that no menu names."""
    mkdocs = Path(sys.executable).parent / "mkdocs"
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [mkdocs, "build", "--quiet", "--site-dir", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    reference = {path.stem: path.read_text() for path in (tmp_path / "reference").glob("*.html")}
    for kind, base in KINDS.items():
        for cls in (cls for cls in registry(base).values() if cls.__module__.startswith("effuse.")):
            assert f">{cls.name}<" in reference[kind], f"{kind}.html has no {cls.name}"
    assert ">effuse run<" in reference["commands"] and ">effuse keys init<" in reference["commands"]
    for page in tmp_path.rglob("*.html"):
        outside = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not [url for url in outside if "canonical" not in url], f"{page.name} loads {outside}"


def test_a_name_is_described_with_its_keys():
    """As `effuse list adam` prints them: a default, one that must be given, and a remark from the source."""
    (adam,) = named("adam")
    keys = {key.name: key for key in adam.keys}
    assert (adam.kind, keys["lr"].default, keys["eps"].default) == ("solver", None, "1e-08")
    assert keys["lr"].words == "float, must be given"
    assert keys["state"].remark == "the optimiser's moments at a client's next fit"
    assert {e.kind for e in named("fedphd")} == {"recipe", "algorithm"}
    ours = [cls for cls in registry(Spec).values() if cls.__module__.startswith("effuse.")]
    assert len(ours) > 100 and all(cls.name and cls.__doc__ for cls in ours)
