"""Site files: their keys, where they are found, how they are read, and the policies of a centre."""
