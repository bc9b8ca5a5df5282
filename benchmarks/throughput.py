"""Compare training and sampling speed: two plain loops, effuse eager, effuse fast.

    python benchmarks/throughput.py [--quick] [--json] [--only digits|3M|36M|20M|9M|5M] [--clients 1,5,20] [--where 20]

plain    the loop of public code: eager fp32, a DataLoader, a deep-copied model per client
strong   an optimised loop: bf16 autocast (fp32 convolutions in TF32), cuDNN's trials, channels-last, torch.compile,
         fused Adam, data on the device
eager    effuse's reference
graph    effuse with a recorded step
unfused  effuse with a recorded and compiled step, without its own kernels
compile  the same with its own kernels
slots    the same with several clients at a time

The arithmetic floor counts three forward passes per image (one forward, twice that backward) at the measured matrix rate.
Training is the best of two rounds after a first one. Ratios are to the plain and the strong loop of the same call.
`--where` lists the operations (on a GPU, the kernels) that take most of a training step.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import networks
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import Work
from effuse.core.model import Arch
from effuse.core.rng import Stream
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ancestral
from effuse.fast.graph.captured import KERNELS, Captured
from effuse.machines.eager import Eager
from effuse.metrics.cost import macs
from effuse.models.unet import DigitsUnet
from effuse.tasks.denoise import Denoise
from effuse.transport.slots import in_slots

BATCH = 128
ARCHS: dict[str, Arch] = {"digits": DigitsUnet().resolved(Shape(8, 1, 10)), **networks.ARCHS}
TASK = Denoise()
LOOPS = ("plain", "strong")  # the baselines of the ratios
# effuse's machines need bitwise reproducible gradients of cuDNN, other loops do not
AS_TORCH_STARTS = torch.backends.cudnn.flags(enabled=True, allow_tf32=True)
AS_TUNED = torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True)


def synthetic(arch: Arch, n: int, device: torch.device) -> Dataset:
    shape = arch.shape
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, shape.channels, shape.side, shape.side), dtype=torch.uint8, generator=generator)
    return Dataset(images, torch.randint(0, 10, (n,), generator=generator), tuple("0123456789")).to(device)


def alpha_bar(device: torch.device) -> torch.Tensor:
    return torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0).to(device)


def loss_of(net: Callable[..., torch.Tensor], x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    t = torch.randint(0, 1000, (len(x),), device=x.device)
    noise = torch.randn_like(x)
    a = table[t][:, None, None, None]
    return nn.functional.mse_loss(net(a.sqrt() * x + (1 - a).sqrt() * noise, t, None).float(), noise)


def plain(arch: Arch, device: torch.device, clients: int, steps: int) -> Callable[[], int]:
    """The loop of public code."""
    data = synthetic(arch, BATCH * steps, torch.device("cpu"))
    loader = DataLoader(TensorDataset(data.floats(data.images)), BATCH, shuffle=True)
    table = alpha_bar(device)
    server = arch.build().to(device)

    @AS_TORCH_STARTS
    def round() -> int:
        for _ in range(clients):
            net = copy.deepcopy(server)
            optimiser = torch.optim.Adam(net.parameters(), 1e-4)
            for (x,) in loader:
                loss = loss_of(net, x.to(device), table)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                loss.item()
        return clients * steps * BATCH

    return round


def strong(arch: Arch, device: torch.device, clients: int, steps: int) -> Callable[[], int]:
    """The same loop, optimised."""
    data = synthetic(arch, BATCH * steps, device)
    images = data.floats(data.images).contiguous(memory_format=torch.channels_last)
    table = alpha_bar(device)
    server = arch.build().to(device)
    net = arch.build().to(device, memory_format=torch.channels_last)
    run = torch.compile(net, dynamic=False)
    optimiser = torch.optim.Adam(net.parameters(), 1e-4, fused=True)

    @AS_TUNED
    def round() -> int:
        for _ in range(clients):
            net.load_state_dict(server.state_dict())
            optimiser.state.clear()
            for rows in torch.randperm(len(images), device=device).split(BATCH):
                with torch.autocast(device.type, torch.bfloat16):
                    loss = loss_of(run, images[rows], table)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        return clients * steps * BATCH

    return round


def ours(machines: Sequence[Eager], arch: Arch, clients: int, steps: int) -> Callable[[], int]:
    """The loop of the simulator; it trains as many clients at a time as there are machines."""
    data = synthetic(arch, BATCH * steps, machines[0].device)
    model = arch.initial(Stream((0,))).to(machines[0].device)
    solver = Adam(lr=1e-4, batch=BATCH, epochs=1)

    def one(machine: Eager, k: int) -> int:
        machine.release(k)
        net = machine.load(model, k)
        work = Work(solver=solver, task=TASK, shard=Shard.whole(data), lr=1e-4, stream=Stream((k,)), place=k, where="")
        return machine.fit(net, work)[0].images

    return lambda: sum(images for _, images in in_slots(one, range(clients), machines, [m.stream for m in machines]))


def sampling(machine: Eager, arch: Arch, n: int, steps: int) -> Callable[[], int]:
    model = arch.initial(Stream((0,))).to(machine.device)
    sampler = Ancestral(batch=n, steps=steps)

    def draw() -> int:
        machine.release(None)
        machine.generate(machine.load(model, None), TASK, n, sampler, None, Stream((1,)))
        return n * steps

    return draw


def drawing(arch: Arch, device: torch.device, n: int, steps: int, careful: bool) -> Callable[[], int]:
    """A loop over ancestral steps without effuse: eager fp32, or a `careful` one in bf16, channels-last and compiled."""
    net: Any = arch.build().to(device).eval()
    if careful:
        net = torch.compile(net.to(memory_format=torch.channels_last), dynamic=False)
    bar = alpha_bar(device)
    alpha = bar / torch.cat([bar.new_ones(1), bar[:-1]])
    shape = (n, arch.shape.channels, arch.shape.side, arch.shape.side)

    @torch.no_grad()
    @(AS_TUNED if careful else AS_TORCH_STARTS)
    def draw() -> int:
        x = torch.randn(shape, device=device)
        for t in range(steps - 1, -1, -1):
            with torch.autocast(device.type, torch.bfloat16, enabled=careful):
                noise = net(x, torch.full((n,), t, device=device), None).float()
            x = (x - (1 - alpha[t]) / (1 - bar[t]).sqrt() * noise) / alpha[t].sqrt() + (
                1 - alpha[t]
            ).sqrt() * torch.randn_like(x)
        return n * steps

    return draw


def rate(work: Callable[[], int], device: torch.device, repeat: int) -> dict[str, float]:
    """Items per second, the best of `repeat` calls, and the seconds of the first call."""
    began = time.perf_counter()
    work()
    _wait(device)
    first = time.perf_counter() - began
    best = 0.0
    for _ in range(repeat):
        began = time.perf_counter()
        done = work()
        _wait(device)
        best = max(best, done / (time.perf_counter() - began))
    return {"per_second": best, "first_call_seconds": first}


def where(work: Callable[[], int], device: torch.device, steps: int) -> list[dict[str, Any]]:
    """The operations of a step with their milliseconds and counts, the longest first; those of several slots overlap."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        _wait(device)
    found = [
        {
            "ms": (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / steps / 1e3,
            "times": e.count / steps,
            "name": e.key,
        }
        for e in profiler.key_averages()
    ]
    return sorted(found, key=lambda part: -part["ms"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device: torch.device) -> float:
    """Multiply-adds per second of a large bf16 product."""
    n = 8192 if device.type == "cuda" else 512
    a = torch.randn(n, n, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    for _ in range(3):
        a @ a
    _wait(device)
    began = time.perf_counter()
    for _ in range(10):
        a @ a
    _wait(device)
    return 10 * n**3 / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps, one client count")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--only", choices=list(ARCHS), help="one network")
    parser.add_argument("--clients", default="5", help="client counts, such as 1,5,20")
    parser.add_argument("--variants", default="plain,strong,eager,graph,unfused,compile,slots", help="which loops to time")
    parser.add_argument("--steps", type=int, default=200, help="training steps of all clients together")
    parser.add_argument("--slots", type=int, default=5, help="clients at a time in the variant `slots`")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which of effuse's kernels `compile` and `slots` use")
    parser.add_argument(
        "--where", type=int, default=0, help="list this many of the most expensive operations of a training step"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, kernels = torch.device(arguments.device), [k for k in arguments.kernels.split(",") if k]
    torch.set_num_threads(2)
    ceiling = matrix_rate(device)
    rows: list[dict[str, Any]] = []
    recorded: list[Captured] = []  # machines with recordings, reused for every number of clients

    def fast(n: int) -> list[Captured]:
        recorded.extend(Captured(device, kernels=kernels) for _ in range(n - len(recorded)))
        return recorded[:n]

    for name in [arguments.only] if arguments.only else list(ARCHS):
        arch = ARCHS[name]
        floor = ceiling / (3 * macs(arch))
        for clients in map(int, arguments.clients.split(",")):
            # the same work for every number of clients
            steps, repeat = (2, 1) if arguments.quick else (max(1, arguments.steps // clients), 2)
            makers: dict[str, Callable[[], Callable[[], int]]] = {
                "plain": lambda: plain(arch, device, clients, steps),
                "strong": lambda: strong(arch, device, clients, steps),
                "eager": lambda: ours([Eager(device)], arch, clients, steps),
                "graph": lambda: ours([Captured(device, compiled=False)], arch, clients, steps),
                "unfused": lambda: ours([Captured(device, kernels=())], arch, clients, steps),
                "compile": lambda: ours(fast(1), arch, clients, steps),
                "slots": lambda: ours(fast(arguments.slots), arch, clients, steps),
            }
            if device.type != "cuda":
                makers = {k: makers[k] for k in ("plain", "eager")}
            for variant in arguments.variants.split(","):
                if variant in makers:
                    row = {"network": name, "what": "train", "variant": variant, "clients": clients, "floor": floor}
                    work = makers[variant]()
                    rows.append(row | rate(work, device, repeat))
                    if arguments.where:
                        rows[-1]["where"] = where(work, device, clients * steps)[: arguments.where]
                    tell(rows[-1], arguments.json)
        n, steps = (1000, 5 if arguments.quick else 50) if device.type == "cuda" else (4, 10)
        draws: dict[str, Callable[[], Callable[[], int]]] = {
            "plain": lambda: drawing(arch, device, n, steps, careful=False),
            "strong": lambda: drawing(arch, device, n, steps, careful=True),
            "eager": lambda: sampling(Eager(device), arch, n, steps),
            "graph": lambda: sampling(Captured(device, compiled=False), arch, n, steps),
            "compile": lambda: sampling(fast(1)[0], arch, n, steps),
        }
        for variant in arguments.variants.split(","):
            if variant in draws and (device.type == "cuda" or variant in ("plain", "eager")):
                row = {"network": name, "what": "sample", "variant": variant, "clients": 1, "floor": 3 * floor}
                rows.append(row | rate(draws[variant](), device, 1))
                tell(rows[-1], arguments.json)
    add_ratios(rows)
    if not arguments.json:
        for row in rows:
            ratios = ", ".join(f"{row[f'to_{loop}']:.2f} times the {loop} loop" for loop in LOOPS if f"to_{loop}" in row)
            print(f"{row['network']:>6} {row['what']:>6} {row['variant']:>8} clients {row['clients']:>3}: {ratios}")
    if arguments.json:
        print(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
                    "torch": torch.__version__,
                    "matrix_macs_per_second": ceiling,
                    "rows": rows,
                }
            )
        )


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the speed relative to the loops with the same network, work and number of clients."""
    for loop in LOOPS:
        rates = {(r["network"], r["what"], r["clients"]): r["per_second"] for r in rows if r["variant"] == loop}
        for row in rows:
            if base := rates.get((row["network"], row["what"], row["clients"])):
                row[f"to_{loop}"] = row["per_second"] / base


def tell(row: dict[str, Any], silent: bool) -> None:
    if not silent:
        print(
            f"{row['network']:>4} {row['what']:>6} {row['variant']:>8} clients {row['clients']:>3}: "
            f"{row['per_second']:>10,.0f} {'images' if row['what'] == 'train' else 'evaluations'}/s, "
            f"{100 * row['per_second'] / row['floor']:.1f} % of the floor, first call {row['first_call_seconds']:.0f} s",
            flush=True,
        )
        for part in row.get("where", ()):
            print(f"{part['ms']:>10.3f} ms {part['times']:>7.1f} times a step: {part['name'][:110]}")


if __name__ == "__main__":
    main()
