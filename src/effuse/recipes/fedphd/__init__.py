"""FedPhD: the methods, the published tables, and our own comparison."""
