"""What ranks know of each other: where each is, which frames it ran, what all have alike; and acting together."""
