"""A saved model, opened by diffusers in a process without effuse, draws the same images as `effuse sample`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ToyImages, toy_recipe

from effuse.cli import main
from effuse.core.recipe import Evaluate
from effuse.diffusion.samplers import Ancestral, Ddim, DpmSolver
from effuse.models.unet import Unet
from effuse.runs.driver import run
from effuse.tasks.denoise import Denoise
from effuse.tasks.edm import Edm
from effuse.tasks.schedules import Cosine, Linear

HEAD = """
import json, sys
import numpy as np, torch
import diffusers
from diffusers import DiffusionPipeline, UNet2DModel
torch.set_num_threads(1)
def read(path):
    export = np.load(path)
    return export, json.loads(str(export["provenance"]))
"""
# the pipeline as its documentation has it
UNCONDITIONAL = """
def {name}(folder, path, steps):
    export, note = read(path)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for batch in note["batches"]:
        generator = torch.Generator().manual_seed(batch["torch_seed"])
        images = pipeline(batch["size"], generator=generator, num_inference_steps=steps, output_type="np")[0]
        drawn.append((images * 255).round().astype(np.uint8))
    return drawn
"""
# as in docs/runs.md
CLIPPED = UNCONDITIONAL.replace('output_type="np"', 'use_clipped_model_output=True, output_type="np"')
# what a class-conditional model needs, and one of edm(): its two parts and a plain loop
CONDITIONAL = """
def {name}(folder, path, steps):
    export, note = read(path)
    unet = UNet2DModel.from_pretrained(folder, subfolder="unet").eval()
    kind = json.load(open(folder + "/scheduler/scheduler_config.json"))["_class_name"]
    scheduler = getattr(diffusers, kind).from_pretrained(folder, subfolder="scheduler")
    drawn = []
    for batch in note["batches"]:
        generator = torch.Generator().manual_seed(batch["torch_seed"])
        rows = slice(batch["first"], batch["first"] + batch["size"])
        labels = torch.as_tensor(export["labels"][rows]) if "labels" in export else None
        x = torch.randn((batch["size"], 1, 8, 8), generator=generator) * scheduler.init_noise_sigma
        scheduler.set_timesteps(steps)
        for t in scheduler.timesteps:
            with torch.no_grad():
                output = unet(scheduler.scale_model_input(x, t), t, class_labels=labels).sample
            x = scheduler.step(output, t, x, generator=generator).prev_sample
        drawn.append(((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return drawn
"""
COMPARE = """
found = []
for name, folder, path, steps in json.loads(sys.argv[1]):
    drawn, made = np.concatenate(globals()[name](folder, path, steps)), np.load(path)["images"]
    most = int(abs(drawn.astype(int) - made).max())
    found.append({"same": bool((drawn == made).all()), "most": most, "spread": float(made.std())})
assert "effuse" not in sys.modules
print(json.dumps(found))
"""
WAYS = {"unconditional": UNCONDITIONAL, "clipped": CLIPPED, "conditional": CONDITIONAL}

PLAIN = Denoise(schedule=Linear(steps=50))
CASES = {
    "unconditional, ancestral": (False, PLAIN, Ancestral(batch=3), 50, "unconditional"),
    "unconditional, ddim": (False, PLAIN, Ddim(steps=10, batch=3), 10, "unconditional"),
    "unconditional, ddim, clipped": (False, PLAIN, Ddim(steps=10, batch=3, clip=True), 10, "clipped"),
    "unconditional, v, cosine, weighted, clipped": (
        False,
        Denoise(target="v", schedule=Cosine(steps=50), min_snr=5.0),
        Ancestral(batch=3, clip=True),
        50,
        "unconditional",
    ),
    "class-conditional, ancestral": (True, PLAIN, Ancestral(batch=3), 50, "conditional"),
    "class-conditional, dpm-solver": (True, PLAIN, DpmSolver(steps=8, batch=3), 8, "conditional"),
    "class-conditional, edm, dpm-solver": (True, Edm(), DpmSolver(steps=8, batch=3), 8, "conditional"),
    "unconditional, edm, dpm-solver": (False, Edm(), DpmSolver(steps=8, batch=3), 8, "conditional"),
}


def drawn_by_effuse(case: str, folder: Path) -> list:
    """Draw images of a case with `effuse sample`; returns the arguments with which diffusers draws the same."""
    conditional, task, sampler, steps, way = CASES[case]
    recipe = toy_recipe(
        data=ToyImages(side=8),
        rounds=1,
        sampler=sampler,
        evaluate=Evaluate(grid=0),
        task=task,
        model=Unet(widths=(8, 16), layers=1, attention=(), groups=4, conditional=conditional),
    )
    run(recipe, folder / "run")
    command = ["effuse", "sample", str(folder / "run"), "-n", "5", "--format", "npz", "--out", str(folder / "drawn")]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", command)
        main()
    assert ended.value.code == 0
    return [way, str(folder / "run" / "model"), str(folder / "drawn.npz"), steps]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[str, dict]:
    """The comparisons of all cases, made by one process without effuse."""
    asked = [drawn_by_effuse(case, tmp_path_factory.mktemp("case")) for case in CASES]
    script = HEAD + "".join(source.replace("{name}", way) for way, source in WAYS.items()) + COMPARE
    command = [sys.executable, "-c", script, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_diffusers_alone_draws_the_same(case, compared):
    found = compared[case]
    assert found["same"], f"images differ by up to {found['most']} grey levels"
    assert found["spread"] > 5, "flat images would agree whatever the model"
