"""A whole federation that runs in milliseconds, and toy algorithms that use features which few real ones use."""

import dataclasses
from typing import Annotated

import torch
from torch import Tensor, nn

from effuse.algorithms.centralised import Centralised
from effuse.algorithms.class_means import ClassMeans
from effuse.algorithms.dense import Dense
from effuse.algorithms.ensemble import OneShotEnsemble
from effuse.algorithms.fed3r import Fed3R
from effuse.algorithms.fedavg import FedAvg, Update
from effuse.algorithms.fedcda import FedCDA
from effuse.algorithms.fedcvae import FedCVAE
from effuse.algorithms.feddda import FedDDA
from effuse.algorithms.fedddpm import AuxOnly, FedDDPM, FedDDPMPlus, QuickTest
from effuse.algorithms.feddiff import FedDiff
from effuse.algorithms.feddiffuse import Full, UDec, ULatDec, USplit
from effuse.algorithms.feddifrc import FedDifRC
from effuse.algorithms.feddisco import FedDisco
from effuse.algorithms.fedema import FedEMA
from effuse.algorithms.fedlid import FedLID
from effuse.algorithms.fednh import FedNH
from effuse.algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from effuse.algorithms.fedphd import FedPhD
from effuse.algorithms.fedproto import FedProto, FedProtoOriginal
from effuse.algorithms.fedprox import FedProx
from effuse.algorithms.fedrcl import FedRCL, FedRCLGuided
from effuse.algorithms.localaug import LocalAug
from effuse.algorithms.localonly import LocalOnly
from effuse.algorithms.mofedsam import MoFedSAM
from effuse.algorithms.moon import Moon
from effuse.algorithms.nearest_mean import NearestMean
from effuse.algorithms.scaffold import Scaffold
from effuse.algorithms.shared.filters import Fmf
from effuse.algorithms.shared.guides import Encoder, Own, Vectors
from effuse.core.aggregate import by_weight
from effuse.core.algorithm import Algorithm, Server, on_client
from effuse.core.data import Dataset, Source, Split
from effuse.core.federation import Federation
from effuse.core.message import message
from effuse.core.model import Arch, Model, Net
from effuse.core.params import Params
from effuse.core.recipe import Evaluate, Recipe
from effuse.core.reducers import Clipped, Krum, Median, Trimmed
from effuse.core.solvers import SGD, Adam, CosineDecay, Solver
from effuse.core.spec import spec
from effuse.core.task import Batch, Given
from effuse.core.workbench import Client
from effuse.data.partition import Iid
from effuse.diffusion.decode import Decode
from effuse.diffusion.samplers import Ddim
from effuse.metrics.accuracy import Accuracy
from effuse.metrics.encoders import Pixels
from effuse.models.cut import Cut, narrowed
from effuse.models.cvae import Cvae
from effuse.models.dense import DenseGenerator
from effuse.models.projected import Projected
from effuse.models.resnet import Cnn, LinearClassifier
from effuse.models.saved import write_plain
from effuse.privacy.histogram import Gaussian, Laplace
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.tasks.invert import Invert
from effuse.tasks.schedules import Linear
from effuse.tasks.views import Views


@spec
class ToyImages(Source):
    """Uniform grey squares: one brightness per class, with small variations."""

    n: int = 40
    side: int = 4

    def load(self, split: Split) -> Dataset:
        labels = torch.arange(self.n if split == "train" else 8) % 2
        images = (labels * 200 + torch.arange(len(labels)) % 7)[:, None, None, None].expand(-1, 1, self.side, self.side)
        return Dataset(images.to(torch.uint8).contiguous(), labels, ("dark", "light"))


class ToyNetwork(nn.Module):
    """Three layers, one for each part of a U-Net, and a dropout that draws from torch's default generator."""

    def __init__(self, channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, width, 3, padding=1)
        self.middle = nn.Conv2d(width, width, 1)
        self.up = nn.Conv2d(width, channels, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    condition_width = 1

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None, give: str = "output"):
        hidden = torch.relu(self.down(x)) * (1 + t.float() / 100)[:, None, None, None]
        hidden = self.dropout(torch.relu(self.middle(hidden)))
        if give == "features":
            return hidden.mean((2, 3))
        if give == "stages":
            return hidden, self.up(hidden)
        return (self.up(hidden), hidden.mean((2, 3))) if give == "both" else self.up(hidden)


