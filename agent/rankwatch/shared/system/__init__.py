"""This process and its machine: identity, processes, logs, the terminal, the kernel's timers and queues."""
