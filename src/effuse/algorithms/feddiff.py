"""FedDiff: Mendieta, Sun and Chen, 2024: one-shot federated learning with diffusion models, and its Fourier filter."""

import dataclasses

from pydantic import PositiveInt
from torch import Tensor

from effuse.algorithms.shared.central_images import CentralImages
from effuse.algorithms.shared.filters import Everything, Filter
from effuse.algorithms.shared.one_shot import OneShotGenerators
from effuse.algorithms.shared.synthesis import AuxiliarySet, SynthesisServer, Upload
from effuse.core.model import Arch, Net
from effuse.core.prelude import Client, Federation, Model, RecipeError, Server, message, on_client, spec
from effuse.core.task import Task
from effuse.tasks.denoise import Denoise


@message(name="feddiff.server")
class FedDiffServer(SynthesisServer):
    """The classifier, the synthetic set G, what each client told for the filter, and its generator if these are kept."""

    told: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    generators: dict[int, Model] = dataclasses.field(default_factory=dict)


@message(name="feddiff.generator")
class FedDiffUpload(Upload):
    """A client's generator and label histogram, and what the filter needs: M, the mean Fourier magnitudes."""

    described: Tensor | None


@spec
class FedDiff(OneShotGenerators, name="feddiff"):
    """Clients train and send a generator once. The server draws labelled images, filters them, and trains a classifier.

    A round is one pass of `central` over the synthetic set G, so the recipe's rounds are the server's epochs.
    """

    generators: tuple[Arch, ...]  # class-conditional; client k trains the k-th of them, in turn
    task: Task = Denoise(drop=0.1)  # of the generators
    least: PositiveInt = 32  # a client with fewer images does not train, and nothing is drawn for it
    filter: Filter = Everything()
    central_images: CentralImages | None = None  # train on noisy means of each class first
    keep: bool = False  # the clients' generators stay in the server's state, for `effuse audit`

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.generators or not all(arch.conditional for arch in self.generators):
            raise RecipeError("algorithm.generators: name at least one network; each must be conditional=True")

    def setup(self, model: Model, fed: Federation) -> FedDiffServer:
        start = super().setup(model, fed)
        return FedDiffServer(model, phase=start.phase, pending=start.pending)

    def round(self, server: FedDiffServer, fed: Federation) -> Server:
        if self.prepares(server):
            return self.prepare(server, fed)
        return dataclasses.replace(server, model=self.trained(server, fed))

    def begun(self, client: Client, arch: Arch) -> Net:
        net = super().begun(client, arch)
        if self.central_images is not None:
            self.central_images.train(net, client, self.task)
        return net

    @on_client(covered=True)
    def upload(self, client: Client) -> FedDiffUpload:
        sent = super().upload(client)
        return FedDiffUpload(sent.model, sent.size, sent.histogram, self.filter.described(client))

    def noting(self, server: SynthesisServer, client: int, upload: Upload) -> SynthesisServer:
        assert isinstance(server, FedDiffServer) and isinstance(upload, FedDiffUpload)
        told = {} if upload.described is None else {client: upload.described}
        kept = {client: upload.model} if self.keep else {}
        return dataclasses.replace(server, told=server.told | told, generators=server.generators | kept)

    def selected(self, auxiliary: AuxiliarySet, server: SynthesisServer, fed: Federation) -> AuxiliarySet:
        assert isinstance(server, FedDiffServer)
        rows = self.filter.kept(auxiliary, server.told, server.model, fed)
        fed.note(filter={"drawn": len(auxiliary), "kept": len(rows)})
        return auxiliary.rows(rows)