@spec
class ToyUnet(Arch):
    """The smallest network with an encoder, a bottleneck and a decoder."""

    parts = {"encoder": ("down",), "bottleneck": ("middle",), "decoder": ("up",)}
    uncut = ("up",)
    featured = True
    staged = True

    width: int = 4
    dropout: float = 0.1
    cut: Cut = ""

    def build(self) -> nn.Module:
        return narrowed(ToyNetwork(self.shape.channels, self.width, self.dropout), self.cut)

    def save(self, net, folder, scheduler) -> None:
        write_plain(self, net, folder, scheduler)


class ToyLabelledNetwork(ToyNetwork):
    """The same with a value for every class, and one for the null label."""

    def __init__(self, channels: int, width: int, dropout: float, classes: int) -> None:
        super().__init__(channels, width, dropout)
        self.classes = nn.Embedding(classes + 1, 1)

    def forward(self, x: Tensor, t: Tensor, labels: Tensor, condition: Tensor | None = None, give: str = "output"):
        rows = torch.where(labels < 0, self.classes.num_embeddings - 1, labels)
        embedding = self.classes(rows) if condition is None else self.classes(rows) + condition
        return super().forward(x + embedding[:, :, None, None], t, give=give)


@spec
class ToyLabelled(ToyUnet):
    """The same network, conditional on the class."""

    conditional = True
    parts = ToyUnet.parts | {"encoder": ("down", "classes")}

    def build(self) -> nn.Module:
        return ToyLabelledNetwork(self.shape.channels, self.width, self.dropout, self.shape.classes)


@message
class Diary:
    """State of its own message type."""

    visits: int
    seen: tuple[int, ...]


@spec
class ToyStateful(FedAvg):
    """Clients store an average of their own models and count their visits. Applying a job twice changes both."""

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        diary = client.state.get("diary", Diary(0, ()))
        past = client.state.get("past", model.params)
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        mixed = Params.of(net).lerp(past, 0.25 / (1 + diary.visits))
        client.state["past"] = mixed
        client.state["diary"] = Diary(diary.visits + 1, (*diary.seen, fit.steps))
        return Update(model.holding(mixed), self.weight(client), fit.loss)


@message
class Size:
    weight: float


@spec
class ToyAsksTwice(Algorithm):
    """Asks for the clients' sizes, draws a random number at the server, then trains with weights computed from both."""

    local: Solver
    cohort: int | None = None

    def round(self, server: Server, fed: Federation) -> Server:
        cohort = fed.sample(self.cohort)
        sizes = {k: answer.weight for k, answer in fed.ask(self.count, cohort)}
        scale = float(fed.workbench.stream("scale").numpy().uniform(0.5, 1.5))
        messages = {k: {"model": server.model, "share": scale * sizes[k]} for k in sizes}  # the clients that answered
        return Server(fed.mean(self.train, messages).value.model)

    @on_client(covered=True)
    def count(self, client: Client) -> Size:
        return Size(float(client.size))

    @on_client(covered=True)
    def train(self, client: Client, model: Model, share: float) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data)
        return Update(client.unload(net), share, fit.loss)


class ToyScorer(nn.Module):
    """A convolution and a head."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.trunk, self.head = nn.Conv2d(channels, 3, 3, padding=1), nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.trunk(x)).mean((2, 3)))


@spec
class ToyScores(Arch):
    """The smallest classifier."""

    def build(self) -> nn.Module:
        return ToyScorer(self.shape.channels, self.shape.classes)


@message(name="toy.both")
class Both(Server):
    """A denoiser, which is delivered, and a classifier."""

    scores: Model


@message(name="toy.pair")
class Pair:
    model: Annotated[Model, by_weight]
    scores: Annotated[Model, by_weight]
    weight: float
    loss: float | None


def guided_by_scores(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss, and the distance between a frozen classifier's outputs and those stored in a column."""
    drift = (given["scores"](batch.x) - batch.columns["scores"]).square().mean(1)
    return batch.task.loss(net, batch) + given["pull"] * batch.mean(drift)


def scored(net: Net, batch: Batch, given: Given) -> Tensor:
    return net(batch.x)


