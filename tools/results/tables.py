"""The tables of the pages: every finished run of a comparison, by method."""

from runs import accuracy, each, figure, gigabytes, less, mean, megabytes, metric, result, results, rows

from effuse.runs.records import Result


def feddiffuse() -> str:
    years = (2023, 2024, 2025)
    names = {
        "tuned": "`feddiffuse.tuned`",
        "plain": "FULL as printed",
        "centralised-tuned": "`tuned`'s values, all data in one place",
        "without-rate": "`tuned` without its rate: 1e-4",
        "without-decay": "without decay",
        "without-velocity": "without velocity",
        "without-norm": "without clipped gradients",
        "without-batch": "without batches of 64",
        "without-kept": "without kept moments",
        "without-start": "without the slow start",
        "without-cosine": "without the cosine schedule",
    }
    tuned = metric(results("feddiffuse.ablation-paper/tuned", years), "fid")
    body = []
    for method, name in names.items():
        found = results(f"feddiffuse.ablation-paper/{method}", years)
        fid = metric(found, "fid")
        body.append([name, each(fid), mean(fid), mean(metric(found, "fid_clipped")), mean(metric(found, "kid"), 4)])
        body[-1].append("" if method == "tuned" else mean(less(fid, tuned)))
    return rows(
        ["FULL, five IID clients", "FID, seeds 2023 to 2025", "FID", "FID, clipped", "KID", "less `tuned`, by seed"], body
    )


def fedddpm(partition: str) -> str:
    names = {
        "fedavg": "FedAvg",
        "fedavg_matched": "FedAvg, FedDDPM's number of steps",
        "fedprox": "FedProx",
        "scaffold": "SCAFFOLD",
        "mofedsam": "MoFedSAM",
        "localaug": "LocalAug",
        "fedddpm": "FedDDPM",
        "plus": "FedDDPM+",
        "aux_only": "`aux_only`: ten times as large an A, nothing else",
        "centralised": "all data in one place",
        "local_only": "each site alone, drawing together",
    }
    base = metric(results(f"fedddpm.comparison-scaled/fedavg-{partition}"), "fid")
    body = []
    for method, name in names.items():
        found = results(f"fedddpm.comparison-scaled/{method}-{partition}")
        if not found:
            continue
        fid = metric(found, "fid_pooled" if method == "local_only" else "fid")
        aux = metric(found, "fid_auxiliary") if "fid_auxiliary" in found[0].metrics else []
        behind = "" if method == "fedavg" else mean(less(fid, base))
        body.append([name, each(fid), mean(fid), behind, mean(aux), gigabytes_of(found)])
    return rows(["method", "FID, seeds 0, 1, 2", "FID", "less FedAvg, by seed", "FID of A", "GB sent"], body)


def gigabytes_of(found: list[Result]) -> str:
    sent = [gigabytes(one) for one in found]
    return f"{sent[0]:.2f}" if max(sent) - min(sent) < 0.01 else each(sent, 2)


def fedphd() -> str:
    names = {
        "fedavg-e1": "FedAvg, one epoch a round",
        "fedavg": "FedAvg, five",
        "fedphd-0": "FedPhD, unpruned",
        "fedphd-44": "FedPhD, 44 %",
        "fedphd-os": "FedPhD, one-shot, 44 %",
        "fedphd-44-random-edges": "FedPhD, 44 %, random edges",
        "fedphd-44-weights-by-size": "FedPhD, 44 %, weights by size",
        "fedphd-44-unregularised": "FedPhD, 44 %, no regulariser",
        "fedphd-0-neither": "FedPhD, unpruned, neither part",
        "fedphd-25": "FedPhD, 25 %",
        "fedphd-61": "FedPhD, 61 %",
        "fedphd-74": "FedPhD, 74 %",
        "moon": "MOON",
        "feddiffuse-udec": "FedDiffuse, UDEC, the pool",
        "feddiffuse-usplit": "FedDiffuse, USPLIT",
        "fedprox-0.001": "FedProx, mu = 0.001",
        "fedprox": "FedProx, mu = 1",
        "scaffold-e1": "SCAFFOLD, one epoch",
        "scaffold": "SCAFFOLD, five",
        "fedavg-iid": "FedAvg, five, on IID data",
        "centralised": "all data in one place",
    }
    base = metric(results("fedphd.comparison-scaled/fedavg-e1"), "fid")
    body = []
    for method, name in names.items():
        found = results(f"fedphd.comparison-scaled/{method}")
        suffix = "_pooled" if method == "feddiffuse-udec" else ""
        fid = metric(found, f"fid{suffix}")
        row = [name, each(fid), mean(fid), "" if method == "fedavg-e1" else mean(less(fid, base))]
        row += [
            each(metric(found, f"kid{suffix}"), 3),
            f"{figure('parameters_m')(found[0]):.2f}",
            f"{gigabytes(found[0]):.1f}",
        ]
        body.append([*row, f"{figure('paper_cost')(found[0]):,.0f}", f"{figure('symmetric_cost')(found[0]):,.0f}"])
    return rows(
        [
            "method",
            "FID, seeds 0, 1, 2",
            "FID",
            "less the first, by seed",
            "KID",
            "parameters, M",
            "GB, all links",
            "cost, paper's ledger",
            "cost, both ways alike",
        ],
        body,
    )


