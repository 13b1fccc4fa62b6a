"""Static facts that markers carry about a parameter, and the request that a backward graph is lowered for."""
