"""Warm-up models and the auxiliary images drawn from them: FedDDPM's preparation (Peng et al., 2025, section III)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from effuse.core.algorithm import fields_of
from effuse.core.capabilities import Draws, Prepares
from effuse.core.data import Dataset, Shard
from effuse.core.errors import WireError
from effuse.core.message import of_images
from effuse.core.metric import Images
from effuse.core.model import Arch, Net
from effuse.core.prelude import FEDERATE, Client, Federation, Model, RecipeError, Server, Solver, message, on_client, spec
from effuse.core.sampler import Sampler
from effuse.core.solvers import Constant
from effuse.core.task import Task
from effuse.core.workbench import Workbench
from effuse.diffusion.samplers import Ancestral

WARM_UP, SYNTHESIS = "warm-up", "synthesis"
WARMED = "warm-up model"  # the key of a client's state that holds its model
NOBODY = -1  # the origin of an image that no client's model drew
Fraction = Annotated[float, Field(gt=0, le=1)]


@message(name="auxiliary_set")
class AuxiliarySet:
    """Images that the server drew from clients' models, each with the client that it came from."""

    pixels: Tensor  # uint8, N x C x H x W
    labels: Tensor  # int64; all zero where models are unconditional
    origin: Tensor  # int64, a client's number, or NOBODY

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, chosen: Tensor) -> "AuxiliarySet":
        return AuxiliarySet(self.pixels[chosen], self.labels[chosen], self.origin[chosen])

    def images(self, labelled: bool) -> Images:
        """As samples of a model, in [-1, 1]."""
        return Images(self.pixels.cpu().float() / 127.5 - 1.0, self.labels.cpu() if labelled else None)

    def shard(self, classes: int, device: torch.device) -> Shard:
        """As training data."""
        data = Dataset(self.pixels, self.labels.cpu(), tuple(map(str, range(classes))))
        return Shard.whole(data.to(device) if device.type != "meta" else data)


@message(name="synthesis.server")
class SynthesisServer(Server):
    """The global model and the auxiliary set so far."""

    pending: tuple[int, ...] = ()  # clients whose warm-up is to come
    warmed: tuple[int, ...] = ()  # clients that have warmed up and not yet sent their models
    auxiliary: AuxiliarySet | None = None

    @property
    def A(self) -> AuxiliarySet:
        """The auxiliary set after synthesis."""
        assert self.auxiliary is not None
        return self.auxiliary


@message(name="synthesis.progress")
class WarmUpReport:
    """All that a client reports of its warm-up: its size, or 0 if it did not train, and its loss."""

    weight: float
    loss: float | None


@message(name="synthesis.upload")
class Upload:
    """A client's warm-up model, and what the server needs to draw from it in proportion."""

    model: Model
    size: Annotated[int, of_images]
    # int64, images of each class, for a conditional model; a tensor, so that it counts as traffic
    histogram: Annotated[Tensor | None, of_images]

    def __post_init__(self) -> None:
        if self.histogram is not None and (self.histogram.dim() != 1 or self.histogram.is_floating_point()):
            raise WireError("upload: a histogram counts images, class by class")
        counts = (self.size,) if self.histogram is None else self.histogram.tolist()
        classes, least = self.model.arch.shape.classes, 1 if self.histogram is None else 0  # a noisy histogram may be empty
        if self.size < least or any(h < 0 for h in counts) or sum(counts) != self.size or len(counts) > max(1, classes):
            raise WireError(f"upload: {self.size} images cannot be {list(counts)} in {classes} classes")


