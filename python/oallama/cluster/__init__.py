"""One model on several hosts: which device computes which layer, and what moves between them."""
