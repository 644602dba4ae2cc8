"""The record of a run: the store writes facts into ``run.db``, RunRecord reads them for the views."""
