"""The doctor checks whether the ranks of a job can train together, and names the node or pair of nodes that cannot.

``torchrun --nproc-per-node 2 --nnodes 1 -m rankwatch.doctor``, or the same by srun. Rank 0 leads: it sends orders through
a store; each rank runs the checks of an order within a time limit and answers through the store. A collective that hangs is
therefore a result like any other. Only rank 0 prints.
"""
