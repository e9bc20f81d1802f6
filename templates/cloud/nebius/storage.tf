# The filesystem that all machines see: Nebius' own, or a disk that the head exports.

resource "nebius_compute_v1_filesystem" "shared" {
  count            = var.shared_kind == "virtiofs" ? 1 : 0
  parent_id        = var.project
  name             = "${var.name}-shared"
  type             = "NETWORK_SSD"
  block_size_bytes = 4096
  size_gibibytes   = var.shared_gb
  labels           = local.labels
}

resource "nebius_compute_v1_disk" "shared" {
  count            = var.shared_kind == "nfs" ? 1 : 0
  parent_id        = var.project
  name             = "${var.name}-shared"
  type             = "NETWORK_SSD"
  block_size_bytes = 4096
  size_gibibytes   = var.shared_gb
  labels           = local.labels
}
