"""FedDifRC: classifiers guided by a denoiser, their rivals and controls."""
