"""What a rank says to the collector and hears from it; how it ends when it must."""