@spec
class ToyTwoTasks(Algorithm):
    """One job that trains a classifier and a denoiser with the same solver, and computes columns by a forward pass."""

    local: Solver
    pull: float = 0.0

    def setup(self, model: Model, fed: Federation) -> Server:
        return Both(model, scores=fed.workbench.initial(ToyScores().resolved(model.arch.shape)))

    def round(self, server: Both, fed: Federation) -> Server:
        u = fed.mean(self.train, fed.clients, model=server.model, scores=server.scores)
        return Both(u.value.model, scores=u.value.scores)

    @on_client(covered=True)
    def train(self, client: Client, model: Model, scores: Model) -> Pair:
        classifier = client.load(scores)
        client.fit(classifier, self.local, client.data, task=Classify())
        trained = client.unload(classifier)
        data = client.data.with_columns(scores=client.apply(classifier, scored, client.data, task=Classify()))
        net = client.load(model)
        fit = client.fit(net, self.local, data, loss=guided_by_scores, given={"scores": trained, "pull": self.pull})
        return Pair(client.unload(net), trained, float(client.size), fit.loss)


def held_to_average(net: Net, batch: Batch, given: Given) -> Tensor:
    """The task's loss, and the distance between the network's features and those of its averaged weights."""
    inputs = batch.task.inputs(batch)
    with torch.no_grad():
        target = net(*inputs, give="features", params=given["average"])
    return batch.task.loss(net, batch) + 0.1 * batch.mean((net(*inputs, give="features") - target).square().mean(1))


@spec
class ToyAveraging(Algorithm):
    """Clients train towards a moving average of their weights, and use the gradient at their final weights."""

    local: Solver

    def round(self, server: Server, fed: Federation) -> Server:
        return Server(fed.mean(self.train, fed.clients, model=server.model).value.model)

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, loss=held_to_average, average=client.state.get("average"))
        client.state["average"] = fit.average
        gradient = client.gradient(net, client.data, batch=self.local.batch)
        return Update(model.holding(client.unload(net).params - 1e-3 * gradient), float(client.size), fit.loss)


@message
class Pulled(Server):
    """The global model, and the mean of the guides that clients have stored."""

    known: Params


@message
class Towards(Update):
    known: Annotated[Params, by_weight]


def pulled(grads, params, given):
    """The gradient of f(y) + |y - guide|^2 / 2."""
    return {k: g + params[k] - given["guide"][k] for k, g in grads.items()}


@spec
class ToyGuided(FedAvg):
    """Clients train towards a guide. Each client is sent one guide, once; every round has another guide."""

    def setup(self, model: Model, fed: Federation) -> Server:
        return Pulled(model, known=model.params.zeros())

    def round(self, server: Pulled, fed: Federation) -> Server:
        guide = server.model.params * (1 + fed.federated)
        u = fed.mean(self.train, fed.sample(self.cohort), model=server.model, guide=None, once={"guide": guide})
        assert set(u.heard) <= fed.has("guide")
        return Pulled(u.value.model, u.value.known)

    @on_client(covered=True)
    def train(self, client: Client, model: Model, guide: Params | None) -> Towards:
        if guide is not None:
            assert "guide" not in client.state, "it is sent until it is received, and not again"
            client.state["guide"] = guide
        net = client.load(model)
        fit = client.fit(net, self.local, client.data, direction=pulled, given={"guide": client.state["guide"]})
        return Towards(client.unload(net), self.weight(client), fit.loss, client.state["guide"])


@spec
class ToyScribbler(FedAvg):
    """Writes into the model that it received, in one of three ways."""

    how: str = "in place"

    @on_client(covered=True)
    def train(self, client: Client, model: Model) -> Update:
        tensor = model.params.tensors[0]
        if self.how == "in place":
            tensor.add_(1.0)
        elif self.how == "data":
            tensor.data.add_(1.0)
        else:
            tensor.numpy()[...] += 1.0
        return Update(model, 1.0, 0.0)


@spec
class ToyServerScribbler(FedAvg):
    """Averages into the server's state in place instead of returning a new one."""

    def round(self, server: Server, fed: Federation) -> Server:
        for _, update in fed.ask(self.train, fed.clients, model=server.model):
            server.model.params.tensors[0].lerp_(update.model.params.tensors[0], 0.5)
        return Server(server.model)


