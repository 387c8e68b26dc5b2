"""What the CPU operators are made of: vectors, matrix tiles, and threads that share one compiled job.

Everything here is compiled by Numba at first use and cached on disk; no C compiler is needed. ``vectors``
gives kernels sixteen float32 lanes with explicit loads (LLVM splits them on CPUs with narrower
registers), ``maths`` has exp, softplus and silu on them, ``matmul`` is the product of a few rows with a
weight of any stored precision, ``threads`` runs a job on several threads.
"""
