"""Agreement of ranks: their statuses, the frames they ran, comparisons, and actions that succeed on all or none."""
