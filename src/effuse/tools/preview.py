"""List what would leave a site, without sending it."""

import dataclasses
import types
from collections.abc import Iterator
from typing import Any, get_args

from effuse.core.algorithm import Job
from effuse.core.errors import EffuseError
from effuse.core.ledger import EVALUATION, TRAINING, Account
from effuse.core.message import claims, is_message, message_hints
from effuse.core.model import Model
from effuse.core.recipe import Recipe
from effuse.fast import machine_for
from effuse.tools.check import rehearse
from effuse.tools.effort import effort
from effuse.transport.flower.guarded import disclosures, spending
from effuse.transport.flower.messages import Invitation
from effuse.transport.flower.site import Site
from effuse.transport.refusals import hollow_model
from effuse.transport.rehearsal import Rehearsal


def what_leaves(site: Site, invitation: Invitation) -> list[str]:
    """Rehearse the whole run for this client: which messages it would send, with which fields and how many bytes."""
    recipe = site.offered(invitation)
    shard = site.shard(recipe, invitation.classes)
    fed = Rehearsal(recipe, [shard] * recipe.clients)
    model = hollow_model(recipe)
    weights: dict[Any, set[float]] = {}
    fed.on_reply = lambda client, reply: weights.setdefault(type(reply), set()).add(getattr(reply, "weight", 1.0))
    _, _, _, _, client_bytes = rehearse(recipe, fed, model)
    lines = [f"manifest {invitation.name}@{invitation.digest}", *(f"  {k}={v}" for k, v in invitation.recipe.items())]
    lines.append(f"client {site.client} would train on {site.counted(shard)}")
    lines.append(f"what would leave this site (client {site.client}, {len(shard)} images here) in {recipe.rounds} rounds:")
    for name, job in recipe.algorithm.jobs.items():
        lines.append(f"  job '{name}' answers with {described(job.returns)}")
        lines += [
            f"    {line}"
            for line in disclosed(recipe, job, len(shard) if len(shard) in weights.get(job.returns, ()) else None)
        ]
    for column, why in ((TRAINING, "to train"), (EVALUATION, "to evaluate")):
        sent = fed.ledger.total.get(Account(column, fed.link, "up", site.client))
        if sent:
            counts = f"{sent['messages']} messages, {sent['parameters']:,} parameters, {sent['bytes']:,} bytes"
            lines.append(f"  {why}: {counts}, if this client is chosen as a rehearsal chooses")
    planned = site.planned(recipe, shard)
    ledger = site.ledger(recipe, invitation)
    lines += spending(planned, site.client, ledger)
    if recipe.budget is not None:
        lines.append("a person with images at another site too is promised the sum of both sites' epsilons")
    if ledger is not None and recipe.budget is not None:
        try:
            ledger.foresee("this run", planned.releases(site.client))
        except EffuseError as error:
            lines.append(f"this site would refuse it: {error}")
    lines.append(
        "if this site refuses terms or an order, it says why: the size, channels and number of classes of the images, or "
        "what its budget allows; of an error about files or labels it tells the kind"
    )
    randomness = "known to the server" if recipe.reproducible else "mixed with this site's secret"
    lines.append(f"nothing else leaves, neither images nor their names; this site's randomness is {randomness}")
    lines.append(effort(recipe, shard, fed, client_bytes, model, machine_for(recipe, site.device)))
    return lines


def disclosed(recipe: Recipe, job: Job, images: int | None) -> Iterator[str]:
    """What the numbers of an answer tell of the images here."""
    if images is not None:
        yield f"its `weight` tells the server the number of images here, {images:,}"
    noise = " and ".join(map(str, disclosures(recipe)))
    for name in claims(job.returns):
        if recipe.budget is not None:
            how = "with noise, within the budget"
        else:
            how = f"with the noise of {noise}" if noise else "exactly"
        yield f"its `{name}` tells the server the numbers of images here, {how}"


def described(hint: Any) -> str:
    """A type in words; a message by its fields."""
    if hint is Model:
        return "a model (network, parameters, buffers)"
    if is_message(hint):
        fields = message_hints(hint)
        inner = ", ".join(f"{f.name}: {described(fields[f.name])}" for f in dataclasses.fields(hint))
        return f"{hint.__qualname__}({inner})"
    if isinstance(hint, types.UnionType):
        return " or ".join(described(a) for a in get_args(hint))
    if get_args(hint):
        origin = str(getattr(hint, "__origin__", "")).removeprefix("<class '").removesuffix("'>")
        return f"{origin or 'one'} of {' or '.join(described(a) for a in get_args(hint) if a is not Ellipsis)}"
    return "nothing" if hint in (None, type(None)) else getattr(hint, "__name__", str(hint))
