"""Measure FedDifRC's speed: training of classifiers, extraction of a guide's features, and the share of looking in a run.

    python benchmarks/guided.py [--quick] [--json] [--clients 10] [--images 5000]

Training is of ResNet-10 with a projection to 512, batches of 64, by FedAvg's loss and by FedDifRC's:

plain    the loop of public code: eager fp32, a DataLoader that moves and mirrors images, a deep-copied model per client
eager    effuse's reference
graph    effuse with a recorded step (on a GPU only); `captures` counts recordings, which must not grow with the clients
slots    the same with several clients at a time

Extraction is of the 9 M guide's decoder stages, images a second of one pass each. A client needs a pass for each class and
one more for the noisy image. The share of looking is that of a run of 40 rounds of 5 epochs.
"""

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from throughput import AS_TORCH_STARTS, rate, synthetic
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from effuse.algorithms.feddifrc import guided
from effuse.algorithms.shared.guide_math import denoised
from effuse.core.data import Shape, Shard
from effuse.core.fit import Work
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.core.solvers import SGD
from effuse.fast.graph.captured import Captured
from effuse.machines.eager import Eager
from effuse.models.resnet import Cnn, Resnet
from effuse.models.unet import DigitsUnet, Unet
from effuse.tasks.classify import Classify
from effuse.tasks.denoise import Denoise
from effuse.transport.slots import in_slots

BATCH, WIDTH, CLASSES = 64, 512, 10
ROUNDS, EPOCHS = 40, 5
LOCAL = SGD(lr=0.01, momentum=0.9, weight_decay=1e-5, batch=BATCH, epochs=1)
GIVEN = {"tdcl": 1.0, "tau": 0.06, "unit": 1.0}


def networks(quick: bool) -> tuple[Arch, Arch]:
    """The classifier and the guide; on digits with --quick."""
    shape = Shape(8, 1, CLASSES) if quick else Shape(32, 3, CLASSES)
    if quick:
        return Cnn(projection=WIDTH).resolved(shape), DigitsUnet().resolved(shape)
    guide = Unet(widths=(64, 128, 128, 128), conditional=True)
    return Resnet(blocks=(1, 1, 1, 1), projection=WIDTH).resolved(shape), guide.resolved(shape)


def plain(arch: Arch, device: torch.device, clients: int, n: int) -> Callable[[], int]:
    """The loop of public code, without a guide."""
    data = synthetic(arch, n, torch.device("cpu"))
    loader = DataLoader(TensorDataset(data.floats(data.images), data.labels), BATCH, shuffle=True)
    server = arch.build().to(device)
    pad = nn.ZeroPad2d(4)

    @AS_TORCH_STARTS
    def round() -> int:
        for _ in range(clients):
            net = copy.deepcopy(server)
            optimiser = torch.optim.SGD(net.parameters(), 0.01, 0.9, weight_decay=1e-5)
            for x, y in loader:
                down, right = torch.randint(0, 9, (2,)).tolist()
                x = pad(x)[..., down : down + arch.shape.side, right : right + arch.shape.side]
                x = x.flip(-1) if torch.rand(()) < 0.5 else x
                loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                loss.item()
        return clients * n

    return round


def ours(machines: Sequence[Eager], arch: Arch, clients: int, n: int, held: bool) -> Callable[[], int]:
    """The loop of the simulator, with FedAvg's loss or held to features in columns."""
    shard = Shard.whole(dataclasses.replace(synthetic(arch, n, machines[0].device), flip=True, shift=4))
    if held:
        H = torch.randn(n, WIDTH).half()
        shard = shard.with_columns(H=H, F=torch.randn(n, CLASSES, WIDTH).half())
    model = arch.initial(Stream((0,))).to(machines[0].device)
    more: dict[str, Any] = {"loss": guided, "given": GIVEN} if held else {}

    def one(machine: Eager, k: int) -> int:
        machine.release(k)
        net = machine.load(model, k)
        work = Work(solver=LOCAL, task=Classify(), shard=shard, lr=0.01, stream=Stream((k,)), place=k, where="", **more)
        return machine.fit(net, work)[0].images

    return lambda: sum(images for _, images in in_slots(one, range(clients), machines, [m.stream for m in machines]))


def looking(machine: Eager, guide: Arch, n: int) -> Callable[[], int]:
    """One pass of every image through the guide, under the null label."""
    shard = Shard.whole(synthetic(guide, n, machine.device))
    shard = shard.with_columns(labels=torch.full_like(shard.labels, -1))
    model = guide.initial(Stream((0,))).to(machine.device)
    stages = 0 if guide.name == "digits_unet" else 2
    given = {"t": torch.tensor(0), "a": 1.0, "s": 0.0, **{f"stage{k}": 1.0 for k in range(stages, stages + 3)}}

    def look() -> int:
        net = machine.load(model, None).eval()
        return len(machine.apply(net, denoised, Denoise(), shard, given, Stream((1,))))

    return look


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="digits, few images")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=5000, help="of each client; by default a tenth of CIFAR-10")
    parser.add_argument("--slots", type=int, default=5, help="clients at a time in the variant `slots`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, clients, n = torch.device(arguments.device), arguments.clients, arguments.images
    torch.set_num_threads(1)
    arch, guide = networks(arguments.quick)
    machines: dict[str, list[Eager]] = {"eager": [Eager(device)]}
    if device.type == "cuda":
        machines |= {"graph": [Captured(device)], "slots": [Captured(device) for _ in range(arguments.slots)]}
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        if not arguments.json:
            print("  ".join(f"{k} {f'{v:,.2f}' if isinstance(v, float) else v}" for k, v in row.items()), flush=True)

    note({"what": "train", "variant": "plain", "held": False, **rate(plain(arch, device, clients, n), device, 1)})
    for variant, some in machines.items():
        for held in (False, True):
            speed = rate(ours(some, arch, clients, n, held), device, 1)
            captures = {"captures": [m.captures for m in some]} if device.type == "cuda" else {}  # type: ignore[attr-defined]
            note({"what": "train", "variant": variant, "held": held, **speed, **captures})
    note({"what": "extract", "variant": "eager", **rate(looking(machines["eager"][0], guide, n), device, 1)})
    fastest = max(row["per_second"] for row in rows if row.get("held"))
    seconds = (CLASSES + 1) / rows[-1]["per_second"], ROUNDS * EPOCHS / fastest
    note({"what": "share of looking", "of_a_run": seconds[0] / sum(seconds)})
    if arguments.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "clients": clients, "images": n, "rows": rows}))


if __name__ == "__main__":
    main()
