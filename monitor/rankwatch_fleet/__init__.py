"""The archive of all runs of a site: written run by run, and asked which machines, modules and versions go bad."""
