# The filesystem that all machines see: a disk which the head exports, or a filestore.

locals {
  # The BASIC tiers speak NFSv3 alone.
  shared_protocol = startswith(var.shared_tier, "BASIC_") ? "NFS_V3" : "NFS_V4_1"
}

resource "google_compute_disk" "shared" {
  count  = var.shared_kind == "nfs" ? 1 : 0
  name   = "${var.name}-shared"
  zone   = var.zone
  type   = "pd-balanced"
  size   = var.shared_gb
  labels = local.labels

  dynamic "disk_encryption_key" {
    for_each = var.kms_key == null ? [] : [var.kms_key]
    content {
      kms_key_self_link = disk_encryption_key.value
    }
  }

  depends_on = [google_project_service.used]
}

resource "google_filestore_instance" "shared" {
  count        = var.shared_kind == "filestore" ? 1 : 0
  name         = "${var.name}-shared"
  location     = contains(["REGIONAL", "ENTERPRISE"], var.shared_tier) ? var.region : var.zone
  tier         = var.shared_tier
  protocol     = local.shared_protocol
  labels       = local.labels
  kms_key_name = var.kms_key

  file_shares {
    name        = "shared"
    capacity_gb = var.shared_gb
  }

  networks {
    network = google_compute_network.cluster.name
    modes   = ["MODE_IPV4"]
  }
}
