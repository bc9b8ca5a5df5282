"""FedDDPM and its rivals: the methods, the published tables, and our own comparison."""