@spec
class Synthesising(Draws, Prepares):
    """An algorithm that starts with a warm-up model of every client, from which the server draws images."""

    warmup: Solver  # of each client's own model; any solver, a private one too
    sampler: Sampler = Ancestral(batch=100)  # of the auxiliary set, in whole batches: use small ones for few images
    share: Fraction = 0.1  # |A_i| = 0.1 m_i; drawn once, since "in each round" contradicts "before training" in the paper
    group: PositiveInt = 10  # clients in a round of warm-up or synthesis: the most that a killed run repeats
    real: bool = False  # A is taken from the clients' images, as only a simulation can; shows what drawn images lose

    def __post_init__(self) -> None:
        getattr(super(), "__post_init__", lambda: None)()
        if self.warmup.state == "kept":
            raise RecipeError("algorithm.warmup.state: a warm-up is one fit and keeps nothing; leave it out")

    def generator(self, client: int, model: Arch) -> Arch:
        """The architecture that a client trains; by default that of the run's model."""
        return model

    def objective(self) -> Task | None:
        """The task of the clients' generators; None is the recipe's."""
        return None

    def labelled(self, model: Arch) -> bool:
        """Whether the drawn images have labels."""
        return self.generator(0, model).conditional

    def counts(self, client: Client) -> list[int]:
        """What a client tells of its images of each class."""
        if client.protection is not None:
            raise RecipeError(f"{client.where}: exact counts of private images would be sent; use a model without classes")
        return client.data.histogram

    def noting(self, server: SynthesisServer, client: int, upload: "Upload") -> SynthesisServer:
        """The server's state with what came with a client's model."""
        return server

    def selected(self, auxiliary: AuxiliarySet, server: SynthesisServer, fed: Federation) -> AuxiliarySet:
        """The images to keep of all that were drawn."""
        return auxiliary

    def ready(self, clients: int) -> None:
        super().ready(clients)
        if self.warmup.schedule != Constant():
            raise RecipeError(
                "algorithm.warmup.schedule: a schedule goes by federated rounds, which follow the warm-up; leave it out"
            )

    def setup(self, model: Model, fed: Federation) -> SynthesisServer:
        if self.real:
            self._pool(fed)  # refuse before any client trains
            return SynthesisServer(model, phase=SYNTHESIS)
        return SynthesisServer(model, phase=WARM_UP, pending=tuple(fed.clients))

    @property
    def then(self) -> str:
        """The phase after the preparation."""
        return FEDERATE

    def prepares(self, server: Server) -> bool:
        return server.phase in (WARM_UP, SYNTHESIS)

    def preparation(self) -> Mapping[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(Synthesising)}

    def prepared(self, server: SynthesisServer, other: SynthesisServer) -> SynthesisServer:
        # not the model: it is untrained in both
        found = {name: value for name, value in fields_of(other).items() if name in fields_of(server) and name != "model"}
        return dataclasses.replace(server, **found | {"phase": self.then})

    def prepare(self, server: SynthesisServer, fed: Federation) -> SynthesisServer:
        """One round of warm-up, or of synthesis from it, for the next group of clients."""
        if self.real:
            return dataclasses.replace(server, auxiliary=self.taken(fed, self.labelled(server.model.arch)), phase=self.then)
        if server.phase == WARM_UP:
            # a single last client joins this group: alone, its lost answer would end the run, whatever the quorum
            n = self.group + (len(server.pending) == self.group + 1 > 2)
            now, pending = server.pending[:n], server.pending[n:]
            generators = {k: {"arch": self.generator(k, server.model.arch)} for k in now}
            # only those that answered: a client whose answer is lost has kept no model
            warmed = tuple(k for k, report in fed.ask_each(self.warm_up, generators) if report.weight > 0)
            return dataclasses.replace(server, phase=SYNTHESIS, pending=pending, warmed=warmed)
        before = [] if server.auxiliary is None else [server.auxiliary]

        added: list[AuxiliarySet] = []
        histograms: dict[str, list[int]] = {}  # as the clients told them
        for client, upload in fed.ask(self.upload, server.warmed):
            with fed.using(client):
                histogram = None if upload.histogram is None else upload.histogram.tolist()
                if upload.size:  # a noisy histogram may be all zero
                    n = max(1, round(self.share * upload.size))
                    drawn = synthesised(fed.workbench, client, upload.model, n, self.sampler, histogram, self.objective())
                    added.append(drawn)
                server = self.noting(server, client, upload)
            if histogram is not None:
                histograms[str(client)] = histogram
            del upload  # one model in memory at a time
        kept = [len(a) for a in added]
        fed.note(synthesis={"kept": sum(kept), "drawn": sum(whole(n, self.sampler) for n in kept)})
        if histograms:
            fed.note(histograms=histograms)
        phase = WARM_UP if server.pending else self.then
        auxiliary = together([*before, *added]) if before or added else None  # no client of a group may have answered
        if phase == self.then and auxiliary is not None:
            auxiliary = self.selected(auxiliary, server, fed)
        return dataclasses.replace(server, auxiliary=auxiliary, warmed=(), phase=phase)

    def _pool(self, fed: Federation) -> Shard:
        return fed.unprotected_pool("algorithm.real: the server trains on")

    def taken(self, fed: Federation, labelled: bool) -> AuxiliarySet:
        """As many real images as would be drawn, at random from all."""
        pool = self._pool(fed)
        order = torch.from_numpy(fed.workbench.stream("real").numpy().permutation(len(pool)))
        rows = order[: max(1, round(self.share * len(pool)))]
        some = Shard(pool.dataset, pool.rows[rows]).gathered()
        labels = some.labels.cpu() if labelled else torch.zeros(len(rows), dtype=torch.int64)
        return AuxiliarySet(as_bytes(Images(some.floats(some.images))), labels, torch.full((len(rows),), NOBODY))

    def begun(self, client: Client, arch: Arch) -> Net:
        """A client's network before its warm-up."""
        return client.load(client.initial(arch))

    @on_client(covered=True)
    def warm_up(self, client: Client, arch: Arch) -> WarmUpReport:
        net = self.begun(client, arch)
        fit = client.fit(net, self.warmup, client.data, task=self.objective())
        model = client.unload(net)
        # in the client's state, so that neither a killed warm-up nor a lost upload repeats the other clients' work
        client.state[WARMED] = model if fit.average is None else model.holding(fit.average)
        return WarmUpReport(float(client.size), fit.loss)

    @on_client(covered=True)
    def upload(self, client: Client) -> Upload:
        model = client.state.pop(WARMED)
        if not model.arch.conditional:
            return Upload(model, client.size, None)
        counts = self.counts(client)
        return Upload(model, sum(counts), torch.tensor(counts))

    def images(self, server: SynthesisServer) -> Images | None:
        return None if server.auxiliary is None else server.auxiliary.images(self.labelled(server.model.arch))


