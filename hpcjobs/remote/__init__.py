"""The same commands from a laptop: run by hpcjobs on the login host, over the user's own OpenSSH."""
