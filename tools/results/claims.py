"""What each paper claims, beside what was found here."""

from runs import accuracy, each, figure, less, mean, metric, read, result, results, rows

HEAD = ("claim", "printed", "ours", "verdict", "scale", "more")
PARTS = ("usplit", "ulatdec", "udec")


def feddiffuse() -> str:
    page = "[page](feddiffuse.md)"
    plain = metric(results("feddiffuse.ablation-paper/plain", (2023, 2024, 2025)), "fid_clipped")
    ten = metric([result("feddiffuse.table1-paper/full-10-iid")], "fid_clipped")
    sent = {name: read(f"feddiffuse.traffic/{name}-5.json")["traffic"]["parameters"]["total"] for name in ("full", *PARTS)}
    saved = ", ".join(f"{100 * (1 - sent[name] / sent['full']):.1f}" for name in PARTS)
    return rows(
        HEAD,
        [
            ["FULL, five IID clients: clipped FID", "39 ± 4", f"{mean(plain)}, three seeds", "reproduced", "paper", page],
            ["FULL, ten IID clients", "61 ± 2", f"{mean(ten)}, one run", "reproduced", "paper", page],
            [
                "USPLIT, ULATDEC, UDEC, five IID clients",
                "41 ± 5, 53 ± 15, 51 ± 15",
                "43.2, 59.2, 58.2, one run each †",
                "reproduced",
                "paper",
                page,
            ],
            [
                "FULL with label and with quantity skew",
                "43 ± 4, 23 ± 5",
                "60.8, 39.8, one run each †",
                "contradicted, by one run each; the cause is open",
                "paper",
                page,
            ],
            [
                "USPLIT, ULATDEC, UDEC send less than FULL, by %",
                "25, 41, 74",
                f"{saved}, counted",
                "reproduced",
                "paper",
                "[traffic](../feddiffuse.md)",
            ],
        ],
    )


def fedddpm() -> str:
    page, table = "[page](fedddpm.md)", "fedddpm.comparison-scaled"
    ours, plus, fedavg, alone = (results(f"{table}/{name}-shard") for name in ("fedddpm", "plus", "fedavg", "aux_only"))
    real = metric(results("fedddpm.causes-scaled/real"), "fid")
    aux = mean(metric(ours, "fid_auxiliary"))
    fid = {"ours": metric(ours, "fid"), "plus": metric(plus, "fid"), "fedavg": metric(fedavg, "fid")}
    return rows(
        HEAD,
        [
            [
                "MNIST, shards: FedDDPM and FedDDPM+ are ahead of FedAvg; FID",
                "1.91, 2.19; 5.82",
                f"{mean(fid['ours'])}, {mean(fid['plus'])}; {mean(fid['fedavg'])}",
                f"not testable at this scale: the auxiliary set A has FID {aux}, printed 1.34",
                "a tenth",
                page,
            ],
            [
                "the same, where A is good",
                "",
                f"{mean(real)} with real images as A; less FedAvg, by seed: {mean(less(real, fid['fedavg']))}",
                "reproduced under this condition",
                "a tenth",
                page,
            ],
            [
                "a model that saw A alone is behind FedDDPM",
                "4.20; 1.91",
                f"{mean(metric(alone, 'fid'))}; {mean(fid['ours'])}",
                "not testable at this scale, for the same reason",
                "a tenth",
                page,
            ],
        ],
    )


