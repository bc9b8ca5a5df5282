"""Every error is one sentence (place, value, remedy) with a non-zero exit code, and leaves the last checkpoint intact."""

import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faulty import Faulty
from PIL import Image
from toy import ToyStateful, toy_recipe

from effuse.algorithms.localonly import LocalOnly
from effuse.cli import main
from effuse.core import files
from effuse.core.recipe import Evaluate
from effuse.core.solvers import Adam
from effuse.diffusion.samplers import Ancestral
from effuse.machines.eager import Eager
from effuse.models import saved
from effuse.recipes import catalogue
from effuse.runs import driver, rounds
from effuse.runs.folder import RunFolder

ADAM = Adam(lr=1e-2, batch=8, epochs=1)
SAMPLED = {"evaluate": Evaluate(grid=2, every=2), "sampler": Ancestral(batch=2)}
UNFINISHED = "RunError: run has no checkpoint yet, and so no model; wait for its first round, or `effuse resume run`"


@pytest.fixture(autouse=True)
def checkpoint_every_round(monkeypatch):
    monkeypatch.setattr(rounds, "CHECKPOINT_SHARE", 1e9)


@pytest.fixture
def pictures(tmp_path):
    """A folder of two classes with ten small pictures each."""
    for label in ("cats", "dogs"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(np.full((4, 4), 9 * i, np.uint8)).save(tmp_path / "pictures" / label / f"{i}.png")
    return tmp_path / "pictures"


@pytest.fixture
def train_on(effuse, toy_file):
    """Run the toy federation on other data."""
    return lambda data, *options: effuse(f"run {toy_file()} --set 'data={data}' {' '.join(options)} --out run")


# data


def test_good_pictures_are_no_error(train_on, pictures):
    """The good case, without which the refusals below would prove nothing."""
    assert train_on(f'folder("{pictures}")').code == 0


def test_a_corrupt_image(train_on, pictures):
    (pictures / "dogs" / "3.png").write_bytes(b"this is no picture")
    sentence = train_on(f'folder("{pictures}")').sentence
    assert (
        f"DataError: {pictures}/dogs/3.png: cannot be read as an image" in sentence
        and "replace or remove the file" in sentence
    )
    assert not Path("run").exists(), "no run was started"


def test_a_truncated_image(train_on, pictures):
    file = pictures / "cats" / "7.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 4), np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:50])
    assert f"{file}: cannot be read as an image" in train_on(f'folder("{pictures}")').sentence


def test_an_image_that_may_not_be_read(train_on, pictures, monkeypatch):
    """The refusal is simulated, because a superuser may read every file."""
    opened = Image.open

    def refuse(path, *args, **options):
        if path == pictures / "cats" / "1.png":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args)

    monkeypatch.setattr(Image, "open", refuse)
    sentence = train_on(f'folder("{pictures}")').sentence
    assert f"DataError: {pictures}/cats/1.png: cannot be read as an image" in sentence and "Permission denied" in sentence


def test_images_of_mixed_sizes_need_resize(train_on, pictures):
    Image.fromarray(np.zeros((6, 6), np.uint8)).save(pictures / "dogs" / "0.png")
    sentence = train_on(f'folder("{pictures}")').sentence
    assert "6x6 pixels" in sentence and "has 4x4" in sentence and "add resize(side=...)" in sentence
    assert train_on(f'folder("{pictures}", transforms=[resize(4)])').code == 0


def npz(path, **changes):
    arrays = {"train_images": np.zeros((20, 4, 4), np.uint8), "train_labels": np.arange(20) % 2}
    arrays |= {"test_images": np.zeros((4, 4, 4), np.uint8), "test_labels": np.arange(4) % 2}
    np.savez(path, **(arrays | changes))
    return path


def test_labels_out_of_range(train_on, tmp_path):
    path = npz(tmp_path / "a.npz", train_labels=np.array([0, 1] * 9 + [0, 7]))
    sentence = train_on(f'npz("{path}", classes=["dark", "light"])').sentence
    assert f"{path}" in sentence and "row 19 has label 7; 2 classes are numbered 0 to 1" in sentence


