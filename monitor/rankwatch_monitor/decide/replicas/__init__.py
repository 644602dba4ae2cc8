"""Whether replicas are alike: their fingerprints compared, and where they first came apart."""
