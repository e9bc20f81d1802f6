# All variables, for `hpcjobs cloud down`: what was typed when the cluster was built stands in its state.

output "variables" {
  description = "What the cluster was built with."
  value = {
    name              = var.name
    nodes             = var.nodes
    nodes_min         = var.nodes_min
    nodes_max         = var.nodes_max
    boot_disk_gb      = var.boot_disk_gb
    boot_disk_type    = var.boot_disk_type
    shared_gb         = var.shared_gb
    ssh_from          = var.ssh_from
    open_to_world     = var.open_to_world
    ssh_keys          = var.ssh_keys
    ssh_user          = var.ssh_user
    first_job         = var.first_job
    spot              = var.spot
    labels            = var.labels
    project           = var.project
    platform          = var.platform
    preset            = var.preset
    image_family      = var.image_family
    head_platform     = var.head_platform
    head_preset       = var.head_preset
    head_image_family = var.head_image_family
    fabric            = var.fabric
    shared_kind       = var.shared_kind
    subnet            = var.subnet
    reservation       = var.reservation
    service_account   = var.service_account
  }
}
