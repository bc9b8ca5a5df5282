"""FedCVAE: Heinbaugh, Luz-Ricca and Shao, 2023: one-shot federated learning with conditional variational autoencoders."""

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from effuse.algorithms.shared.one_shot import OneShotGenerators
from effuse.algorithms.shared.synthesis import (
    NOBODY,
    AuxiliarySet,
    SynthesisServer,
    Upload,
    as_bytes,
    synthesised,
    together,
)
from effuse.core.metric import Images
from effuse.core.model import Net
from effuse.core.prelude import (
    FEDERATE,
    Client,
    Federation,
    Given,
    Model,
    RecipeError,
    Server,
    Solver,
    message,
    on_client,
    spec,
)
from effuse.core.task import Batch
from effuse.diffusion.decode import Decode
from effuse.models.cvae import Cvae, decoder_of
from effuse.tasks.reconstruct import Reconstruct, distance, images_of

DISTILLATION = "distillation"  # the phase in which one decoder learns from the clients'


@message(name="fedcvae.server")
class FedCVAEServer(SynthesisServer):
    """The classifier, the images, and for `kd` the clients' decoders until these are distilled."""

    decoders: dict[int, Model] = dataclasses.field(default_factory=dict)


def decoded(net: Net, batch: Batch, given: Given) -> Tensor:
    return images_of(net(batch.columns["z"], None, batch.labels))


def imitated(net: Net, batch: Batch, given: Given) -> Tensor:
    """The distance to what a client's decoder made of the same z and label."""
    return batch.mean(distance(net(batch.columns["z"], None, batch.labels), batch.x))


@spec
class FedCVAE(OneShotGenerators, name="fedcvae"):
    """Clients train an autoencoder and send its decoder once. The server draws labelled images and trains a classifier.

    A round is one pass of `central` over these images, so the recipe's rounds are the server's epochs.
    """

    variant: Literal["ens", "kd"] = "ens"  # images from every client's decoder, or from one that has learnt from them all
    generators: tuple[Cvae, ...] = (Cvae(),)  # client k trains the k-th of them, in turn
    task: Reconstruct = Reconstruct()  # of the generators
    sampler: Decode = Decode()
    distillation: Solver | None = None  # kd: of the server's decoder, which is built like the first of `generators`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.generators or any(arch.only for arch in self.generators):
            raise RecipeError("algorithm.generators: name at least one autoencoder, each with its encoder (only=None)")
        if (self.variant == "kd") != (self.distillation is not None):
            raise RecipeError("algorithm.distillation: the solver of variant=kd, which needs one, and of no other variant")
        if self.variant == "kd" and (self.real or len({arch.z for arch in self.generators}) > 1):
            raise RecipeError("algorithm.variant: kd joins decoders with one length of z, and real images come from none")

    @property
    def then(self) -> str:
        return DISTILLATION if self.variant == "kd" else FEDERATE

    def setup(self, model: Model, fed: Federation) -> FedCVAEServer:
        start = super().setup(model, fed)
        return FedCVAEServer(model, phase=start.phase, pending=start.pending)

    def round(self, server: FedCVAEServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        if server.phase == DISTILLATION and server.auxiliary is not None:
            return dataclasses.replace(server, auxiliary=self.distilled(server, fed), decoders={}, phase=FEDERATE)
        return dataclasses.replace(server, model=self.trained(server, fed))

    @on_client(covered=True)
    def upload(self, client: Client) -> Upload:
        sent = super().upload(client)
        return dataclasses.replace(sent, model=decoder_of(sent.model))

    def noting(self, server: SynthesisServer, client: int, upload: Upload) -> SynthesisServer:
        assert isinstance(server, FedCVAEServer)
        kept = {client: upload.model} if self.variant == "kd" else {}
        return dataclasses.replace(server, decoders=server.decoders | kept)

    def distilled(self, server: FedCVAEServer, fed: Federation) -> AuxiliarySet:
        """Images of all classes alike, from a decoder that maps z and y to what the clients' decoders make of them."""
        assert self.distillation is not None
        bench, A, classes = fed.workbench, server.A, server.model.arch.shape.classes
        device, length = bench.machine.device, self.generators[0].z
        taught: list[AuxiliarySet] = []
        inputs: list[Tensor] = []
        for client, decoder in server.decoders.items():
            part = A.rows(A.origin == client)  # for its labels: as many of each class as the client's share
            if not len(part):
                continue
            inputs.append(self.sampler.noise((len(part), length), bench.stream("z").torch()).to(device))
            data = part.shard(classes, device).with_columns(z=inputs[-1])
            made = bench.apply(bench.load(decoder), decoded, data, task=self.task)
            taught.append(dataclasses.replace(part, pixels=as_bytes(Images(made))))
        first = decoder_of(bench.initial(self.generators[0]))
        net, data = bench.load(first), together(taught).shard(classes, device).with_columns(z=torch.cat(inputs))
        fit = bench.fit(net, self.distillation, data, task=self.task, loss=imitated)
        fed.note(distillation={"loss": fit.loss, "images": fit.images})
        model = bench.unload(net)
        model = model if fit.average is None else model.holding(fit.average)
        return synthesised(bench, NOBODY, model, len(A), self.sampler, [1] * classes, self.task)
