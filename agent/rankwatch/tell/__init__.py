"""The rank's connection to the collector, and how the rank ends after a verdict."""
