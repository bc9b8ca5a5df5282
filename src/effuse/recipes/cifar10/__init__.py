"""Our own recipe for CIFAR-10 with two classes a client: its changes, tuning, controls and ablation."""
