-- Modulefile of Lmod: copy it to hpcjobs/VERSION.lua in a folder of MODULEPATH, and set the path of the installation.
local root = "/apps/hpcjobs/" .. myModuleVersion()

help([[Distributed training jobs on Slurm. `hpcjobs --help`, `hpcjobs sites`.]])
whatis("Description: submits distributed training jobs to Slurm")

-- A folder with the command alone: the Python of the installation stays out of the way of the user's own.
prepend_path("PATH", pathJoin(root, "command"))
prepend_path("HPCJOBS_SITE_PATH", "/apps/hpcjobs/site_configs")
