"""What can be run and was not, with the GPU hours that it would take."""

from runs import rows

LARGE = 8_430  # images/s of one H200 that trains the network of 35.7 M parameters (docs/performance.md)


def hours(images: float) -> str:
    return f"{images / LARGE / 3600:.0f}"


def not_run() -> str:
    # FedDDPM on CIFAR: 600 rounds of 15 or of 30 clients with 500 images and 5 epochs, under 3 partitions.
    # Six methods, of which MoFedSAM takes two gradients a step.
    rounds = 7 * 3 * 600 * (15 + 30) * 500 * 5
    # FedDDPM's corrections in six cells, and the warm-ups of FedDDPM and FedDDPM+
    corrections = 6 * 600 * 5 * 5_000
    cifar10, cifar100 = (rounds + corrections + 12 * 100 * 500 * epochs for epochs in (400, 600))
    fedphd = 14 * 10_000 * 0.2 * 50_000
    minutes = 25  # of one FedDiff cell: 200 epochs, 60,000 images of 1,000 steps
    return rows(
        ["what", "command", "runs", "GPU hours"],
        [
            ["FedDDPM, Table 2 (CIFAR-10)", "`effuse reproduce fedddpm.table2`", "36", hours(cifar10)],
            ["FedDDPM, Table 3 (CIFAR-100)", "`effuse reproduce fedddpm.table3`", "36", hours(cifar100)],
            ["FedPhD, Table V (50 and 100 clients)", "`effuse reproduce fedphd.table5`", "14", hours(fedphd)],
            [
                "FedDiff at Dirichlet 0.001",
                "`effuse reproduce feddiff.table1 --only method=feddiff,alpha=0.001`",
                "9",
                f"{9 * minutes / 60:.0f}",
            ],
            [
                "FedDiff with 5 and 20 clients",
                "`effuse reproduce feddiff.table2 --only method=feddiff,clients=5,clients=20`",
                "18",
                f"{18 * minutes / 60:.0f}",
            ],
            ["FedDiffuse, the rest of Table 1", "`effuse reproduce feddiffuse.table1`", "28", f"{28 * 240 / 3600:.0f}"],
        ],
    )
