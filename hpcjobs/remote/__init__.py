"""Runs a laptop's commands by hpcjobs on the login host, over the user's own OpenSSH."""
