"""FedDiffuse: the methods, the published table and figure, and a better FULL of our own."""
