"""A saved model, opened by diffusers in a process that never imports effuse, draws what `effuse sample` drew."""

import json
import subprocess
import sys

import pytest
from toy import ToyImages, toy_recipe

from effuse.cli import main
from effuse.core.recipe import Evaluate
from effuse.diffusion.objective import Denoise
from effuse.diffusion.samplers import Ancestral, Ddim, DpmSolver
from effuse.diffusion.schedules import Cosine, Linear
from effuse.engines.driver import run
from effuse.models.unet import Unet

READ = """
import json, sys
import numpy as np, torch
torch.set_num_threads(1)
export = np.load(sys.argv[2])
note = json.loads(str(export["provenance"]))
"""
# the pipeline as its documentation has it
UNCONDITIONAL = (
    READ
    + """
from diffusers import DiffusionPipeline
pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
pipeline.set_progress_bar_config(disable=True)
drawn = []
for batch in note["batches"]:
    generator = torch.Generator().manual_seed(batch["torch_seed"])
    images = pipeline(batch["size"], generator=generator, num_inference_steps=int(sys.argv[3]), output_type="np")[0]
    drawn.append((images * 255).round().astype(np.uint8))
"""
)
CLIPPED = UNCONDITIONAL.replace(
    'output_type="np"', 'use_clipped_model_output=True, output_type="np"'
)  # as docs/runs.md says
# what a class-conditional model needs: its two parts and a plain loop
CONDITIONAL = (
    READ
    + """
import diffusers
from diffusers import UNet2DModel
unet = UNet2DModel.from_pretrained(sys.argv[1], subfolder="unet").eval()
kind = json.load(open(sys.argv[1] + "/scheduler/scheduler_config.json"))["_class_name"]
scheduler = getattr(diffusers, kind).from_pretrained(sys.argv[1], subfolder="scheduler")
drawn = []
for batch in note["batches"]:
    generator = torch.Generator().manual_seed(batch["torch_seed"])
    labels = torch.as_tensor(export["labels"][batch["first"] : batch["first"] + batch["size"]])
    x = torch.randn((batch["size"], 1, 8, 8), generator=generator)
    scheduler.set_timesteps(int(sys.argv[3]))
    for t in scheduler.timesteps:
        with torch.no_grad():
            output = unet(x, t, class_labels=labels).sample
        x = scheduler.step(output, t, x, generator=generator).prev_sample
    drawn.append(((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())
"""
)
COMPARE = """
assert "effuse" not in sys.modules
drawn = np.concatenate(drawn)
print(json.dumps({"same": bool((drawn == export["images"]).all()), "most": int(abs(drawn.astype(int) - export["images"]).max()),
                  "spread": float(export["images"].std())}))
"""

PLAIN = Denoise(schedule=Linear(steps=50))
CASES = {
    "unconditional, ancestral": (False, PLAIN, Ancestral(batch=3), 50, UNCONDITIONAL),
    "unconditional, ddim": (False, PLAIN, Ddim(steps=10, batch=3), 10, UNCONDITIONAL),
    "unconditional, ddim, clipped": (False, PLAIN, Ddim(steps=10, batch=3, clip=True), 10, CLIPPED),
    "unconditional, v, cosine, weighted, clipped": (
        False, Denoise(target="v", schedule=Cosine(steps=50), min_snr=5.0), Ancestral(batch=3, clip=True), 50, UNCONDITIONAL
    ),
    "class-conditional, ancestral": (True, PLAIN, Ancestral(batch=3), 50, CONDITIONAL),
    "class-conditional, dpm-solver": (True, PLAIN, DpmSolver(steps=8, batch=3), 8, CONDITIONAL),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_diffusers_alone_draws_the_same(case, tmp_path, monkeypatch):
    conditional, task, sampler, steps, script = CASES[case]
    recipe = toy_recipe(
        data=ToyImages(side=8), rounds=1, sampler=sampler, evaluate=Evaluate(grid=0), task=task,
        model=Unet(widths=(8, 16), layers=1, attention=(), groups=4, conditional=conditional),
    )  # fmt: skip
    folder = tmp_path / "run"
    run(recipe, folder)
    monkeypatch.setattr(
        sys, "argv", ["effuse", "sample", str(folder), "-n", "5", "--format", "npz", "--out", str(tmp_path / "drawn")]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    arguments = [str(folder / "model"), str(tmp_path / "drawn.npz"), str(steps)]
    done = subprocess.run([sys.executable, "-c", script + COMPARE, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"], f"images differ by up to {found['most']} grey levels"
    assert found["spread"] > 5, "flat images would agree whatever the model"
