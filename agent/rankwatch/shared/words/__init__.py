"""What people read: causes, advice, reports, in words."""
