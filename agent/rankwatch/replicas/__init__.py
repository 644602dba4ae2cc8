"""Parameters that ranks must hold alike, that must move, and that must stay tied: what each rank takes of them and tells."""
