"""Numbers -> trips and notices, batch by batch."""
