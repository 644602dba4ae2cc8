"""How a run ends: the rules, the abort, ranks that are silent, save, or outlive their command."""
