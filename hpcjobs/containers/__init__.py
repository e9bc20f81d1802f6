"""Images: which there are, what is in them, how they are built, and whether they fit a site."""
