"""A site audits its own model: from Python, into its own folder."""

import json
import re
import stat

import pytest
import torch
from memoriser import Memoriser, random_images

from effuse.core.data import Dataset, Shard
from effuse.core.errors import DataError, RecipeError
from effuse.core.metric import Images
from effuse.core.privacy import Budget
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.core.spec import spec
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.machines.eager import Eager
from effuse.tasks.denoise import Denoise
from effuse.tasks.schedules import Linear
from effuse.tools.audit_model import Canaries, audit_model
from effuse.tools.audit_page import histogram

TASK = Denoise(schedule=Linear(steps=100))
DATA, HELD_OUT = random_images(60, "train", side=8), random_images(90, "test", side=8)


def site(steps: int, shard: Shard):
    """A site's model."""
    bench = Workbench(Eager(torch.device("cpu")), TASK, 1)
    bench.begin(Stream((0, "site")), 0)
    net = bench.load(bench.initial(Memoriser().resolved(DATA.shape)))
    bench.fit(net, Adam(lr=3e-3, batch=32, steps=steps), shard)
    return bench.unload(net)


def test_a_site_finds_copies_and_members_and_its_results_stay(tmp_path):
    """Of 40 images 10 are copies of training images; 30 are random."""
    shard = Shard.whole(DATA)
    copies = torch.cat([DATA.images[20:30], random_images(30, "others", side=8).images]).float() / 127.5 - 1
    report = audit_model(site(800, shard), TASK, shard, HELD_OUT, tmp_path / "audit", images=Images(copies))
    assert report == json.loads((tmp_path / "audit" / "audit.json").read_text())
    found = report["memorisation"]["generated"]
    assert (found["below"], found["share"], found["lowest"], found["histogram"][0]) == (10, 0.25, 0.0, 10)
    assert report["memorisation"]["held_out"]["below"] == 0
    assert report["membership"]["members"] == 60 and report["membership"]["attacks"]["pia"]["auc"]["low"] > 0.7
    assert report["promise"] is None and report["one_run"] is None and report["about"] == {}
    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o700


def test_a_folder_that_others_may_read_is_closed(tmp_path):
    shard = Shard.whole(DATA)
    out = tmp_path / "audit"
    out.mkdir(mode=0o755)
    model = site(1, shard)
    audit_model(model, TASK, shard, HELD_OUT, out, images=Images(torch.zeros(40, 1, 8, 8)))
    assert stat.S_IMODE(out.stat().st_mode) == 0o700 and (out / "private" / "nearest.png").exists()
    audit_model(model, TASK, shard, HELD_OUT, out)
    assert not (out / "private" / "nearest.png").exists(), "a picture of an earlier audit would be taken for this one's"


def test_a_sites_own_canaries_and_the_promise(tmp_path):
    """A site sets 40 of its 60 images aside by coins. Noise was promised, and there was none."""
    rows, coins = torch.arange(40), torch.rand(40, generator=Stream(("coins",)).torch()) < 0.5
    shard = Shard(DATA, torch.cat([rows[coins], torch.arange(40, 60)]))
    canaries = Canaries(Shard(DATA, rows), coins)
    options = {"canaries": canaries, "budget": Budget(epsilon=0.05, delta=1e-6), "unit": "group", "guesses": 20}
    reports = [audit_model(site(steps, shard), TASK, shard, HELD_OUT, tmp_path, **options) for steps in (1500, 1)]
    leaking, fresh = reports
    assert leaking["one_run"]["epsilon"] > 0.3 and leaking["error"].startswith("this model leaks more than was promised")
    assert (
        leaking["one_run"]["delta"] == 1e-6 and leaking["one_run"]["guesses"] == 20 and leaking["promise"]["unit"] == "group"
    )
    assert fresh["one_run"]["epsilon"] == 0 and fresh["error"] is None
    page = (tmp_path / "index.html").read_text()
    assert "all images of one group" in page and "one group is replaced by nothing" in page


def test_sixteen_bits_are_compared_as_bytes(tmp_path):
    """A 16-bit image and its copy as bytes differ by rounding only."""
    wide = Dataset(DATA.images.int() * 257, DATA.labels, DATA.classes, peak=65535)
    copies = Images(DATA.images[:5].float() / 127.5 - 1)
    shard = Shard.whole(wide)
    report = audit_model(site(1, shard), TASK, shard, HELD_OUT, tmp_path, images=copies)
    assert report["memorisation"]["generated"]["below"] == 5
    assert report["memorisation"]["generated"]["lowest"] == pytest.approx(0, abs=1e-5)


def test_what_a_site_must_have(tmp_path):
    shard = Shard.whole(DATA)
    model = site(1, shard)
    with pytest.raises(DataError, match="no held-out image has a label that training images have"):
        audit_model(model, TASK, shard, HELD_OUT.rows(torch.arange(0)), tmp_path)

    @spec
    class Unknown(Task):
        def draw(self, n, image, labels, generator):
            return {}

        def loss(self, net, batch):
            return batch.x.mean()

    with pytest.raises(RecipeError, match="no membership attack is known; audit a denoiser or a classifier"):
        audit_model(model, Unknown(), shard, HELD_OUT, tmp_path)
    assert not (tmp_path / "audit.json").exists()


def test_a_histogram_has_a_bar_for_every_bin_that_counts(tmp_path):
    """Counts 1, 10, 100 on a logarithmic scale from 0.5: log 2, log 20 and log 200 of 192 pixels at most."""
    picture = histogram([0.0, 0.5, 1.0, 1.5, 2.0], {"generated": [1, 10, 0, 100], "held_out": [0, 0, 3, 0]}, 1.0)
    heights = re.findall(r'<rect class="generated" .*?height="([\d.]+)"', picture)
    assert [float(h) for h in heights] == pytest.approx([192 * 0.1308, 192 * 0.5654, 192], abs=0.1)
    assert picture.count('class="held_out"') == 1 and ">1</text>" in picture and ">10</text>" in picture
    assert ">100</text>" in picture and ">1000</text>" not in picture
    assert "<rect class" not in histogram([0.0, 1.0, 2.0], {"generated": [0, 0], "held_out": [0, 0]}, 1.0)
