"""Container images: find, inspect and build them, and check whether they fit a site."""