def fedphd() -> str:
    page, table = "[page](fedphd.md)", "fedphd.comparison-scaled"
    one, five, pruned = (results(f"{table}/{name}") for name in ("fedavg-e1", "fedavg", "fedphd-44"))
    iid = mean(metric(results(f"{table}/fedavg-iid"), "fid"))
    first = mean(metric(five[:1], "fid"))
    counted = {
        name: read(f"fedphd.table4/{name}/check.json")["figures"]
        for name in ("fedavg", "fedavg-e1", "scaffold", "fedphd-os")
    }
    small, cost = counted["fedphd-os"], figure("paper_cost")
    return rows(
        HEAD,
        [
            [
                "CIFAR-10, two classes a client: FedPhD is ahead of FedAvg with one and with five local epochs; FID",
                "16.7; 17.2, 24.5",
                f"{mean(metric(pruned, 'fid'))}; {mean(metric(one, 'fid'))}, {mean(metric(five, 'fid'))}",
                f"not testable: on seed 0 FedAvg has {iid} on IID data, {first} on two classes a client; the setting sees no skew",
                "a hundredth of the images",
                page,
            ],
            [
                "pruned by 44 %: parameters in M, GMAC",
                "20.3, 3.42",
                f"{small['parameters_m']:.1f}, {small['gmacs']:.2f}, counted",
                "reproduced",
                "paper",
                "[pruning](../fedphd.md)",
            ],
            [
                "cost of a cloud round: FedAvg, FedAvg with one epoch, SCAFFOLD, FedPhD",
                "109.2, 546.1, 218.4, 65.5",
                f"{each([figures['paper_cost'] for figures in counted.values()])}, counted",
                "reproduced",
                "paper",
                "[costs](../fedphd.md)",
            ],
            [
                "FedPhD saves, of the cost of FedAvg with one epoch, %",
                "88",
                f"{100 * (1 - cost(pruned[0]) / cost(one[0])):.0f}, over a whole run",
                "reproduced, by the paper's ledger",
                "a hundredth of the images",
                page,
            ],
        ],
    )


def feddiff() -> str:
    page = "[page](feddiff.md)"
    drawn, real = (mean(accuracy(results(f"feddiff.digits/{name}"))) for name in ("digits", "real"))
    low, high = (
        ", ".join(
            mean(accuracy(results(f"feddiff.table{table}-scaled/nearest_mean-{data}-{epsilon}")))
            for data in ("fashion", "cifar10")
        )
        for table, epsilon in ((5, 1), (4, 10))
    )
    private = {
        name: mean(accuracy(results(f"feddiff.private_comparison/{name}", range(5))))
        for name in ("paper", "additions", "class_means")
    }
    return rows(
        HEAD,
        [
            [
                "a classifier that saw drawn images only is near one that saw real ones; accuracy in %",
                "86.8 on Fashion-MNIST",
                f"digits: {drawn}; real digits {real}",
                "reproduced on digits; Fashion-MNIST was not run",
                "digits",
                page,
            ],
            [
                "at epsilon 1: Fashion-MNIST, CIFAR-10",
                "65.5, 21.5",
                f"nearest noisy class mean, nothing is trained: {low}",
                "FedDiff was not run; its printed figures are behind this bar",
                "scaled",
                page,
            ],
            [
                "at epsilon 10: the same",
                "73.4, 27.8",
                f"nearest noisy class mean: {high}",
                "FedDiff was not run; its printed figures are ahead on Fashion-MNIST alone",
                "scaled",
                page,
            ],
            [
                "under privacy a generator is worth its share of the budget",
                "",
                f"digits at epsilon 10: FedDiff {private['paper']}, with additions {private['additions']}; "
                f"class means alone {private['class_means']}",
                "contradicted on digits",
                "digits",
                page,
            ],
        ],
    )


def feddifrc() -> str:
    page, table = "[page](feddifrc.md)", "feddifrc.digits"
    ours = []
    for scenario, name in (("dirichlet", "Dirichlet 0.05"), ("nid2", "NID2")):
        found = {m: accuracy(results(f"{table}/{scenario}-{m}"), "accuracy_last5") for m in ("fedavg", "own", "vectors")}
        guide, vectors = (mean(less(found[method], found["fedavg"])) for method in ("own", "vectors"))
        ours.append(f"{name}: guide {guide or 'not run'}, class vectors {vectors or 'not run'}")
    return rows(
        HEAD,
        [
            [
                "guided by Stable Diffusion: ahead of FedAvg by, points",
                "4.9",
                "",
                "not testable here: its weights are not at hand",
                "",
                page,
            ],
            ["the same with a guide that the federation trained", "", "; ".join(ours), "VERDICT", "digits", page],
        ],
    )
