"""Writes a site file from the live cluster (`hpcjobs sites init`).

`slurm_config` asks the cluster and gives `partitions.ClusterFacts`; `draft` makes commented YAML of them, with the
user's answers. The parsers are pure and are tested with recorded answers.
"""
