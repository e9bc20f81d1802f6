#%Module1.0
# Modulefile of Environment Modules: copy it to hpcjobs/VERSION in a folder of MODULEPATH, and set the path of the installation.
set version [file tail [module-info name]]
set root /apps/hpcjobs/$version

proc ModulesHelp { } { puts stderr "Distributed training jobs on Slurm: hpcjobs --help, hpcjobs sites" }
module-whatis "submits distributed training jobs to Slurm"

# A folder with the command alone: the Python of the installation stays out of the way of the user's own.
prepend-path PATH $root/command
prepend-path HPCJOBS_SITE_PATH /apps/hpcjobs/site_configs