def test_a_truncated_archive(train_on, tmp_path):
    path = npz(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:-100])
    assert f"DataError: {path}: " in train_on(f'npz("{path}")').sentence


def test_a_truncated_idx_file(train_on, tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    blob = gzip.compress(bytes([0, 0, 8, 3]) + b"\0\0\0\x0a" + b"\0\0\0\x04" * 2 + bytes(160))
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(blob[:-9])
    sentence = train_on("mnist()").sentence
    assert "mnist/train-images-idx3-ubyte.gz: cannot be read" in sentence and "fetch the file again" in sentence


def test_a_missing_data_set_says_how_to_get_it(effuse, train_on, tmp_path, monkeypatch):
    sentence = train_on("fashion_mnist()").sentence
    assert "EFFUSE_DATA is not set" in sentence and "https://github.com/zalandoresearch/fashion-mnist" in sentence
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    sentence = effuse("check demo --set 'data=cifar10()'").sentence
    assert (
        f"MissingError: {tmp_path}/cifar10.npz: not found" in sentence and "to rehearse without files, add --set" in sentence
    )
    assert "/no/such/folder: not found" in train_on('folder("/no/such/folder")').sentence


def test_only_missing_files_lead_to_the_hint_on_rehearsals(effuse, pictures):
    """The files exist, but are wrong or too few."""
    Image.fromarray(np.zeros((6, 6), np.uint8)).save(pictures / "dogs" / "0.png")
    for data, words in {
        f'folder("{pictures}")': "6x6 pixels",
        "some(digits(), n=5000)": "digits() has 1442 training images",
    }.items():
        sentence = effuse(f"check demo --set 'data={data}'").sentence
        assert sentence.startswith("DataError: ") and words in sentence and "without files" not in sentence


def test_a_client_with_no_data(effuse, shrunk):
    """After bounded retries the error names the bounds to relax."""
    sentence = effuse(f"run demo {shrunk} --set 'partition=label_skew(beta=0.01, minimum=280, tries=5)' --out run").sentence
    assert "in 5 draws one of 5 clients always had fewer than minimum=280 images; lower minimum or clients" in sentence
    sentence = effuse(f"run demo {shrunk} --set clients=2000 --out run").sentence
    assert "1442 images cannot be dealt to 2000 clients; lower clients" in sentence
    assert not Path("run").exists()


# training


def test_nan_in_training(effuse, toy_file):
    """A diverging learning rate: the error names the round, and the last checkpoint can still be read."""
    sentence = effuse(f"run {toy_file(rounds=9)} --set algorithm.local.lr=1e15 --out run").sentence
    assert sentence.startswith("TrainingError: round ") and "lower the learning rate" in sentence and "set clip" in sentence
    rounds = len(RunFolder("run").records())
    if rounds:
        assert RunFolder("run").load_checkpoint().t == rounds
    assert effuse("resume run").sentence == sentence, "resuming fails in the same way"


def test_a_model_that_draws_no_numbers(effuse, toy_file):
    """After one huge step the weights are finite, but not the images; saving black squares would hide that."""
    recipe = toy_file(rounds=1, algorithm=toy_recipe().algorithm, **SAMPLED)
    sentence = effuse(f"run {recipe} --set 'algorithm.local=sgd(lr=1e36, batch=40, steps=1)' --out run").sentence
    assert sentence.startswith("TrainingError: ") and "lower" in sentence


def test_more_than_the_memory(effuse, toy_file):
    sentence = effuse(f"run {toy_file()} --set algorithm.local.batch=10000000000000 --out run").sentence
    assert sentence.startswith("not enough memory") and "lower algorithm.local.batch" in sentence


@pytest.mark.parametrize("n", [1, 2, 4, 9, 13])
def test_a_full_disk(effuse, toy_file, monkeypatch, n):
    """No space from the n-th file on: manifest, client states, checkpoints; then space again."""
    recipe = toy_file(algorithm=ToyStateful(local=ADAM), rounds=3, **SAMPLED)
    whole = effuse(f"run {recipe} --out whole --json").json
    fsync, calls = os.fsync, []

    def full(handle):
        if not os.path.isdir(f"/proc/self/fd/{handle}"):
            calls.append(handle)
            if len(calls) >= n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        sentence = effuse(f"run {recipe} --out run").sentence
    assert sentence.startswith("RunError: run/") and "the disk is full; free some space, then `effuse resume`" in sentence
    assert not [p for p in Path("run").rglob(".*") if p.name != ".lock"], "a partial file is left"
    checkpoints = sorted(Path("run/checkpoints").glob("*")) if n > 1 else []
    if checkpoints:
        assert RunFolder("run").load_checkpoint().t == int(checkpoints[-1].stem)
    again = effuse("resume run --json") if n > 1 else effuse(f"run {recipe} --out run --json")
    assert again.json["weights_sha256"] == whole["weights_sha256"]
    assert (len(checkpoints) > 0) == (n > 5), "cases before and after the first checkpoint are covered"


def test_a_disk_that_is_full_for_a_line(effuse, toy_file, monkeypatch):
    """The operating system refuses: rounds.jsonl is a link to /dev/full."""
    Path("run").mkdir()
    Path("run/rounds.jsonl").symlink_to("/dev/full")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "cut", lambda folder, size: None)  # a device cannot be cut
        sentence = effuse(f"run {toy_file()} --out run").sentence
    assert sentence.startswith("RunError: run/rounds.jsonl: the disk is full")
    Path("run/rounds.jsonl").unlink()
    whole = effuse(f"run {toy_file()} --out whole --json").json
    assert effuse("resume run --json").json["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("place", ["picture", "model"])
def test_a_disk_that_is_full_for_a_library(effuse, toy_file, monkeypatch, place):
    """Pillow and safetensors write these files; safetensors words the system's refusal differently."""
    recipe = toy_file(**SAMPLED)

    def refuse(*args, **kwargs):
        if place == "picture":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise saved.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(*((Image.Image, "save", refuse) if place == "picture" else (saved, "save_file", refuse)))
        sentence = effuse(f"run {recipe} --out run").sentence
    assert sentence.startswith("RunError: run/") and "the disk is full" in sentence
    assert effuse("sample run -n 2").code == 0, "the checkpoint was written before the evaluation"
    whole = effuse(f"run {recipe} --out whole --json").json
    assert effuse("resume run --json").json["weights_sha256"] == whole["weights_sha256"]


def test_a_folder_that_cannot_be_made(effuse, toy_file, tmp_path):
    (tmp_path / "file").write_text("")
    for out in ("file", "file/run"):
        assert effuse(f"run {toy_file()} --out {out}").sentence.startswith(f"RunError: {out}: ")


# runs and their folders


def test_a_second_run_into_the_same_folder(effuse, toy_file):
    first = effuse(f"run {toy_file()} --out run --json").json
    sentence = effuse(f"run {toy_file()} --seed 1 --out run").sentence
    assert sentence == "RunError: run already holds a run; choose another --out, or continue it with `effuse resume run`"
    assert effuse("resume run --json").json == first


def test_a_run_in_progress_is_left_alone(effuse, toy_file):
    effuse(f"run {toy_file()} --out run")
    Path("run/result.json").unlink()
    with RunFolder("run").locked():
        sentence = effuse("resume run").sentence
    assert sentence == "RunError: run is in use by another effuse process; wait for it or choose another --out"


def test_an_unfinished_run_samples_and_evaluates_by_its_last_checkpoint(effuse, toy_file):
    """The same images as of the run that ends there; commands that need a finished run refuse."""
    assert effuse(f"run {toy_file(**SAMPLED)} --rounds 2 --set ema=0.5 --out run").code == 0
    whole = {
        o: np.load(effuse(f"sample run -n 2 --format npz --out whole{o} {o} --json").json["written"]) for o in ("", "--ema")
    }
    Path("run/result.json").unlink()
    for option, images in whole.items():
        answer = effuse(f"sample run -n 2 --format npz --out part{option} {option}")
        assert "note: run is not finished: this is its model after round 2 of 2" in answer.out
        assert (np.load(f"part{option}.npz")["images"] == images["images"]).all()
    assert effuse("evaluate run --metrics '[kid(n=4, encoder=classifier(width=2, steps=1, epochs=1))]' --json").json[
        "metrics"
    ]
    for command in ("prune run --ratio 0.2 --out pruned", "audit run"):
        assert effuse(command).sentence == "RunError: run is not finished; finish it with `effuse resume run`"
    for checkpoint in Path("run/checkpoints").iterdir():
        checkpoint.unlink()
    for command in ("sample", "evaluate"):
        assert effuse(f"{command} run").sentence == UNFINISHED
    assert effuse("resume run").code == 0 and effuse("sample run -n 2").code == 0


@pytest.mark.parametrize("command", ["resume", "sample", "evaluate", "run"])
def test_a_folder_that_is_no_run(effuse, command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{not json")
    assert effuse(f"{command} ./empty").sentence == "RunError: empty is not a run folder: it has no manifest.json"
    assert "RunError: broken/manifest.json is not a manifest: Expecting" in effuse(f"{command} ./broken").sentence
    sentence = effuse(f"{command} ./nowhere").sentence
    assert (
        sentence
        == "RunError: nowhere: there is no such run folder or manifest; give a run folder or the manifest.json in it"
    )
    for path in ("borken", "borken/manifest.json"):
        sentence = effuse(f"{command} ./{path}").sentence
        assert sentence == f"RunError: {path}: there is no such run folder or manifest; did you mean broken?"


def test_a_manifest_that_is_not_ours(effuse, toy_file, tmp_path):
    def sentence(command, **changes):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "manifest.json").write_text(json.dumps({"recipe": toy_recipe().saved()} | changes))
        return effuse(f"{command} run").sentence

    recipe = toy_recipe().saved()
    assert "RecipeError: manifest: no key 'ronds'; did you mean rounds" in sentence("run", recipe=recipe | {"ronds": "3"})
    assert "manifest.data: recipe needs a value for 'data'" in sentence("run", recipe={})
    assert "manifest: 'rounds' must be text in the grammar, not int" in sentence("run", recipe=recipe | {"rounds": 3})
    assert sentence("resume") == "RunError: run: its manifest names the engine None; valid: simulator, loopback, flower"
    assert "model: no arch '__import__'" in sentence("run", recipe=recipe | {"model": "__import__('os')"})
    assert "it has no recipe" in sentence("run", recipe=None)


SLOW_TOY = """
import time, toy
from effuse.machines.eager import Eager
fit = Eager.fit
def slow(*args):
    time.sleep(0.05)
    return fit(*args)
Eager.fit = slow
from effuse.cli import main
main()
"""


def real(code_or_command, *arguments, **options):
    """A command in a child process."""
    tests = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*code_or_command, *arguments], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options
    )


