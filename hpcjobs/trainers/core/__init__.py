"""What every trainer shares: flags, the group, data, the loop, and the record of a run."""
