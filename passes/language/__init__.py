"""What the passes speak: markers, what they say of a parameter, and what a backward is asked for."""
