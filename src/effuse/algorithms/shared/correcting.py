"""Training at the server, on images that it drew from clients' models."""

import torch

from effuse.algorithms.shared.synthesis import Fraction, Synthesising, SynthesisServer
from effuse.core.prelude import Federation, Model, Solver, spec


@spec
class Correcting(Synthesising):
    """The server trains on its auxiliary set A."""

    central: Solver  # E passes over A with the step eta
    # of A that a correction sees, drawn for each; 1: A is fixed before training, as in the listing
    part: Fraction = 1.0

    def corrected(self, w: Model, server: SynthesisServer, fed: Federation, report: bool = False) -> Model:
        """The model after the server's own passes over A; `report` makes their loss that of the round."""
        bench, A = fed.workbench, server.A
        if self.part < 1.0:
            chosen = bench.stream("part").numpy().permutation(len(A))[: max(1, round(self.part * len(A)))]
            A = A.rows(torch.from_numpy(chosen))
        net = bench.load(w)
        fit = bench.fit(net, self.central, A.shard(w.arch.shape.classes, bench.machine.device))
        fed.note(correction={"loss": fit.loss, "images": fit.images})
        if report:
            fed.report_loss(fit.loss, fit.images)
        model = bench.unload(net)
        return model if fit.average is None else model.holding(fit.average)
