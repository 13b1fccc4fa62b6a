"""What markers say of a parameter, and what a backward is asked for."""
