"""Jobs of one machine without Slurm.

The rest of hpcjobs uses `client`. The supervisor of a job runs `supervisor` and `queue` without site-packages: they
import only the standard library, `hpcjobs.files` and `hpcjobs.processes`.
"""