def test_ctrl_c(effuse, toy_file):
    """Ctrl-C in the middle of a round: exit code 130, a hint on how to continue, and the same result after resuming."""
    recipe = toy_file(algorithm=ToyStateful(local=ADAM), rounds=12)
    process = real([sys.executable, "-c", SLOW_TOY], "run", recipe, "--out", "run")
    deadline = time.monotonic() + 60
    while not Path("run/rounds.jsonl").exists() or len(Path("run/rounds.jsonl").read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "effuse: interrupted; `effuse resume run` goes on from the last checkpoint"
    assert not Path("run/result.json").exists() and 1 <= RunFolder("run").load_checkpoint().t < 12
    whole = effuse(f"run {recipe} --out whole --json").json
    assert effuse("resume run --json").json["weights_sha256"] == whole["weights_sha256"]


def test_ctrl_c_before_anything_is_there_to_resume(effuse, toy_file, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "refuse", interrupted)
    answer = effuse(f"run {toy_file()} --out run")
    assert answer.code == 130 and answer.sentence == "interrupted" and not Path("run").exists()
    monkeypatch.setattr("effuse.cli.check.rehearse", interrupted)
    answer = effuse(f"check {toy_file()}")
    assert answer.code == 130 and answer.sentence == "interrupted"


# `check` and `run` refuse what cannot work before computing

REFUSED = {
    "sampler.steps=5000": "sampler.steps: 5000 is more than the 1000 steps of task.schedule",
    'sampler=ddim(steps=5000, spacing="quadratic")': "sampler.steps: 5000 is more than the 1000 steps",
    "sampler.batch=0": "sampler.batch: 0 is wrong",
    "sampler=None": "conditional_accuracy() looks at samples, but there is no sampler",
    "task=classify()": "task classify() does not fit model unet",
    "model=resnet()": "does not fit model resnet",
    "model.conditional=False": "guidance=1 needs a class-conditional model; set guidance=0",
    "model.side=16": "model.side: 16, but the data has 8",
    "model.channels=3": "model.channels: 3, but the data has 1",
    "model.classes=4": "model.classes: 4, but the data has 10",
    "algorithm.cohort=6": "algorithm.cohort: 6 clients a round, but there are 5",
    "evaluate.metrics=[accuracy()]": "accuracy: this model does not classify; train it with task=classify()",
    "evaluate.metrics=[fid()]": "EFFUSE_DATA/inception_fid.safetensors, and EFFUSE_DATA is not set; point it at the folder",
    "evaluate.metrics=[kid(n=9, encoder=classifier()), kid(n=8, encoder=classifier())]": "both be stored as 'kid_",
    "evaluate.metrics=[fid(reference=400, encoder=classifier())]": "fid: reference=400, but the test split has 355 images",
    "evaluate.metrics=[precision_recall(n=3, encoder=classifier())]": "3 images have no 3 neighbours each; raise n",
    "evaluate.metrics=[diversity(n=10)]": "diversity: 10 samples of 10 classes have no two of one class; raise n",
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("setting", REFUSED)
def test_refused_before_computing(effuse, command, setting, monkeypatch):
    monkeypatch.setattr(Eager, "fit", None)
    monkeypatch.setattr(Eager, "generate", None)
    assert REFUSED[setting] in effuse(f"{command} demo --set '{setting}'").sentence
    assert not Path("runs").exists(), "a refused recipe leaves no folder"


def test_more_real_images_than_there_are_is_answered_with_a_setting_that_works(effuse):
    """The digits have 355 test and 1442 training images; the other metrics stay."""
    asked = (
        'fid(encoder=classifier(), split="train", reference=5000)',
        "kid(encoder=classifier(), skip=355)",
        "diversity()",
    )
    sentence = effuse(f"check demo --set 'evaluate.metrics=[{', '.join(asked)}]'").sentence
    advice = re.search(r"lower it: (--set '.*')$", sentence)[1]
    assert '[fid(encoder=classifier(), split="train", reference=1442), kid(encoder=classifier()), diversity()]' in advice
    assert effuse(f"check demo {advice} --json").code == 0


@pytest.mark.parametrize("metric", ["conditional_accuracy()", "diversity()"])
def test_metrics_of_labels_need_a_conditional_model(effuse, metric):
    options = f"--set model.conditional=False --set sampler.guidance=0.0 --set evaluate.metrics=[{metric}]"
    for command in ("check", "run"):
        assert "the samples have no labels; use a class-conditional model" in effuse(f"{command} demo {options}").sentence


def test_inception_weights_that_are_missing_or_something_else(effuse, tmp_path, monkeypatch):
    monkeypatch.setenv("EFFUSE_DATA", str(tmp_path))
    assert f"no file {tmp_path}/inception_fid.safetensors" in effuse("check demo --set 'evaluate.metrics=[fid()]'").sentence


def test_evaluate_refuses_too(effuse, toy_file, monkeypatch):
    effuse(f"run {toy_file(**SAMPLED)} --out run")
    monkeypatch.setattr(Eager, "generate", None)
    for metrics, words in {
        "[fid()]": "EFFUSE_DATA is not set",
        "[accuracy()]": "does not classify",
        "[diversity()]": "no labels",
        "[fdi()]": "evaluate.metrics[0]: no metric 'fdi'; did you mean fid?",
    }.items():
        assert words in effuse(f"evaluate run --metrics '{metrics}'").sentence
    assert "model.side: 4, but the data has 6" in effuse("evaluate run --set data.side=6").sentence
    assert not Path("run/evaluation.json").exists()


def test_lone_clients_are_measured_by_samples_only(effuse, toy_file):
    recipe = toy_file(algorithm=LocalOnly(local=ADAM), **SAMPLED)
    sentence = effuse(f"run {recipe} --set 'evaluate.metrics=[accuracy(split=train)]'").sentence
    assert "accuracy(split='train') looks at a model, but those of local_only stay with its clients" in sentence


# typing errors

TYPED = {
    "run": "Missing argument 'RECIPE'; `effuse run --help` lists the commands and options",
    "rnu demo": "No such command 'rnu'; did you mean run or prune?",
    "help": "No such command 'help'; valid: audit, bound, check, compare, doctor, evaluate, ",
    "--fast": "No such option '--fast'; ",
    "run demo --fast": "No such option '--fast'; ",
    "run demo --round 3": "No such option '--round'; did you mean rounds",
    "run demo --rounds many": "Invalid value for '--rounds': 'many' is not a valid integer",
    "run demo --rounds": "Option '--rounds' requires an argument",
    "run demo extra": "Got unexpected extra argument (extra)",
    "run dmeo": "RecipeError: there is neither a recipe 'dmeo' nor a run folder or file of that name; did you mean demo?",
    "run 'dmeo()'": "RecipeError: no recipe 'dmeo'; did you mean demo?",
    "run demo-seed": "RecipeError: there is neither a recipe 'demo-seed' nor a run folder",
    "run 'demo(1, 2)'": "RecipeError: recipe demo takes no arguments, got 2",
    "run 'demo(fast=True)'": "RecipeError: recipe demo has no argument 'fast'; it takes none",
    "run 'demo('": "RecipeError: cannot read 'demo(': expected a literal, a list or name(key=value)",
    "run 3": "RecipeError: there is neither a recipe '3' nor a run folder",
    "run ''": "RecipeError: there is neither a recipe '' nor a run folder",
    "run demo --set rounds": "RecipeError: --set rounds: expected KEY=VALUE, such as rounds=2",
    "run demo --set =3": "RecipeError: --set =3: expected KEY=VALUE",
    "run demo --set rounds=": "RecipeError: rounds: cannot read ''",
    "run demo --set ronds=3": "RecipeError: recipe: no key 'ronds'; did you mean rounds",
    "run demo --set algorithm.local.rl=1": "RecipeError: algorithm.local: no key 'rl'; did you mean lr?",
    "run demo --set rounds.x=1": "RecipeError: rounds: 40 has no keys of its own",
    "run demo --set rounds=1.5": "RecipeError: rounds: 1.5 is wrong, input should be a valid integer",
    "run demo --set rounds=soon": "RecipeError: rounds: 'soon' does not belong here; expected int",
    "run demo --set algorithm=fedagv": "RecipeError: algorithm: no algorithm 'fedagv'; did you mean fedavg",
    "run demo --set algorithm=fedddpm": "RecipeError: algorithm.warmup: fedddpm needs a value for 'warmup'",
    "run demo --set partition=dirichlet": "no partition 'dirichlet'; a Dirichlet split is label_skew(beta=0.5)",
    "run demo --set 'partition=label_skew(beta=0.5'": "expected a literal, a list or name(key=value); a bracket is missing",
    "run demo --set data=.": "say how it is to be read, by `--data .` or --set 'data=folder(\".\")'",
    "run demo --data nowhere": "MissingError: --data nowhere: not found; give a folder of images, an .npz file, or a source",
    "sample run --label cat": "RunError: run: there is no such run folder",
    "run demo --set partition=0.5": "partition: 0.5 is wrong, expected a partition; valid: ",
    "run demo --set evaluate.metrics=diversity": "each a metric; write it in brackets: [diversity]",
    "run demo --set evaluate.metrics=[3]": "evaluate.metrics.0: 3 is wrong, expected a metric; valid: ",
    "run demo --set algorithm.cohort=0": "algorithm.cohort: 0 is wrong, input should be greater than 0",
    "run demo --set algorithm.cohort=1.5": "algorithm.cohort: 1.5 is wrong, input should be a valid integer or",
    "run demo --set algorithm.cohort=-0.5": "algorithm.cohort: -0.5 is wrong",
    "run demo --set wire=fp16": "RecipeError: wire: 'fp16' is wrong, input should be 'fp32' or 'bf16'",
    "run demo --set 'model=from_pretrained(\"nowhere\")'": "ModelError: no model folder at 'nowhere'; give a run's model/",
    "run demo --set 'data=labels(sizes=[6000]*10)'": "there are labels but no images; it can be checked, not run",
    "run demo --set 'data=labels(sizes=[1]*100000000)'": "at most 1000000",
    'run demo --set \'data=__import__("os").system("true")\'': "RecipeError: data: ",
    "run demo --rounds 0": "RecipeError: rounds: 0 is wrong, input should be greater than 0",
    "run demo --seed -1": "RecipeError: seed: -1 is wrong",
    "run demo --seeds a,b": "RecipeError: --seeds a,b: expected whole numbers separated by commas, such as 0,1,2",
    "run demo --seeds 0,,1": "RecipeError: --seeds 0,,1: expected whole numbers",
    "run demo --track wandbb": "RecipeError: --track wandbb: there is none; did you mean wandb?",
    "ui nowhere": "RunError: nowhere: not a folder; give the one that holds your runs",
    "new mine --data nowhere": "DataError: --data nowhere: not a folder; give the folder that holds a subfolder of images",
    "run demo --engine flwoer": "RecipeError: no engine 'flwoer'; valid: simulator, loopback, flower",
    "run demo --device gpu": "RecipeError: no device 'gpu'; valid: auto, cpu, cuda",
    "sample run -n 0": "Invalid value for '-n': 0 is not in the range x>=1",
    "sample run --format foo": "RecipeError: --format foo: expected one of grid, imagefolder, npz, parquet",
    "list zzz": "RecipeError: nothing is called 'zzz'; `effuse list` shows every name",
    "list fedporx": "RecipeError: nothing is called 'fedporx'; did you mean fedprox or ",
}


@pytest.mark.parametrize("line", TYPED)
def test_typing_errors(effuse, line):
    answer = effuse(line)
    assert TYPED[line] in answer.sentence and answer.out == ""
    assert not Path("runs").exists()


def test_a_device_that_is_not_there(effuse, toy_file, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    effuse(f"run {toy_file(**SAMPLED)} --out run")
    for command in (f"run {toy_file()} --out b", "resume run", "sample run", "evaluate run"):
        sentence = effuse(f"{command} --device cuda").sentence
        assert sentence == "RecipeError: device cuda: this machine has no usable GPU; use --device cpu"


def test_samples_that_cannot_be_drawn(effuse, toy_file):
    effuse(f"run {toy_file()} --out plain")
    effuse(f"run {toy_file(**SAMPLED)} --out run")
    assert "its recipe has no sampler" in effuse("sample plain").sentence
    assert "labels: the model of run takes none; leave them out" in effuse("sample run -n 2 --label 1").sentence
    assert "run has no moving average; run it with --set ema=0.99" in effuse("sample run -n 2 --ema").sentence
    assert "fedavg has one global model and none per client" in effuse("sample run -n 2 --client 0").sentence
    assert "no sampler 'ddmi'; did you mean ddim?" in effuse("sample run -n 2 --sampler 'ddmi()'").sentence
    assert "sampler.steps: 99 is more than the 25 steps" in effuse("sample run -n 2 --sampler 'ddim(steps=99)'").sentence
    assert effuse("sample run -n 2 --format imagefolder").code == 0
    sentence = effuse("sample run -n 2 --format imagefolder").sentence
    assert "exports/imagefolder-2-seed-0 is not an empty folder; choose another --out" in sentence


def test_a_class_that_is_not_there(effuse, shrunk):
    effuse(f"run demo {shrunk} --out run")
    sentence = effuse("sample run -n 2 --label 10").sentence
    assert sentence == "RecipeError: labels: there is no class 10; the model of run has 0 to 9"
    assert "labels: run has no class 'cat'; valid: 0, 1, 2" in effuse("sample run -n 2 --label cat").sentence


def test_arguments_of_a_recipe_are_checked(effuse, monkeypatch):
    def trial(clients: int, side: str = "left"):
        """A recipe with a required argument."""
        return toy_recipe(clients=clients)

    monkeypatch.setitem(catalogue(), "trial", trial)
    assert effuse("check 'trial(clients=2)' --json").json["partition"]["sizes"] == [20, 20]
    assert effuse("check trial").sentence == "RecipeError: recipe trial: clients: missing required argument"
    assert "recipe trial: clients: input should be a valid integer" in effuse("check 'trial(clients=\"two\")'").sentence
    assert "recipe trial has no argument 'client'; did you mean clients?" in effuse("check 'trial(client=2)'").sentence


def test_debug_shows_a_traceback(effuse, monkeypatch):
    """No other option does, and an unexpected error prints no traceback."""
    process = real([str(Path(sys.executable).with_name("effuse"))], "run", "nosuch", "--debug")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback (most recent" in err and "RecipeError: there is neither a " in err
    monkeypatch.setattr("effuse.cli.run.chosen", lambda *args: 1 / 0)
    answer = effuse("run demo")
    sentence = "effuse: unexpected ZeroDivisionError: division by zero (please report it; --debug shows a traceback)\n"
    assert answer == (1, "", sentence)
    monkeypatch.setattr(sys, "argv", ["effuse", "run", "demo", "--debug"])
    with pytest.raises(ZeroDivisionError):
        main()


@pytest.mark.parametrize("options", ["", "--workers 2"])
def test_an_error_in_a_users_file_names_its_line(effuse, toy_file, options):
    """In whichever process it happens."""
    sentence = effuse(f"run {toy_file(algorithm=Faulty(local=ADAM))} --out run {options} --quiet").sentence
    assert (
        "ZeroDivisionError: division by zero (in " in sentence and "which is not part of effuse; --debug shows" in sentence
    )
    assert f"tests/faulty.py:{Faulty.train.__code__.co_firstlineno + 2}, " in sentence


def test_an_error_in_a_package_for_user_files(effuse, toy_file, monkeypatch):
    """User files there look like effuse's own, so the message covers both."""
    monkeypatch.setattr("effuse.algorithms.fedavg.Update", lambda *fields: 1 / 0)
    err = effuse(f"check {toy_file()}").err
    assert re.search(r"\(in \S*effuse/algorithms/fedavg.py:\d+; unless that is a file of your own, please report it; ", err)


def test_a_reader_that_closes_the_pipe(effuse):
    """`effuse list --json | head -c 1` prints no error about a broken pipe."""
    process = real([str(Path(sys.executable).with_name("effuse"))], "list", "--json")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 1
