"""FedDiffuse: the methods, the published table and figure, and our own improvement of FULL."""
