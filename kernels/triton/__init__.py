"""The same arithmetic on a GPU, in Triton. Needs torch and triton; `TRITON_INTERPRET=1` runs it on a CPU, slowly.

Whether a function is interpreted is fixed when it is defined, so a process either interprets or compiles.
"""
