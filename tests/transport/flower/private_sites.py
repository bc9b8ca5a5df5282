"""Sites with data and a ledger of their own, in this process."""

import json

import private_fits
from fake import FakeChannel
from toy import ADAM, ALGORITHMS, ToyImages, ToyStateful, toy_recipe

from effuse.algorithms.fedavg import FedAvg
from effuse.algorithms.localonly import LocalOnly
from effuse.core.federation import Order
from effuse.core.privacy import Budget
from effuse.core.rng import Stream
from effuse.core.wire import encode
from effuse.privacy.accountant import epsilon_of
from effuse.privacy.ledger import Ledger
from effuse.transport.flower.consent import Consent
from effuse.transport.flower.guarded import Guarded, Limit
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Site

BUDGET = Budget(epsilon=50.0, delta=1e-3, accountant="rdp")  # solved in milliseconds


def private(algorithm, **changes):
    """A resolved recipe whose clients train privately."""
    recipe = toy_recipe(algorithm=private_fits.private(algorithm), **{"budget": BUDGET, **changes})
    return recipe.resolved(recipe.data.load("train"))


PRIVATE = {
    "fedavg": FedAvg(local=ADAM),
    "feddiff": ALGORITHMS["feddiff, two kinds of networks"],
    "state": ToyStateful(local=ADAM, cohort=2),
    "localonly": LocalOnly(local=ADAM),
}


def site_at(folder, client=0, data=ToyImages(), limit=None, ledger=None) -> Site:  # noqa: B008
    """A site with its own data, whose ledger is in the folder above its own."""
    shown: list[str] = []
    limit = limit or Limit(ledger=ledger or folder.parent / "ledger.jsonl")
    site = Site(folder, client, data, Consent(), "cpu", shown.append, limit)
    site.shown = shown
    return site


def invited(site, recipe) -> Site:
    site.enrol(Invitation("toy", recipe.saved(), ("dark", "light"), "", ""))
    return site


def guarded_of(site) -> Guarded:
    """What carries out a private site's orders, once they are known to be of its course."""
    return site._carry_out.__self__.carry_out.__self__


def message_of(recipe, seed="test") -> bytes:
    job = recipe.algorithm.jobs["train"]
    return encode(job.arguments(model=recipe.model.initial(Stream((seed,)))), job.arguments)


def order(t=0, client=0, base=None, durable="", job="train", federated=None) -> bytes:
    return encode(Order(job, t, t if federated is None else federated, 0, client, base, durable), Order)


def ledger_of(folder, recipe=None, run="") -> Ledger:
    return Ledger(folder / "ledger.jsonl", BUDGET if recipe is None else recipe.budget, run)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]


def spent_by(folder, delta=1e-3) -> float:
    return epsilon_of([r for entry in ledger_of(folder).entries() for r in entry.releases], delta, "rdp")


class Killed(BaseException):
    """A process that ends at this point."""


class OwnData(FakeChannel):
    """Sites with data of their own, and a ledger each."""

    def site(self, client):
        return site_at(self.folder / str(client) / "site", client)
