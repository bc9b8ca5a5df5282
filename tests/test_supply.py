"""What is installed is known to the hash, and services may do little else than their work."""

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()
DIGEST = "sha256:" + "0a" * 32


def tool(name):
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LOCK = tool("lock")


def locked() -> dict[str, tuple[str, list[str]]]:
    """The packages of the lock: version and hashes."""
    text = LOCK.LOCK.read_text().replace(" \\\n", " ")
    found = {}
    for line in text.splitlines()[1:]:
        pinned, *hashes = line.split()
        name, version = pinned.split("==")
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes) and len(set(hashes)) == len(hashes) > 0
        found[name] = version, hashes
    return found


def test_the_container_installs_what_constraints_name_by_hash():
    """All that effuse[flower] needs, in the versions of constraints.txt, and what builds it; torch has a hash of its own."""
    versions = LOCK.pinned() | LOCK.BUILD
    found = locked()
    assert {name: version for name, (version, _) in found.items()} == {name: versions[name] for name in found}
    assert sorted(found) == sorted([*LOCK.needed(["effuse[flower]"]), *LOCK.BUILD])
    assert {"flwr", "numpy", "sympy", "cryptography"} <= found.keys() and "torch" not in found and "pytest" not in found


def test_only_wheels_that_the_container_may_install_are_locked():
    page = "".join(
        f'<a href="https://files.example.org/a/b/{file}#sha256={digit * 64}">{file}</a>\n'
        for file, digit in {
            "some_thing-1.2-py3-none-any.whl": "1",
            "some_thing-1.2-py2.py3-none-any.whl": "2",
            "some_thing-1.2-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl": "3",
            "some_thing-1.2-cp39-abi3-manylinux_2_28_aarch64.whl": "4",
            "some_thing-1.2-cp311-cp311-manylinux_2_17_x86_64.whl": "5",  # another Python
            "some_thing-1.2-cp313-abi3-manylinux_2_28_x86_64.whl": "6",  # a newer one
            "some_thing-1.2-cp312-cp312-win_amd64.whl": "7",
            "some_thing-1.2-cp312-cp312-musllinux_1_2_x86_64.whl": "8",
            "some_thing-1.2.1-py3-none-any.whl": "9",
            "some_thing-1.2.tar.gz": "a",
            "not a wheel.whl": "b",
        }.items()
    )
    assert LOCK.fitting(page, "1.2") == [digit * 64 for digit in "1234"]


@pytest.mark.parametrize(
    ("base", "torch", "refused"),
    [
        (f"docker.io/library/python:3.12-slim@{DIGEST}", f"https://example.org/torch.whl#{DIGEST.replace(':', '=')}", None),
        ("", "", "BASE"),
        ("python:3.12-slim", "", "BASE"),
        (f"python:3.12-slim@{DIGEST[:-1]}", "", "BASE"),
        (f"python:3.12-slim@{DIGEST}", "", "TORCH"),
        (f"python:3.12-slim@{DIGEST}", "torch==2.13.0", "TORCH"),
        (f"python:3.12-slim@{DIGEST}", "https://example.org/torch.whl", "TORCH"),
        (f"python:3.12-slim@{DIGEST}", f"http://example.org/torch.whl#{DIGEST.replace(':', '=')}", "TORCH"),
    ],
)
def test_the_container_takes_no_base_and_no_torch_without_a_digest(base, torch, refused):
    """The build's own check, run by a shell."""
    script = re.search(r"RUN (case .*?esac)\nCOPY", CONTAINER, re.S)[1].replace("\\\n", " ")
    done = subprocess.run(["sh", "-c", script], env={"BASE": base, "TORCH": torch}, capture_output=True, text=True)
    assert done.returncode == (refused is not None)
    assert done.stderr.startswith(f"{refused}=") if refused else done.stderr == ""


def test_the_container_installs_nothing_else():
    assert re.findall(r"^(?:ARG|FROM) .*", CONTAINER, re.M) == ["ARG BASE", "FROM ${BASE}", "ARG BASE", "ARG TORCH"]
    installs = [words.rstrip(" \\") for words in re.findall(r"pip install ([^\n&]*)", CONTAINER)]
    assert len(installs) == 3 and all("--no-deps" in words for words in installs)
    assert "--require-hashes --only-binary :all:" in installs[0] and '"${TORCH}"' in installs[1]
    assert installs[2].split()[-2:] == ["--no-build-isolation", "."]
    assert re.search(r"^USER effuse$", CONTAINER, re.M)


def unit(name) -> dict[str, list[str]]:
    """The keys of a unit's [Service], each with its values in order."""
    found, section = defaultdict(list), ""
    for line in (ROOT / "deploy" / f"effuse-{name}.service").read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found[key].append(value)
    return found


@pytest.mark.parametrize("name", ["join", "serve"])
def test_services_are_confined(name):
    """No capability, no other kernel interface, no other folder, no address but those that the operator adds."""
    service = unit(name)
    for key in (
        "NoNewPrivileges",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "LockPersonality",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "ProtectClock",
        "ProtectHostname",
        "PrivateTmp",
        "PrivateDevices",
        "RemoveIPC",
        "ProtectHome",
    ):
        assert service[key] == ["true"], key
    assert service["CapabilityBoundingSet"] == [""] and service["ProtectSystem"] == ["strict"]
    assert service["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    assert service["SystemCallArchitectures"] == ["native"] and service["UMask"] == ["0077"]
    assert service["IPAddressDeny"] == ["any"] and service["IPAddressAllow"] == ["localhost"]
    assert service["MemoryMax"] == ["80%"] and service["MemorySwapMax"] == ["0"] and service["TasksMax"] == ["512"]
    assert service["User"] == ["effuse"] and not any(key.startswith("ExecStartPre") for key in service)


REPORT = '{"dependencies": [{"name": "a", "version": "1", "vulns": [%s]}, {"name": "b", "version": "2", "vulns": []}%s]}'
WEAK = '{"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": ""}'
SKIPPED = ', {"name": "c", "skip_reason": "not on PyPI"}'


@pytest.mark.parametrize(
    ("printed", "code", "sentence"),
    [
        (REPORT % ("", ""), 0, "2 packages checked, 0 known weaknesses"),
        (REPORT % (WEAK, ""), 1, "a 1: PYSEC-1, mended in 1.1\n2 packages checked, 1 known weaknesses"),
        (REPORT % ("", SKIPPED), 2, "c: not checked, not on PyPI\n2 packages checked, 0 known weaknesses"),
        ("", 2, "the list of known weaknesses could not be reached, so nothing was checked: no route to host"),
        ('{"dependencies": null}', 2, "could not be reached"),
        ('{"dependencies": []}', 2, "nothing was checked: it named no package"),
        ('{"dependencies": [{"name": "c", "skip_reason": "not on PyPI"}]}', 2, "nothing was checked: not on PyPI"),
    ],
)
def test_an_audit_says_when_it_knows_nothing(printed, code, sentence, tmp_path):
    """With a program in pip-audit's place that prints this, and one line of error."""
    fake = tmp_path / "pip-audit"
    fake.write_text(f"#!{sys.executable}\nimport sys\nprint({printed!r})\nsys.exit('Traceback\\nno route to host')\n")
    fake.chmod(0o700)
    command = [sys.executable, str(ROOT / "tools" / "audit.py"), str(fake), str(ROOT / "constraints.txt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code and sentence in done.stdout, done
