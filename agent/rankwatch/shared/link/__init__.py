"""The link between a rank and the collector: the wire format, sockets, the connection file."""
