"""The doctor: whether the ranks of a job can train together, and if not, who is to blame.

``torchrun --nproc-per-node 2 --nnodes 1 -m rankwatch.doctor``, or the same by srun. Rank 0 leads: it gives orders by a store,
each rank checks what it is told to, within a time limit of its own, and answers by the store. So a collective that hangs is an
answer like any other, and rank 0 alone prints.
"""
