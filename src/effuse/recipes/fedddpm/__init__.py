"""FedDDPM and its rivals: the methods, the published tables, and a comparison of our own."""