@spec
class ToyForgetful(FedAvg):
    """Asks all clients and consumes only one answer."""

    def round(self, server: Server, fed: Federation) -> Server:
        answers = fed.ask(self.train, fed.clients, model=server.model)
        return Server(next(answers)[1].model)


# the algorithms whose networks are classifiers
CLASSIFYING = (
    "ensemble",
    "dense",
    "nearest_mean",
    "feddifrc",
    "fed3r",
    "feddda",
    "fedproto",
    "fedproto_original",
    "fednh",
    "fedrcl",
    "fedrcl_guided",
)


def compares_views(algorithm: Algorithm) -> bool:
    """Whether an algorithm below needs views of images instead of labels: its guide, if any, knows no class."""
    guide = getattr(algorithm, "guide", None)
    return algorithm.name in ("fedema", "fedlid") or (isinstance(guide, Own) and not guide.network.conditional)


def toy_recipe(**changes) -> Recipe:
    """Three clients, two rounds, no sample grid. An algorithm of classifiers has one, whatever network is asked for."""
    values = {
        "data": ToyImages(),
        "clients": 3,
        "partition": Iid(),
        "model": ToyUnet(),
        "task": Denoise(schedule=Linear(steps=25)),
        "algorithm": FedAvg(local=Adam(lr=1e-2, batch=8, epochs=1)),
        "rounds": 2,
        "evaluate": Evaluate(grid=0),
        "threads": 1,
    }
    values |= changes
    if values["algorithm"].name in CLASSIFYING:
        evaluate = dataclasses.replace(values["evaluate"], grid=0, metrics=(Accuracy(),))
        network = {"nearest_mean": LinearClassifier(), "fednh": COSINE}.get(values["algorithm"].name, SMALL)
        values |= {"model": network, "task": Classify(), "sampler": None, "evaluate": evaluate}
    if compares_views(values["algorithm"]):
        evaluate = dataclasses.replace(values["evaluate"], grid=0, metrics=())
        values |= {"model": PROJECTED, "task": Views(area=0.5), "sampler": None, "evaluate": evaluate}
    return Recipe(**values)


