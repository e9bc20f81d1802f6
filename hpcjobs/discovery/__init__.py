"""Writes a site file from the live cluster (`hpcjobs sites init`).

`read` asks the cluster and gives a `facts.Cluster`; `draft` turns it, with the user's answers, into a `proposal.Draft`;
`text` writes that as commented YAML. The parsers are pure and are tested with recorded answers.
"""
