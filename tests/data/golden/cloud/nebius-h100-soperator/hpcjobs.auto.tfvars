# nebius-h100 for Nebius' Soperator recipe (soperator/installations/example of its solutions library), written by hpcjobs
# VERSION from nebius-h100.yaml. Put it beside the recipe's own terraform.tfvars, which keeps the rest: versions, the
# system's and the controller's nodes, observability. Project, tenant, subnet and region come from the recipe's .envrc.

company_name = "nebius-h100"
production   = false

filestore_jail = {
  spec = {
    size_gibibytes       = 2048
    block_size_kibibytes = 4
  }
}
allow_empty_jail_submounts = true

slurm_nodeset_workers = [{
  name = "worker"
  size = 4
  autoscaling = {
    enabled  = true
    min_size = 1
  }
  resource = {
    platform = "gpu-h100-sxm"
    preset   = "8gpu-128vcpu-1600gb"
  }
  boot_disk = {
    type                 = "NETWORK_SSD"
    size_gibibytes       = 256
    block_size_kibibytes = 4
  }
  node_local_image_disk = {
    enabled = false
  }
  node_local_jail_submounts = []
  gpu_cluster = {
    infiniband_fabric = "fabric-2"
  }
}]

slurm_nodeset_login = {
  size = 1
  resource = {
    platform = "cpu-d3"
    preset   = "8vcpu-32gb"
  }
  boot_disk = {
    type                 = "NETWORK_SSD"
    size_gibibytes       = 256
    block_size_kibibytes = 4
  }
}

slurm_nodesets_partitions = [
  {
    name     = "main"
    is_all   = true
    topology = "tree-ib"
    config   = "Default=YES MaxTime=7-00:00:00 State=UP"
  },
  {
    name     = "hidden"
    is_all   = true
    topology = "flat"
    config   = "Default=NO Hidden=YES MaxTime=INFINITE State=UP"
  },
]

use_preinstalled_gpu_drivers     = true
slurm_login_public_ip            = true
slurm_login_ssh_root_public_keys = []
accounting_enabled               = true
backups_enabled                  = "force_disable"