SMALL = Cnn(widths=(4,), groups=2)
PROJECTED = Projected(encoder=SMALL, hidden=8, width=4)
COSINE = dataclasses.replace(SMALL, head="cosine")
ADAM = Adam(lr=1e-2, batch=8, epochs=1)
KEPT = Adam(lr=1e-2, batch=8, steps=2, state="kept")
SYNTHESIS = {"warmup": Adam(lr=1e-2, batch=8, steps=3, ema=0.5), "sampler": Ddim(batch=4, steps=2), "group": 2}
INVERSION = {
    "generator": DenseGenerator(batch=8, z=4, width=4),
    "synthesis": Adam(lr=1e-2, batch=8, steps=3, betas=(0.5, 0.999)),
    "inversion": Invert(padding=1),
}
AUTOENCODER = Cvae(widths=(4,), z=3, groups=2)
CVAES = {
    "warmup": Adam(lr=1e-2, batch=8, steps=3, ema=0.5),
    "generators": (AUTOENCODER,),
    "sampler": Decode(batch=4),
    "group": 2,
}
TOY_GUIDE, TOY_NOISE = ToyLabelled(width=16, dropout=0.0), Denoise(schedule=Linear(steps=25))
GUIDE = Own(network=TOY_GUIDE, stages=(0, 1), widths=(15, 1), task=TOY_NOISE)
DRAWN = {"guide": TOY_GUIDE, "task": TOY_NOISE, "sampler": Ddim(batch=4, steps=2), "n": 16, "share": 8, "group": 6}
GUIDE_DRAWS = {name: value for name, value in DRAWN.items() if name != "guide"}
# never satisfied, so that a run is as long as its rehearsal
TEST = QuickTest(every=1, size=4, encoder=Pixels(side=2), threshold=1e-9)
# every algorithm of the project, and the toy algorithms above
ALGORITHMS = {
    "fedavg": FedAvg(local=ADAM),
    "fedavg, uniform weights and part of the clients": FedAvg(local=ADAM, cohort=2, weights="uniform"),
    "fedavg, kept optimiser": FedAvg(local=Adam(lr=1e-2, batch=8, steps=3, state="kept", clip=0.5, schedule=CosineDecay())),
    "fedavgm": FedAvgM(local=ADAM, cohort=2),
    "fedadam": FedAdam(local=ADAM),
    "fedyogi, part of the clients": FedYogi(local=ADAM, cohort=2),
    "fedadagrad": FedAdagrad(local=ADAM),
    "fedprox": FedProx(local=SGD(lr=0.05, batch=8, epochs=1, momentum=0.9), mu=0.1),
    "moon": Moon(local=ADAM, cohort=2),
    "centralised": Centralised(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.9, state="kept")),
    "localonly": LocalOnly(local=ADAM),
    "feddiffuse, full": Full(local=ADAM),
    "feddiffuse, full, averaged over steps": Full(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.5, state="kept")),
    "feddiffuse, usplit": USplit(local=ADAM),
    "feddiffuse, usplit, part of the clients": USplit(local=ADAM, cohort=2),
    "feddiffuse, ulatdec": ULatDec(local=ADAM),
    "feddiffuse, udec": UDec(local=ADAM),
    "feddiffuse, udec, part of the clients": UDec(local=ADAM, cohort=2),
    "fedphd, pruned in the middle": FedPhD(local=KEPT, cohort=2, r_g=1, R_s=2, ratio=0.5, a=20.0),
    "fedphd, one-shot, with noise": FedPhD(
        local=ADAM, cohort=2, r_e=2, r_g=2, variant="os", ratio=0.5, a=2.0, normalised=True, histogram=Laplace(epsilon=1.0)
    ),
    "fedphd, never pruned, an edge fails": FedPhD(local=ADAM, cohort=None, r_g=1, variant="none", outages=((1, 0), (2, 1))),
    "scaffold, plain sgd and part of the clients": Scaffold(local=SGD(lr=0.05, batch=8, epochs=1), cohort=2),
    "scaffold, adam": Scaffold(local=ADAM),
    "scaffold, option I": Scaffold(local=ADAM, option="I", eta_g=0.5),
    "mofedsam, sgd": MoFedSAM(local=SGD(lr=0.05, batch=8, epochs=1, weight_decay=1e-3, clip=10.0), cohort=2),
    "mofedsam, adam": MoFedSAM(local=ADAM, rho=0.05),
    "fedddpm": FedDDPM(**SYNTHESIS, local=ADAM, central=ADAM),
    "fedddpm, parts, kept optimisers, one warm-up at a time": FedDDPM(
        **SYNTHESIS | {"group": 1}, local=KEPT, central=KEPT, cohort=2, part=0.5, share=0.5
    ),
    "fedddpm+": FedDDPMPlus(**SYNTHESIS, local=ADAM, central=ADAM, test=TEST),
    "aux only": AuxOnly(**SYNTHESIS, central=ADAM),
    "feddiff, two kinds of networks": FedDiff(
        **SYNTHESIS,
        generators=(ToyLabelled(dropout=0.0), ToyLabelled(width=2, dropout=0.0)),
        task=Denoise(schedule=Linear(steps=25)),
        central=KEPT,
        filter=Fmf(gamma=0.25, scope="client", noise=2.0),
        histogram=Gaussian(epsilon=1.0),
        least=1,
    ),
    "class means": ClassMeans(central=KEPT, noise=1.0),
    "nearest mean": NearestMean(noise=1.0),
    "fed3r": Fed3R(),
    "ensemble": OneShotEnsemble(local=ADAM),
    "ensemble, different networks, a majority": OneShotEnsemble(
        local=ADAM, networks=(ToyScores(), SMALL, Cnn(widths=(2,), norm="batch")), vote="majority"
    ),
    "dense": Dense(**INVERSION, local=ADAM, central=Adam(lr=1e-3, batch=8, epochs=1, state="kept")),
    "dense, different networks": Dense(
        **INVERSION, local=ADAM, central=ADAM, networks=(ToyScores(), Cnn(widths=(2,), norm="batch")), adv=0.5, T=4.0
    ),
    "fedcvae": FedCVAE(**CVAES, central=KEPT, share=0.5),
    "fedcvae, distilled, different networks, with noise": FedCVAE(
        **CVAES | {"generators": (AUTOENCODER, Cvae(widths=(2, 4), z=3, groups=2))},
        variant="kd",
        central=ADAM,
        distillation=ADAM,
        histogram=Laplace(epsilon=1.0),
    ),
    "feddifrc, class vectors": FedDifRC(local=ADAM, guide=Vectors(), U="none", distance="l2"),
    "feddifrc, principal axes of an untrained guide": FedDifRC(local=ADAM, guide=GUIDE, t=3),
    "feddifrc, its condition refreshed, part of the clients": FedDifRC(
        local=KEPT, cohort=2, guide=dataclasses.replace(GUIDE, reduce="random", image="other", label="null"), t=3, refresh=1
    ),
    "feddifrc, a bank, the other stage": FedDifRC(
        local=ADAM,
        guide=Own(network=TOY_GUIDE, stages=(0,), reduce="random", pool="l2", task=TOY_NOISE),
        t=3,
        U="round",
        distance="kl",
    ),
    "feddifrc, an encoder": FedDifRC(local=ADAM, guide=Encoder(network=SMALL), tdcl=0.0),
    "feddifrc, without labels": FedDifRC(
        local=ADAM, cohort=2, guide=dataclasses.replace(GUIDE, network=ToyUnet(width=16, dropout=0.0)), t=3
    ),
    "fedema": FedEMA(local=SGD(lr=0.05, batch=8, epochs=1, momentum=0.9, ema=0.9, ragged="drop")),
    "fedema, part of the clients": FedEMA(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.5, state="kept"), cohort=2),
    "fedlid": FedLID(local=ADAM, T=0.2),
    "feddda": FedDDA(local=ADAM, **DRAWN, cohort=2),
    "feddda, what a client lacks, filtered": FedDDA(local=KEPT, **DRAWN | {"group": 16}, deal="add_lack", filter=1),
    "fedproto, by images, part of the clients": FedProto(local=ADAM, cohort=2, means="size"),
    "fedproto, models of their own": FedProtoOriginal(local=ADAM),
    "fednh, part of the clients": FedNH(local=ADAM, cohort=2, rho=0.5),
    "feddisco": FedDisco(local=ADAM),
    "feddisco, part of the clients, with noise": FedDisco(local=ADAM, cohort=2, a=1.0, histogram=Gaussian(epsilon=1.0)),
    "fedcda, part of the clients": FedCDA(local=ADAM, cohort=2, cache=2, batches=100, warmup=1),
    "fedrcl": FedRCL(local=ADAM, near=0.5),
    "fedrcl with drawn images": FedRCLGuided(local=ADAM, near=0.5, draws=DRAWN["guide"], **GUIDE_DRAWS),
    "fedrcl held to a guide": FedRCLGuided(local=ADAM, near=0.5, guide=GUIDE, t=3),
    "fedrcl with both, part of the clients": FedRCLGuided(
        local=KEPT, near=0.5, cohort=2, draws=DRAWN["guide"], guide=GUIDE, t=3, **GUIDE_DRAWS
    ),
    "localaug": LocalAug(**SYNTHESIS, local=ADAM, cohort=2),
    "fedavg, krum": FedAvg(local=ADAM, aggregate=Krum(f=0)),
    "scaffold, trimmed means": Scaffold(local=ADAM, aggregate=Trimmed(share=0.3)),
    "scaffold, clipped": Scaffold(local=ADAM, cohort=2, aggregate=Clipped(norm=0.05)),
    "feddiffuse, udec, median, part of the clients": UDec(local=ADAM, cohort=2, aggregate=Median()),
    "feddiffuse, ulatdec, clipped": ULatDec(local=ADAM, aggregate=Clipped(norm=0.05)),
    "sent once": ToyGuided(local=ADAM, cohort=2),
    "client state": ToyStateful(local=ADAM, cohort=2),
    "asks twice": ToyAsksTwice(local=ADAM, cohort=2),
    "two tasks in one job": ToyTwoTasks(local=Adam(lr=1e-2, batch=8, steps=3, state="kept")),
    "a frozen network and columns": ToyTwoTasks(local=ADAM, pull=0.5),
    "a loss that looks at the average": ToyAveraging(local=Adam(lr=1e-2, batch=8, epochs=1, ema=0.5)),
}
