"""Run folders whose pages are looked at, and a browser to look with."""

import shutil
from pathlib import Path

import pytest
from toy import toy_recipe

import effuse
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral
from effuse.metrics.encoders import Pixels
from effuse.metrics.fidelity import KID

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
AXE = Path(__file__).parents[2] / ".venv" / "axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A finished run of three clients and three rounds, evaluated after each."""
    evaluate = Evaluate(grid=4, every=1, metrics=(KID(n=4, encoder=Pixels()),))
    recipe = toy_recipe(rounds=3, evaluate=evaluate, sampler=Ancestral(batch=4))
    return effuse.run(recipe, out=tmp_path_factory.mktemp("trained") / "run").path


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, which a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")  # while it is open, nothing else in the process can run an asyncio loop
def browser():
    """Headless Chromium, driven by Playwright."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with driver.sync_playwright() as playwright:
        # --no-sandbox: containers let no root user make one; the pages are our own
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe():
    """The source of axe-core, which looks for what a screen reader or weak eyes cannot use."""
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm install --prefix .venv/axe axe-core@4.14.1")
    return AXE.read_text()
