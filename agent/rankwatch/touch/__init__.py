"""What of torch and of the interpreter we touch: what is private, what we put something around, and how the stack is read."""
