"""Tensor parallelism: ranks on hosts, started by MPI."""
