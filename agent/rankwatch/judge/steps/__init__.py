"""The steps of optimizers: how many there were, what each changed, and the losses that wait for one."""
