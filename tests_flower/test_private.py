"""Private sites in real processes: kills at any moment cost no image more than was allowed."""

import json
import random
import time

from deployment import kill
from private_sites import BUDGET, private
from slow import ToySlow
from toy import ADAM

from effuse.core.privacy import Release
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.ledger import Ledger


def test_sites_and_server_killed_at_any_moment_pay_for_every_round_once(deployment):
    """Site 1 is killed six times, and the server once; six rounds cost each site the budget of six rounds."""
    recipe = private(ToySlow(local=ADAM, who=1, seconds=0.2), rounds=6)
    draw = random.Random(0)

    def site(k):
        own = (
            "--data",
            "toy_images(n=40)",
            "--keys",
            str(deployment.keys),
            "--ledger",
            str(deployment.folder / f"{k}.jsonl"),
        )
        return deployment.site(k, *own)

    sites = [site(k) for k in range(3)]
    server = deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"))
    for turn in range(6):
        deployment.wait(lambda n=turn: deployment.printed("site-1.log").count("received") > n, f"order {turn}")
        time.sleep(draw.uniform(0.0, 1.0))
        kill(sites[1])
        sites[1] = site(1)
        if turn == 2:
            kill(server)
            server = deployment.serve("--resume", str(deployment.folder / "run"))
    assert server.wait(180) == 0, deployment.printed("serve.log")
    result = json.loads((deployment.folder / "run" / "result.json").read_text())
    assert result["rounds"] == 6 and result["privacy"]["budget"] == 50.0
    for k in range(3):
        entries = Ledger(deployment.folder / f"{k}.jsonl", BUDGET).entries()
        assert [entry.what for entry in entries] == [f"round {t}, job 'train'" for t in range(6)]
        spent = epsilon_of([release for entry in entries for release in entry.releases], 1e-3, "rdp")
        assert 49.0 < spent <= 50.0


def test_a_site_refuses_a_run_that_its_ledger_cannot_pay(deployment):
    """The first run spends the budget; a second one, with other settings and folders, starts with no site."""
    ledger = ("--ledger", str(deployment.folder / "ledger.jsonl"), "--keys", str(deployment.keys))
    recipe = private(ToySlow(local=ADAM, seconds=0.0), rounds=1)
    (deployment.folder / "ledger.jsonl").touch()
    spent = Ledger(deployment.folder / "ledger.jsonl", BUDGET, "another run")
    spent.charge("ab" * 32, "round 0, job 'train'", [Release("fit", noise=1.0)])
    spent.close()
    deployment.serve(deployment.manifest(recipe), "--out", str(deployment.folder / "run"))
    deployment.site(0, "--data", "toy_images(n=40)", *ledger)
    deployment.until("run/federation.log", "declines: this run would cost epsilon")
    assert "and the site's cap is 50 (delta 0.001, rdp)" in deployment.printed("run/federation.log")
    dry = deployment.effuse(
        "dry.log",
        "join",
        deployment.address,
        "--client-id",
        "1",
        "--folder",
        str(deployment.folder / "dry"),
        "--data",
        "toy_images(n=40)",
        "--epsilon",
        "1",
        "--dry-run",
        *ledger,
    )
    assert dry.wait(60) == 0
    assert "this site would refuse it: this run would cost epsilon" in deployment.printed("dry.log")
