"""Which ranks are compared: those that share parameters, gather shards, or must be fed different data."""
