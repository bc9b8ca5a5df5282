"""FedDiff: Mendieta, Sun and Chen, 2024: one-shot federated learning with diffusion models, and its Fourier filter."""

import dataclasses
from typing import Any

from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from effuse.algorithms.shared.central_images import CentralImages
from effuse.algorithms.shared.correcting import Correcting
from effuse.algorithms.shared.filters import Everything, Filter
from effuse.algorithms.shared.synthesis import AuxiliarySet, SynthesisServer, Upload, WarmUpReport
from effuse.core.algorithm import Trained
from effuse.core.capabilities import Discloses
from effuse.core.model import Arch, Net
from effuse.core.prelude import Client, Federation, Model, RecipeError, Server, message, on_client, spec
from effuse.core.recipe import Recipe
from effuse.core.task import Task
from effuse.privacy.histogram import Disclosure, Exact
from effuse.tasks.denoise import Denoise


@message(name="feddiff.server")
class FedDiffServer(SynthesisServer):
    """The classifier, the synthetic set G, and what each client told for the filter."""

    told: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@message(name="feddiff.generator")
class FedDiffUpload(Upload):
    """A client's generator and label histogram, and what the filter needs: M, the mean Fourier magnitudes."""

    described: Tensor | None


@spec
class FedDiff(Correcting, Discloses, name="feddiff"):
    """Clients train and send a generator once. The server draws labelled images, filters them, and trains a classifier.

    A round is one pass of `central` over the synthetic set G, so the recipe's rounds are the server's epochs.
    """

    generators: tuple[Arch, ...]  # client k trains the k-th of them, in turn; all are class-conditional
    task: Task = Denoise(drop=0.1)  # of the generators
    share: PositiveFloat = 1.0  # images drawn for each real one: |z_c| = n_c
    filter: Filter = Everything()
    histogram: Disclosure = Exact()  # of a client's labels
    least: PositiveInt = 32  # a client with fewer images does not train, and nothing is drawn for it
    central_images: CentralImages | None = None  # train on noisy means of each class first

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.generators or not all(arch.conditional for arch in self.generators):
            raise RecipeError("algorithm.generators: name at least one network; each must be conditional=True")

    def trains(self, recipe: Recipe) -> list[Trained]:
        local = [Trained(arch, self.task, self.warmup) for arch in self.generators]
        return [*local, Trained(recipe.model, recipe.task, self.central)]

    def drawn_from(self, recipe: Recipe) -> list[tuple[Arch, Task]]:
        return [(arch, self.task) for arch in self.generators]

    def generator(self, client: int, model: Arch) -> Arch:
        return self.generators[client % len(self.generators)]

    def objective(self) -> Task:
        return self.task

    def setup(self, model: Model, fed: Federation) -> FedDiffServer:
        start = super().setup(model, fed)
        return FedDiffServer(model, phase=start.phase, pending=start.pending)

    def round(self, server: FedDiffServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        return dataclasses.replace(server, model=self.corrected(server.model, server, fed, report=True))

    @on_client
    def warm_up(self, client: Client, arch: Arch) -> WarmUpReport:
        return super().warm_up(client, arch) if client.size >= self.least else WarmUpReport(0.0, None)

    def begun(self, client: Client, arch: Arch) -> Net:
        net = super().begun(client, arch)
        if self.central_images is not None:
            self.central_images.train(net, client, self.task)
        return net

    def counts(self, client: Client) -> list[int]:
        return [round(n) for n in self.histogram.of(client, client.stream("histogram"))]

    @on_client
    def upload(self, client: Client) -> FedDiffUpload:
        sent = super().upload(client)
        return FedDiffUpload(sent.model, sent.size, sent.histogram, self.filter.described(client))

    def noting(self, server: SynthesisServer, client: int, upload: Upload) -> SynthesisServer:
        assert isinstance(server, FedDiffServer) and isinstance(upload, FedDiffUpload)
        if upload.described is None:
            return server
        return dataclasses.replace(server, told=server.told | {client: upload.described})

    def selected(self, auxiliary: AuxiliarySet, server: SynthesisServer, fed: Federation) -> AuxiliarySet:
        assert isinstance(server, FedDiffServer)
        rows = self.filter.kept(auxiliary, server.told, server.model, fed)
        fed.note(filter={"drawn": len(auxiliary), "kept": len(rows)})
        return auxiliary.rows(rows)

    def spent(self, server: Server) -> dict[str, Any] | None:
        charge = self.histogram.charge
        if charge is None:
            return None
        return {"histogram": {"mechanism": str(self.histogram), "epsilon": charge[0], "delta": charge[1], "times": 1}}
