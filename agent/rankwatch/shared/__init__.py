"""What both sides speak: frames, causes, notices, messages and their codec, options, text. Free of torch."""
