"""The head node's side of rankwatch: the collector and everything that shows a run to a person. Never imports torch."""
