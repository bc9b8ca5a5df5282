"""Real processes around a SuperLink, with TLS and keys: a site, the server or the SuperLink is killed in a seeded moment."""

import contextlib
import os
import random
import signal
import time

from deployment import Deployment, kill
from kill_cases import recipe_of
from kills import outcome
from toy import ALGORITHMS

from effuse.algorithms.centralised import Centralised
from effuse.runs import driver

NAMES = [name for name, algorithm in ALGORITHMS.items() if not isinstance(algorithm, Centralised)]


def test_a_federation_that_was_struck_ends_as_if_it_had_not_been(flower_number, tmp_path, pytestconfig):
    seed = pytestconfig.getoption("--seed")
    draw = random.Random(f"{seed} {flower_number}")
    name = random.Random(seed).sample(NAMES, len(NAMES))[flower_number % len(NAMES)]
    victim = ("site", "server", "superlink")[flower_number % 3]
    recipe = recipe_of(name)
    print(
        f"repeat it by `python -m pytest tests_faults/test_flower.py --seed {seed} --case {flower_number}`: {name}, {victim}"
    )
    with contextlib.closing(Deployment(tmp_path)) as deployment:
        sites = deployment.sites()
        server = deployment.serve(deployment.manifest(recipe), "--out", str(tmp_path / "run"))
        k, orders = draw.randrange(3), draw.choice([1, 1, 2])
        deployment.wait(lambda: deployment.printed(f"site-{k}.log").count("received") >= orders or ended(tmp_path), "order")
        time.sleep(draw.uniform(0.0, 0.5))
        if victim == "site":
            kill(sites[k])
            deployment.site(k)
        elif victim == "server":
            kill(server)
            server = deployment.serve("--resume", str(tmp_path / "run"))
        else:
            with open(f"/proc/{server.pid}/task/{server.pid}/children") as file:
                os.kill(int(file.read().split()[0]), signal.SIGKILL)
        assert server.wait(300) == 0, deployment.printed("serve.log")
    driver.run(recipe, tmp_path / "simulator")
    found, expected = (outcome(tmp_path / run, traffic=False) for run in ("run", "simulator"))
    assert found["result"]["weights_sha256"] == expected["result"]["weights_sha256"]
    assert [seen(record) for record in found["rounds.jsonl"]] == [seen(record) for record in expected["rounds.jsonl"]]


def seen(record: dict) -> dict:
    """What both a server of remote clients and a simulation record."""
    return {key: record.get(key) for key in ("t", "phase", "federated", "loss", "noted", "metrics")}


def ended(folder) -> bool:
    return (folder / "run" / "result.json").exists()
