"""Which layers go to which device: the problem, its costs, its solvers."""
