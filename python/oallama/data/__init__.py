"""What planning, profiling and the commands share: plans, operators, profiles, budgets, workloads. No engine."""
