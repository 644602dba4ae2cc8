"""What goes to the disk: records, reports and traces, each in the folder of its run."""
