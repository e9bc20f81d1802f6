"""Jobs of one machine without Slurm.

The rest of hpcjobs uses `client`. The supervisor of a job runs `supervisor`, `queue`, `policy`, `runner`, `records`,
`gpus` and `job_folder` without site-packages: these import only the standard library and `hpcjobs.processes`.
"""
