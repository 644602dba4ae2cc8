"""Frameworks by their own command lines, as their users start them: ``python -m frameworks`` runs them bare and watched."""