def digits() -> str:
    names = {"digits": "drawn digits (`feddiff.digits`)", "real": "real digits, in one place (`feddiff.real_digits`)"}
    body = []
    for method, name in names.items():
        found = results(f"feddiff.digits/{method}")
        body.append([name, each(accuracy(found)), mean(accuracy(found))])
    return rows(["trained on", "seeds 0, 1, 2", "mean"], body)


def private() -> str:
    names = {
        "class_means": "`class_means`: a classifier on noisy class means, no generator",
        "nearest_mean": "`nearest_mean`: the nearest of the same means",
        "additions": "`additions`: FedDiff with every addition",
        "means": "`means`: FedDiff that starts from noisy class means",
        "batch": "`batch`: FedDiff with whole-site batches",
        "ema": "`ema`: FedDiff with averaged weights",
        "repeats": "`repeats`: FedDiff with four noise draws an image",
        "paper": "`paper`: FedDiff as printed",
    }
    table, seeds = "feddiff.private_comparison", range(5)
    base = accuracy(results(f"{table}/class_means", seeds))
    body = []
    for method, name in names.items():
        ours = accuracy(found := results(f"{table}/{method}", seeds))
        sent = f"{megabytes(found[0]):.2f}" if found else ""
        row = [name, each(ours) or "not run", mean(ours), "" if method == "class_means" else mean(less(ours, base))]
        body.append([*row, sent])
    return rows(["method", "seeds 0 to 4", "mean", "less `class_means`, by seed", "MB sent"], body)


def bars() -> str:
    data = {"fashion": "Fashion-MNIST", "cifar10": "CIFAR-10"}
    printed = {
        ("fashion", 1): "65.5 ± 0.7",
        ("fashion", 10): "73.4 ± 1.5",
        ("cifar10", 1): "21.5 ± 1.5",
        ("cifar10", 10): "27.8 ± 1.7",
    }
    body = []
    for name, title in data.items():
        ours = [mean(accuracy(results(f"feddiff.table{t}-scaled/nearest_mean-{name}-{e}")), 2) for t, e in ((5, 1), (4, 10))]
        body.append([title, *ours, printed[name, 1], printed[name, 10]])
    return rows(["", "epsilon 1", "epsilon 10", "FedDiff as printed, epsilon 1", "epsilon 10"], body)


def feddifrc(scenario: str) -> str:
    names = {
        "fedavg": "FedAvg",
        "vectors": "FedDifRC, random class vectors",
        "own": "FedDifRC, own guide",
        "own_tdcl": "the same, TDCL alone",
        "own_ndcr": "the same, NDCR alone",
    }
    table, guides = "feddifrc.digits", results(f"feddifrc.digits/{scenario}-guide")
    base, controls = (accuracy(results(f"{table}/{scenario}-{m}"), "accuracy_last5") for m in ("fedavg", "vectors"))
    body = []
    for method, name in names.items():
        found = results(f"{table}/{scenario}-{method}")
        if not found:
            body.append([name, *["not run"] * 2, "", "", "", ""])
            continue
        ours, guide = accuracy(found, "accuracy_last5"), method.startswith("own")
        row = [name, each(ours), mean(ours), "" if method == "fedavg" else mean(less(ours, base))]
        row += [mean(less(ours, controls)) if guide else "", f"{megabytes(found[0]):.0f}"]
        body.append([*row, f"{megabytes(guides[0]):,.0f}" if guide else ""])
    return rows(
        [
            "method",
            "seeds 0, 1, 2",
            "mean",
            "less FedAvg, by seed",
            "less class vectors",
            "MB sent",
            "MB for the guide's training",
        ],
        body,
    )


def one(run: str, name: str = "fid_clipped") -> str:
    return f"{result(run).metrics[name].value:.1f}"
