"""FedPhD: the methods, the published tables, and a comparison of our own."""
