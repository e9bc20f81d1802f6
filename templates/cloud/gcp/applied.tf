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
    region            = var.region
    zone              = var.zone
    machine_type      = var.machine_type
    gpu_type          = var.gpu_type
    gpu_count         = var.gpu_count
    image             = var.image
    head_machine_type = var.head_machine_type
    head_image        = var.head_image
    kms_key           = var.kms_key
    shared_kind       = var.shared_kind
    shared_tier       = var.shared_tier
    cidr              = var.cidr
    reservation       = var.reservation
    secure_boot       = var.secure_boot
    scopes            = var.scopes
  }
}
