"""Ask for known weaknesses of the pinned packages: python tools/audit.py PIP_AUDIT REQUIREMENTS.

Exit codes: 0 none is known, 1 some are, 2 the list of weaknesses could not be reached, so nothing is known.
"""

import json
import subprocess
import sys

NONE, SOME, UNREACHED = 0, 1, 2


def main(pip_audit: str, requirements: str) -> int:
    """Print what is known of each package, in a sentence for each weakness."""
    command = [
        pip_audit,
        "--requirement",
        requirements,
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = list(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError, TypeError):
        why = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        print(f"the list of known weaknesses could not be reached, so nothing was checked: {why}")
        return UNREACHED
    skipped = [package for package in found if "skip_reason" in package]
    if len(skipped) == len(found):  # as where the index is a mirror without PyPI's list
        why = skipped[0]["skip_reason"] if skipped else "it named no package"
        print(f"the list of known weaknesses could not be reached, so nothing was checked: {why}")
        return UNREACHED
    weak = [(package, weakness) for package in found for weakness in package.get("vulns", ())]
    for package in skipped:
        print(f"{package['name']}: not checked, {package['skip_reason']}")
    for package, weakness in weak:
        fixed = ", ".join(weakness["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {weakness['id']}, mended in {fixed}")
    print(f"{len(found) - len(skipped)} packages checked, {len(weak)} known weaknesses")
    return SOME if weak else UNREACHED if skipped else NONE


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