def synthesised(
    bench: Workbench,
    client: int,
    model: Model,
    n: int,
    sampler: Sampler,
    histogram: Sequence[int] | None = None,
    task: Task | None = None,
) -> AuxiliarySet:
    """Draw `n` images from a client's model, its classes in proportion to the client's own."""
    labels = torch.zeros(n, dtype=torch.int64) if histogram is None else in_proportion(histogram, n)
    full = whole(n, sampler)
    requested = None if histogram is None else torch.cat([labels, labels[-1:].expand(full - n)])
    drawn = bench.generate(model, full, sampler, requested, task=task).first(n)
    return AuxiliarySet(as_bytes(drawn), labels, torch.full((n,), client))


def as_bytes(images: Images) -> Tensor:
    """Images as stored bytes; a rehearsal has shapes only."""
    return images.pixels.to(torch.uint8) if images.pixels.is_meta else images.bytes()


def whole(n: int, sampler: Sampler) -> int:
    """`n` rounded up to whole batches, so that one recording of the sampler serves every client."""
    return math.ceil(n / sampler.batch) * sampler.batch


def in_proportion(histogram: Sequence[int], n: int) -> Tensor:
    """`n` labels in the proportions of a histogram, by largest remainders."""
    total = sum(histogram)
    counts = [n * h // total for h in histogram]
    rest = sorted(range(len(histogram)), key=lambda c: (-(n * histogram[c] % total), c))[: n - sum(counts)]
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor([k + (c in rest) for c, k in enumerate(counts)]))


def together(parts: Sequence[AuxiliarySet]) -> AuxiliarySet:
    """Several sets as one, in their order."""
    device = parts[-1].pixels.device  # a checkpoint may have put earlier ones elsewhere
    pixels = torch.cat([p.pixels.to(device) for p in parts])
    return AuxiliarySet(pixels, torch.cat([p.labels.cpu() for p in parts]), torch.cat([p.origin.cpu() for p in parts]))


def joined(shard: Shard, pixels: Tensor, labels: Tensor | None) -> Shard:
    """A client's data with synthetic images added, in its own storage format."""
    data = shard.gathered()
    own = data.images
    if pixels.is_meta:  # a rehearsal: only the client's labels have values
        own = own.to("meta")
    if labels is None or pixels.is_meta:
        labels = torch.zeros(len(pixels), dtype=torch.int64)
    added = pixels if data.peak == 255 else (pixels.float() * (data.peak / 255)).round()
    images = torch.cat([own, added.to(own.device, own.dtype)])
    labels = torch.cat([data.labels, labels.to(data.labels.device)])
    # synthetic images have no groups and no domains
    return Shard.whole(dataclasses.replace(data, images=images, labels=labels, groups=None, domains=None))
