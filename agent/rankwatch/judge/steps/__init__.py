"""The steps of optimizers: how many there were, what each changed, and what waits for one."""
