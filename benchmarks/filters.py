"""Does FedDiff's filter help? The images of one finished run, filtered in several ways, each followed by a new classifier.

    effuse run 'feddiff.digits' --set 'algorithm.filter=fmf(gamma=0.0)' --out RUN
    python benchmarks/filters.py RUN [--gammas 0.01 0.05 0.1] [--seeds 3] [--quick] [--json]

The run keeps all images (gamma 0) and what the clients told. Every rule sees the same images. "random" removes as many at
random, and "oracle" keeps what a classifier of the real images recognises. Accuracy is that of the last epoch on the test
images, over classifiers that differ in their first weights and the order of images.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from effuse.algorithms.feddiff import FedDiff, FedDiffServer
from effuse.algorithms.shared.filters import AtRandom, Everything, Filter, Fmf, Oracle
from effuse.algorithms.shared.synthesis import AuxiliarySet
from effuse.core.data import Dataset, Shard
from effuse.core.recipe import Recipe, read_manifest
from effuse.core.rng import Stream
from effuse.core.workbench import SERVER, Workbench
from effuse.fast import machines_for
from effuse.runs.folder import RunFolder
from effuse.tasks.classify import Classify
from effuse.transport.device import pick_device


class Kept:
    """As much of a federation as a filter uses."""

    rehearsing = False

    def __init__(self, recipe: Recipe, bench: Workbench, train: Dataset) -> None:
        self.workbench, self.shards = bench, recipe.shards(train)

    def unprotected_pool(self, purpose: str) -> Shard:
        return Shard(self.shards[0].dataset, torch.cat([s.rows for s in self.shards]).sort().values)


def accuracy(recipe: Recipe, bench: Workbench, images: AuxiliarySet, test: Dataset, epochs: int, seed: int) -> float:
    """The share of test images that a classifier trained on these images recognises."""
    bench.begin(Stream((seed, 0, "filters")), 0)
    bench.state = {}
    net = bench.load(bench.initial(recipe.model))
    data = images.shard(recipe.model.shape.classes, bench.machine.device)
    for _ in range(epochs):
        bench.fit(net, recipe.algorithm.central, data, task=Classify())
    net.eval()
    right = 0
    with torch.no_grad():
        for pixels, labels in zip(test.images.split(500), test.labels.split(500)):
            right += int((net(test.floats(pixels)).argmax(1) == labels).sum())
    return right / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--gammas", type=float, nargs="+", default=[0.01, 0.05, 0.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, one gamma, one epoch")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.gammas, options.seeds = options.gammas[:1], 1
    recipe = Recipe.restore(read_manifest(options.run)["recipe"])
    server = RunFolder(options.run).load_checkpoint().server
    assert isinstance(server, FedDiffServer) and isinstance(recipe.algorithm, FedDiff)
    if not server.told:
        raise SystemExit(f"{options.run}: its clients told no magnitudes; run it with filter=fmf(gamma=0.0)")
    device = pick_device("auto")
    torch.set_num_threads(recipe.threads)
    train, test = (recipe.data.load(split).to(device) for split in ("train", "test"))
    bench = Workbench(machines_for(recipe, device, len(train))[0], recipe.task, recipe.rounds, SERVER)
    bench.begin(Stream((recipe.seed, 0, "filters")), 0)
    fed, told = Kept(recipe, bench, train), {k: v.cpu() for k, v in server.told.items()}
    rules: dict[str, Filter] = {"everything": Everything()}
    for gamma in options.gammas:
        rules |= {f"fmf {gamma:g}": Fmf(gamma=gamma), f"fmf without dc {gamma:g}": Fmf(gamma=gamma, dc=False)}
        rules |= {f"fmf by client {gamma:g}": Fmf(gamma=gamma, scope="client"), f"random {gamma:g}": AtRandom(gamma=gamma)}
    if recipe.budget is None:
        rules["oracle"] = Oracle()
    rows = []
    for name, rule in rules.items():
        kept = server.A.rows(rule.kept(server.A, told, bench.initial(recipe.model), fed))
        epochs = 1 if options.quick else recipe.rounds
        found = [accuracy(recipe, bench, kept, test, epochs, seed) for seed in range(options.seeds)]
        rows.append({"rule": name, "images": len(kept), "accuracy": statistics.fmean(found), "each": found})
        if not options.json:
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            print(f"{name:24} {len(kept):6} images  {100 * rows[-1]['accuracy']:.2f} ± {100 * spread:.2f} %", flush=True)
    if options.json:
        print(json.dumps({"run": str(options.run), "rows": rows}))


if __name__ == "__main__":
    main()
