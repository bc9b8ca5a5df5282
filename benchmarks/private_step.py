"""Compare a private training step with a plain one: time and memory.

    python benchmarks/private_step.py [--quick] [--json] [--only digits|1x32x32|3x32x32] [--batch 128] [--repeats 5]

plain      a recorded step of the network without our kernels; eager on a CPU
kernels    the same with our kernels; on a GPU only
private    DP-SGD with K rows of each image: Poisson batches, per-image gradients, clipping and noise
whole      the same with all rows of a batch in memory at a time
grouped    the same by the rule of vmap for convolutions: a group for each unit; the default on a CPU
unfolded   the same by our rule: a matrix product for each unit; the default on a GPU

Times are medians of fits that alternate between the variants. A private step at K = 8 trains eight times the rows of a plain
one, so its ratio is also given for each row. Memory is what the first fit of a variant reserves on a GPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import effuse  # noqa: F401  (sets the threads' waiting policy before torch is imported)
from effuse.core.data import Dataset, Shape, Shard
from effuse.core.fit import Private, Work
from effuse.core.model import Arch
from effuse.core.noise import KeyedNoise
from effuse.core.privacy import DpSgd
from effuse.core.rng import Stream
from effuse.core.solvers import AdamW
from effuse.core.units import PrivacyUnits, held
from effuse.fast.graph.captured import KERNELS, Captured
from effuse.machines import per_unit
from effuse.machines.eager import Eager
from effuse.models.unet import DigitsUnet, Unet
from effuse.tasks.denoise import Denoise

GENERATOR = Unet(widths=(24, 48, 96, 192), layers=1, attention=(16,), groups=8, conditional=True)
ARCHS: dict[str, Arch] = {
    "digits": DigitsUnet().resolved(Shape(8, 1, 10)),
    "1x32x32": GENERATOR.resolved(Shape(32, 1, 10)),
    "3x32x32": GENERATOR.resolved(Shape(32, 3, 10)),
}
GOALS = {1: 2.5, 8: 1.5}  # times a plain step for each row, by K
IMAGES = 6000  # of a client: a tenth of Fashion-MNIST


def fits(machine: Eager, arch: Arch, batch: int, steps: int, dp: DpSgd | None, n: int) -> tuple[Callable[[], None], int]:
    """A fit of that many steps, and how many units it holds at a time."""
    shape, generator = arch.shape, torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (n, shape.channels, shape.side, shape.side), dtype=torch.uint8, generator=generator)
    shard = Shard.whole(Dataset(images, torch.arange(n) % 10, tuple("0123456789")).to(machine.device))
    solver = AdamW(lr=1e-4, batch=batch, steps=steps, privacy=dp)
    model, stream = arch.initial(Stream((0,))).to(machine.device), Stream((1,))
    physical = batch if dp is None else held(dp, n, solver.rate_on(n))

    def fit() -> None:
        machine.release(None)
        private = None
        if dp is not None:
            noise = KeyedNoise(stream, machine.device)
            private = Private(dp.clip, 1.0, PrivacyUnits(n), solver.rate_on(n), dp.repeats, physical, noise)
        work = Work(
            solver=solver, task=Denoise(), shard=shard, lr=1e-4, stream=stream, place=0, where="here", private=private
        )
        machine.fit(machine.load(model), work)
        _wait(machine.device)

    return fit, physical


def reserved(device: torch.device, fit: Callable[[], None]) -> int | None:
    """The bytes that a first fit reserves; None on a CPU."""
    if device.type != "cuda":
        fit()
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    fit()
    return torch.cuda.max_memory_reserved(device) - before


def by_the_other_rule(fit: Callable[[], None]) -> Callable[[], None]:
    """The same fit with the rule for convolutions that is not this device's."""

    def other() -> None:
        before = per_unit.UNFOLDED
        per_unit.UNFOLDED = {"cpu", "cuda"} - before
        try:
            fit()
        finally:
            per_unit.UNFOLDED = before

    return other


def measure(name: str, device: torch.device, batch: int, steps: int, repeats: int, n: int) -> list[dict[str, Any]]:
    """A row for each variant of one network."""
    on_gpu = device.type == "cuda"

    def machine(*kernels: str) -> Eager:
        return Captured(device, compiled=False, kernels=kernels) if on_gpu else Eager(device)

    variants: dict[str, tuple[DpSgd | None, tuple[str, ...]]] = {
        "plain": (None, ()),
        "kernels": (None, KERNELS),
        **{f"private, K={k}": (DpSgd(repeats=k), ()) for k in GOALS},
    }
    most = held(DpSgd(), n, 1 / -(-n // batch))
    variants["whole, K=8"] = (DpSgd(repeats=8, physical=most), ())
    other = "grouped" if on_gpu else "unfolded"
    variants |= {f"{other}, K={k}": (DpSgd(repeats=k), ()) for k in GOALS}
    if not on_gpu:
        del variants["kernels"]
    rows, timed = [], {}
    for variant, (dp, kernels) in variants.items():
        fit, physical = fits(machine(*kernels), ARCHS[name], batch, steps, dp, n)
        timed[variant] = by_the_other_rule(fit) if variant.startswith(other) else fit
        repeated = 1 if dp is None else dp.repeats
        memory = reserved(device, timed[variant])
        rows.append({"network": name, "variant": variant, "K": repeated, "physical": physical, "bytes": memory})
    times: dict[str, list[float]] = {variant: [] for variant in timed}
    for _ in range(repeats):
        for variant, fit in timed.items():
            began = time.perf_counter()
            fit()
            times[variant].append((time.perf_counter() - began) / steps)
    for row in rows:
        row["ms"] = 1e3 * statistics.median(times[row["variant"]])
        row["to_plain"] = row["ms"] / rows[0]["ms"] if row is not rows[0] else 1.0
        row["a_row"] = row["to_plain"] / row["K"]
    return rows


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the digits' network, few steps of small batches")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--only", choices=list(ARCHS), help="one network")
    parser.add_argument("--batch", type=int, default=128, help="the expected number of images in a step")
    parser.add_argument("--steps", type=int, default=20, help="steps of a fit")
    parser.add_argument("--repeats", type=int, default=5, help="fits of each variant")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, sizes = torch.device(arguments.device), (arguments.batch, arguments.steps, arguments.repeats, IMAGES)
    names = [arguments.only] if arguments.only else [name for name in ARCHS if name != "digits"]
    if arguments.quick:
        names, sizes = ["digits"], (8, 2, 3, 80)
    torch.set_num_threads(2)
    rows = [row for name in names for row in measure(name, device, *sizes)]
    if arguments.json:
        place = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        print(json.dumps({"device": place, "torch": torch.__version__, "batch": sizes[0], "goals": GOALS, "rows": rows}))
        return
    for row in rows:
        memory = "" if row["bytes"] is None else f", {row['bytes'] / 2**30:.2f} GiB"
        ratio = f"{row['to_plain']:.2f} times a plain step, {row['a_row']:.2f} a row"
        print(f"{row['network']:>8} {row['variant']:>12}: {row['ms']:9.2f} ms, {ratio}, {row['physical']} units{memory}")
        if row["variant"].startswith("private"):
            reached = "met" if row["a_row"] <= GOALS[row["K"]] else "missed"
            print(f"{'':>8} {'goal':>12}: {GOALS[row['K']]} times a plain step for each row, {reached}")


if __name__ == "__main__":
    main()
